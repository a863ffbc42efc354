"""Sentences about a choice, for results made by hand."""

from dataclasses import replace

import pytest
from tests.tuner.reports import in_words

from cellfeed_tuner import Estimate
from cellfeed_tuner._machine import BytesRead
from cellfeed_tuner._results import Waiting


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        (
            Waiting(share=Estimate(0.125, 0.1, 0.15), n_rounds=8, expected_share=0.2),
            (
                "With a training step of 5 ms, training waits for data 12.5% [10.0%, 15.0%] of "
                "the time, measured over 8 whole fetches per worker."
            ),
        ),
        (
            Waiting(share=Estimate(0.125, 0.0, 1.0), n_rounds=1, expected_share=0.2),
            (
                "With a training step of 5 ms, training waits for data 12.5% of the time, "
                "measured over 1 whole fetch per worker, too few to rely on."
            ),
        ),
        (
            Waiting(share=None, n_rounds=0, expected_share=0.2),
            (
                "Not timed with a training step of 5 ms (budget exhausted); judging by its "
                "throughput, training would wait for data 20.0% of the time."
            ),
        ),
    ],
)
def test_how_long_training_waits(result_of, waiting, expected):
    result = result_of("recommended")
    result = replace(
        result,
        constraints=replace(result.constraints, step_seconds=0.005),
        recommended=replace(result.recommended, waiting=waiting),
    )
    assert expected in in_words("waiting", result)
    assert result.to_json()["recommended"]["waiting"]["n_rounds"] == waiting.n_rounds


@pytest.mark.parametrize(
    ("cache", "amplification", "expected"),
    [
        (
            "cold",
            3.0,
            (
                "A cell takes 5.0 kB in storage; for each cell delivered, the loader requested "
                "1.5x that, and the system read 3.0x that from storage."
            ),
        ),
        (
            "warm",
            1.5,
            (
                "A cell takes 5.0 kB in storage; for each cell delivered, the loader requested "
                "1.5x that."
            ),
        ),
    ],
)
def test_what_is_read(result_of, cache, amplification, expected):
    result = result_of("recommended")
    chosen = result.recommended.configuration
    configurations = tuple(
        replace(each, bytes_read_per_cell=BytesRead(7_500.0, 15_000.0))
        if each.configuration == chosen
        else each
        for each in result.configurations
    )
    result = replace(result, cache=cache, configurations=configurations)
    assert expected in in_words("reading", result)
    assert result.chosen is not None
    assert result.read_amplification(result.chosen) == amplification


@pytest.mark.parametrize(
    ("depth", "kind", "said"),
    [
        (16, "reading", "Reading further ahead still helps, so latency limits throughput."),
        (4, "reading", "latency is hidden: the bandwidth of the link or the server limits"),
        (4, "decompressing", "Reading further ahead does not help, so latency is hidden."),
        (None, "reading", "of stored chunks are read."),
    ],
)
def test_what_limits_reading_from_a_server(result_of, depth, kind, said):
    result, found = result_of("remote"), result_of("explained").bottleneck
    result = replace(
        result,
        dataset=replace(result.dataset, cache_bytes=0),
        recommended=replace(result.recommended, prefetch=depth),
        bottleneck=replace(found, kind=kind),
    )
    (line,) = in_words("link", result)
    assert line.startswith("53.1 MB per second of stored chunks are read")
    assert said in line
    assert in_words("link", replace(result, cache="cold")) == []
    assert in_words("link", replace(result, bottleneck=None)) == []
    cached = replace(result, dataset=replace(result.dataset, cache_bytes=10**9))
    assert in_words("link", cached) == []
