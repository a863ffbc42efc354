"""What earlier runs have left, and results of every kind, by hand."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from optuna.distributions import IntDistribution
from optuna.trial import TrialState, create_trial

from cellfeed_tuner import (
    AutotuneResult,
    Bottleneck,
    Busy,
    Configuration,
    ConfigurationResult,
    Constraints,
    Dataset,
    EntropyBits,
    Estimate,
    LabelCensus,
    LabelResult,
    Machine,
    Nearest,
    PrefetchResult,
    Ranges,
    Ranks,
    Recommended,
    Rival,
    Stage,
    StageModel,
    StorageAdvice,
    StorageOrder,
    Verdict,
)
from cellfeed_tuner._history import EarlierRun, Key, RunSettings, fingerprint, record
from cellfeed_tuner._history import cache_folder as folder_of_runs
from cellfeed_tuner._interval import quotient
from cellfeed_tuner._machine import BytesRead, Cpu, Memory, Platform, Storage
from cellfeed_tuner._results import Waiting


@pytest.fixture(autouse=True)
def cache_folder(cache_folder_of_session, tmp_path_factory, monkeypatch):
    """Each test has a cache folder of its own: what one finds, another does not know."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("CELLFEED_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(scope="session")
def earlier_run():
    """Make a run from the seconds per cell that it measured; others of its facts may be given."""

    def make(costs, *, machine="here", data="cells", versions="1", choice=None, **changes):
        key = Key(
            data=fingerprint(
                {"n_files": 2, "n_cells": 3000, "n_vars": 50, "bytes_on_disk": 10**6, "of": data}
            ),
            machine=fingerprint(
                {
                    "cpu": f"cpu of {machine}",
                    "usable_cores": 2.0,
                    "memory_gb": 16,
                    "storage": [{"file_system": "ext4"}],
                }
            ),
            versions=fingerprint({"cellfeed": versions}),
        )
        n_ranks = changes.pop("n_ranks", 1)
        settings = RunSettings(
            labels=changes.pop("labels", ["plate"]),
            batch_size=changes.pop("batch_size", 64),
            cache=changes.pop("cache", "cold"),
            ranks=Ranks(n_local=n_ranks, n_total=changes.pop("world_size", n_ranks)),
        )
        choice = choice or min(costs, key=costs.__getitem__)
        speed = 1 / costs[choice]
        facts: dict[str, Any] = {
            "began": "2026-11-20T10:00:00.000+00:00",
            "path": "plates/plate0.h5ad",
            "cells_per_second": Estimate(speed, 0.9 * speed, 1.1 * speed),
        } | changes
        trials = {
            configuration: tuple(cost * factor for factor in (0.99, 1.01) * 2)
            for configuration, cost in costs.items()
        }
        return EarlierRun(key=key, settings=settings, choice=choice, trials=trials, **facts)

    return make


@pytest.fixture(scope="session")
def trials_of():
    """Return the trials of a study that measured what a run did; one without replicates failed."""

    def make(run, *, pruned=()):
        sizes = ("block_size", "fetch_factor", "num_workers")
        return [
            create_trial(
                state=TrialState.PRUNED if each in pruned else TrialState.COMPLETE,
                value=float(np.mean(replicates)),
                params={name: each[name] for name in sizes},
                distributions={name: IntDistribution(0, 4096) for name in sizes},
                intermediate_values=dict(enumerate(replicates)),
            )
            for each, replicates in run.trials.items()
        ]

    return make


@pytest.fixture
def stored(earlier_run, trials_of):
    """Store a run, as `earlier_run` makes it."""

    def store(costs, **facts):
        run = earlier_run(costs, **facts)
        record(folder_of_runs(), run, trials_of(run))

    return store


MACHINE = Machine(
    cpu=Cpu(model="A Processor", logical_cores=4, usable_cores=2.5),
    memory=Memory(total_bytes=16 * 10**9, available_bytes=12 * 10**9),
    storage=(
        Storage(
            mount_point="/", file_system="ext4", kind="local", device="/dev/vda",
        ),
    ),
    platform=Platform(
        system="Debian", kernel="Linux 6.1", architecture="x86_64", python="3.11.7",
        packages={
            "cellfeed": "0.1.0", "anndata": "0.12", "h5py": "3.16", "hdf5": "2.0", "numpy": "2.4",
            "scipy": "1.17", "torch": None,
        },
    ),
)  # fmt: skip
DATASET = Dataset(
    paths=("plates/plate01.h5ad", "plates/plate02.h5ad"),
    n_cells=28_000, n_vars=62_710, layout="csr", dtype="float32", bytes_on_disk=174_293_460,
    stored_bytes_per_cell=5_000.0, rows_per_chunk=4.4,
    labels={"plate": LabelCensus(n_labels=14, n_missing=3, label_entropy_bits=3.78)},
    batch_size=64,
)  # fmt: skip


def changed(record: Any, changes: dict[str, Any]) -> Any:
    """Replace fields, which may be those of a field."""
    for name, value in changes.items():
        outer, _, inner = name.partition(".")
        value = changed(getattr(record, outer), {inner: value}) if inner else value  # noqa: PLW2901
        record = replace(record, **{outer: value})
    return record


SENTENCES = {
    "inside": "Measured as the plan gives.",
    "outside": "Measured as planned, outside the paper's bounds.",
    "loader": "The loader delivered wrong data: measured something else.",
}


def entropy(share, *, measured=True):
    bits = 3.6 * share
    return EntropyBits(
        measured=Estimate(bits, bits - 0.02, bits + 0.02) if measured else None,
        expected=Estimate(bits, bits - 0.01, bits + 0.01),
        homogeneous=bits,
        lower_bound=max(0.0, bits - 0.2),
        upper_bound=3.63,
        random=3.6,
    )


def with_verdict(each, verdict):
    labels = {name: replace(label, verdict=verdict) for name, label in each.labels.items()}
    return replace(each, labels=labels)


def timed(block_size, fetch_factor, num_workers, speed, share, kind="inside"):
    verdict = Verdict(kind=kind, bits=0.0, error_bits=0.01, sentence=SENTENCES[kind])
    return ConfigurationResult(
        configuration=Configuration(
            block_size=block_size, fetch_factor=fetch_factor, num_workers=num_workers
        ),
        status="timed",
        cells_per_second=Estimate(speed, 0.9 * speed, 1.2 * speed),
        n_rounds=7,
        labels={"plate": LabelResult(entropy_bits=entropy(share), verdict=verdict)},
        peak_memory_bytes=400_000_000,
    )


def untimed(block_size, fetch_factor, num_workers, status, share, note=""):
    return ConfigurationResult(
        configuration=Configuration(
            block_size=block_size, fetch_factor=fetch_factor, num_workers=num_workers
        ),
        status=status,
        note=note,
        labels={"plate": LabelResult(entropy_bits=entropy(share, measured=False))},
    )


GRID = (
    timed(4, 4, 0, 2_000.0, 0.97),
    timed(4, 4, 1, 3_000.0, 0.97, "outside"),
    timed(4, 64, 0, 1_500.0, 1.0),
    untimed(4, 64, 1, "over memory", 1.0, "its buffers alone take 9,000 MB"),
    untimed(64, 4, 0, "below entropy floor", 0.5),
    untimed(64, 4, 1, "failed", 0.5, "no workers here"),
    timed(64, 64, 0, 9_000.0, 0.96),
    timed(64, 64, 1, 8_000.0, 0.96),
    timed(1024, 4, 0, 12_000.0, 0.2),
    untimed(1024, 4, 1, "out of budget", 0.2),
    untimed(1024, 64, 0, "too few cells", 0.6, "whole fetches need 32,768 cells"),
    untimed(1024, 64, 1, "too slow", 0.6),
)
RIVAL = Rival(configuration=GRID[7].configuration, ratio=Estimate(1.12, 1.05, 1.2), n_turns=6)
SLOWER = Rival(configuration=GRID[4].configuration, ratio=Estimate(1.5, 1.3, 1.7), n_turns=5)
CHOICE = Recommended(
    configuration=GRID[6].configuration,
    cells_per_second=Estimate(8_800.0, 8_500.0, 9_100.0),
    basis="compared",
    peak_memory_bytes=400_000_000,
    reason="The fastest of the 4 timed configurations that mix well enough.",
    rivals=(RIVAL, SLOWER),
)


RACED = {CHOICE.configuration, RIVAL.configuration}
PREDICTED = {"below entropy floor", "too slow", "out of budget"}


def with_choice(configurations, own=CHOICE.cells_per_second):
    """The choice has the figure of its turns; others are compared with it."""

    def compared(each):
        if own is CHOICE.cells_per_second and each.configuration in RACED:
            each = replace(each, status="compared")
        if each.configuration == CHOICE.configuration:
            return replace(each, cells_per_second=own, relative=Estimate(1.0, 1.0, 1.0))
        if each.configuration == RIVAL.configuration:
            return replace(each, relative=Estimate(1 / 1.12, 1 / 1.2, 1 / 1.05))
        if each.cells_per_second is not None:
            return replace(each, relative=quotient(each.cells_per_second, own))
        return replace(each, relative=Estimate(0.8, 0.4, 1.6) if each.status in PREDICTED else None)

    return tuple(map(compared, configurations))


RECOMMENDED = AutotuneResult(
    machine=MACHINE,
    dataset=DATASET,
    constraints=Constraints(entropy_floor=0.95, memory_bytes=8 * 10**9, need_cells_per_second=None),
    cache="cold",
    configurations=with_choice(GRID),
    recommended=CHOICE,
    nearest=None,
    seconds=61.4,
    date=datetime(2026, 11, 21, 9, 30, tzinfo=UTC),
    storage_order=StorageOrder(
        block_size=1024, expected_bits=0.1, random_bits=3.6, tolerance_bits=0.02
    ),
)
NOTHING_FEASIBLE = replace(
    RECOMMENDED,
    configurations=GRID,
    recommended=None,
    nearest=Nearest(configuration=CHOICE.configuration, problem="its entropy is below the floor"),
    constraints=Constraints(
        entropy_floor=1.0, memory_bytes=8 * 10**9, need_cells_per_second=50_000.0
    ),
)


def with_a_further_label(each):
    """The second label is mixed a little less than the first."""
    (first,) = each.labels.values()
    bits = first.entropy_bits
    less = 0.99 * bits.expected.value
    second = replace(bits, expected=Estimate(less, less - 0.01, less + 0.01))
    return replace(each, labels={**each.labels, "cell_line": replace(first, entropy_bits=second)})


def stage(name, microseconds, saving):
    seconds = microseconds * 1e-6
    interval = Estimate(seconds, 0.9 * seconds, 1.1 * seconds)
    return Stage(name=name, seconds_per_cell=interval, saving=saving)


BOTTLENECK = Bottleneck(
    kind="decompressing",
    is_certain=True,
    stages=(
        stage("planning", 2.0, 0.01), stage("reading", 10.0, 0.01),
        stage("decompressing", 160.0, 0.7), stage("placing", 40.0, 0.18),
        stage("making_tensors", 1.0, 0.0),
    ),
    model=StageModel(cores=2.5, num_workers=0, num_threads=2),
    measured_seconds_per_cell=113e-6, accounted=0.9, n_rounds=8, stored_bytes=6_000.0,
    decoded_bytes=30_000.0, useful_bytes=18_000.0,
)  # fmt: skip
ADVICE = StorageAdvice(
    action="preshuffle", block_size=1024, least_speedup=2.58, epochs_until_paid=3
)


OF_RANGES = replace(
    RECOMMENDED,
    configurations=with_choice(
        (
            timed(1, 1, 0, 1_800.0, 1.0),
            timed(22, 288, 3, 6_000.0, 0.99),
            *(timed(64 + size, 64, 0, 9_000.0 - 9 * size, 0.96) for size in range(0, 96, 8)),
            timed(176, 208, 11, 7_000.0, 0.955, "outside"),
        )
    ),
    ranges=Ranges(
        block_sizes=(1, 4096),
        fetch_factors=(1, 512),
        workers=(0, 16),
        n_configurations=35_651_584,
        n_considered=352,
    ),
)


def too_long(each):
    (label,) = each.labels.values()
    bits = replace(label.entropy_bits, measured=Estimate(3.0, -np.inf, np.inf))
    labels = {"plate": LabelResult(entropy_bits=bits)}
    return replace(each, status="too long", cells_per_second=None, labels=labels)


FROM_A_SERVER = changed(
    RECOMMENDED,
    {
        "cache": "remote",
        "machine.storage": (),
        "dataset.paths": ("s3://cells/plate01.h5ad", "s3://cells/plate02.h5ad"),
        "dataset.has_storage_options": True,
        "recommended.prefetch": 4,
        "prefetch_results": tuple(
            PrefetchResult(
                prefetch=depth,
                cells_per_second=Estimate(speed, 0.9 * speed, 1.1 * speed) if speed else None,
                n_rounds=20 if speed else 0,
                n_turns=5,
                peak_memory_bytes=400_000_000,
            )
            for depth, speed in ((1, 2_300.0), (2, 4_500.0), (4, 8_700.0), (8, 8_750.0), (16, 0.0))
        ),
    },
)
NOT_IN_TURNS = changed(
    RECOMMENDED,
    {
        "configurations": with_choice(GRID, GRID[6].cells_per_second),
        "recommended.cells_per_second": Estimate(9_000.0, 8_100.0, 10_800.0),
        "recommended.basis": "timed",
        "recommended.rivals": (),
    },
)


LONG_NAME = 3 * "cell_type_ontology_term_id_harmonised_across_all_studies_"


def with_other_settings(each):
    """The same with a setting of another loader, and a label with a long name."""
    settings = each.configuration.changed(cache_policy="lru")
    return replace(each, configuration=settings, labels={LONG_NAME: each.labels["plate"]})


def with_one_value(each):
    """A label with a single value has no entropy in any minibatch."""
    nothing = Estimate(0.0, 0.0, 0.0)
    (label,) = each.labels.values()
    measured = label.entropy_bits.measured and nothing
    bits = EntropyBits(measured=measured, expected=nothing, homogeneous=0.0, random=0.0)
    return replace(each, labels={"plate": replace(label, entropy_bits=bits)})


def share_of_random(block_size, fetch_factor):
    """More blocks in a fetch mix better."""
    return 1 - 0.8 / (1 + 16 * fetch_factor / block_size)


WHOLE_GRID = replace(
    RECOMMENDED,
    configurations=with_choice(
        tuple(
            timed(
                block_size, fetch_factor, num_workers,
                9_000.0 if (block_size, fetch_factor, num_workers) == (64, 64, 0)
                else 400.0 * block_size**0.6 * fetch_factor**0.1 / (1 + 0.2 * num_workers),
                share_of_random(block_size, fetch_factor),
            )
            for block_size in (1, 4, 16, 64, 256, 1024)
            for fetch_factor in (1, 4, 16, 64, 256, 1024)
            for num_workers in (0, 1, 2, 4)
        )
    ),
)  # fmt: skip
RESULTS = {
    "recommended": RECOMMENDED,
    "explained": replace(
        RECOMMENDED,
        bottleneck=BOTTLENECK,
        storage_advice=(ADVICE,),
    ),
    "not compared": NOT_IN_TURNS,
    "undecided": changed(
        RECOMMENDED,
        {"recommended.rivals": (replace(RIVAL, ratio=Estimate(1.03, 0.97, 1.09)), SLOWER)},
    ),
    "nothing feasible": NOTHING_FEASIBLE,
    "too long": replace(
        NOTHING_FEASIBLE,
        nearest=None,
        storage_order=None,
        configurations=tuple(too_long(each) for each in GRID),
    ),
    "predicted": changed(
        NOT_IN_TURNS,
        {
            "recommended.basis": "predicted",
            "recommended.cells_per_second": Estimate(9_500.0, 4_100.0, 20_800.0),
            "recommended.peak_memory_bytes": None,
        },
    ),
    "nothing timed": replace(
        RECOMMENDED,
        recommended=Recommended(
            configuration=CHOICE.configuration,
            basis="predicted",
            cells_per_second=None,
            peak_memory_bytes=None,
            reason="Predicted to be the fastest (from 1 timed).",
        ),
        configurations=tuple(
            replace(untimed(1, 1, 0, "out of budget", 0.97), configuration=each.configuration)
            for each in GRID
        ),
        cut_short="no training step had ended after 60 s",
        storage_order=None,
    ),
    "warm": replace(RECOMMENDED, cache="warm"),
    "unknown cache": replace(RECOMMENDED, cache="unknown"),
    "remote": FROM_A_SERVER,
    "link": changed(FROM_A_SERVER, {"bottleneck": replace(BOTTLENECK, kind="reading")}),
    "remote, undecided": replace(
        FROM_A_SERVER, recommended=CHOICE, prefetch_results=FROM_A_SERVER.prefetch_results[:1]
    ),
    "wrong loader": replace(
        RECOMMENDED,
        configurations=(timed(4, 4, 0, 2_000.0, 0.97, "loader"), *GRID[1:]),
        recommended=None,
        loader_fault="block size 4, fetch factor 4, 0 workers: minibatch 0 has plate p3",
    ),
    "several labels": changed(
        RECOMMENDED,
        {
            "dataset.labels": dict(DATASET.labels)
            | {"cell_line": LabelCensus(n_labels=50, n_missing=7, label_entropy_bits=5.6)},
            "configurations": tuple(map(with_a_further_label, RECOMMENDED.configurations)),
        },
    ),
    "warnings": replace(
        RECOMMENDED,
        busy=Busy(other_cores=1.4, share=0.35),
        configurations=tuple(
            with_verdict(each, *GRID[1].verdicts) if each.verdicts == GRID[6].verdicts else each
            for each in RECOMMENDED.configurations
        ),
        dataset=replace(
            DATASET,
            slow_reading="p3.h5ad: `X` is read slowly: filter <b> is not supported",
            elements=("layers/counts",),
        ),
    ),
    "waiting": replace(
        RECOMMENDED,
        constraints=replace(RECOMMENDED.constraints, step_seconds=0.005),
        recommended=replace(
            CHOICE,
            waiting=Waiting(share=Estimate(0.125, 0.1, 0.15), n_rounds=8, expected_share=0.2),
        ),
        configurations=tuple(
            replace(each, bytes_read_per_cell=BytesRead(7_500.0, 15_000.0))
            for each in RECOMMENDED.configurations
        ),
    ),
    "ranges": OF_RANGES,
    "ranges without a choice": replace(
        OF_RANGES,
        configurations=GRID[4:6],
        recommended=None,
        nearest=None,
    ),
    "one configuration": replace(RECOMMENDED, configurations=RECOMMENDED.configurations[6:7]),
    "two configurations": replace(RECOMMENDED, configurations=RECOMMENDED.configurations[1:7:5]),
    "long names": changed(
        RECOMMENDED,
        {
            "dataset.labels": {LONG_NAME: DATASET.labels["plate"]},
            "machine.cpu.model": "Intel(R) Xeon(R) Platinum 8480+ with an unusually long name",
            "configurations": tuple(map(with_other_settings, RECOMMENDED.configurations)),
            "recommended.configuration": with_other_settings(GRID[6]).configuration,
        },
    ),
    "need": changed(RECOMMENDED, {"constraints.need_cells_per_second": 40_000.0}),
    "ranks": replace(RECOMMENDED, ranks=Ranks(n_local=4, n_total=8)),
    "zero entropy": changed(
        RECOMMENDED,
        {
            "dataset.labels": {
                "plate": LabelCensus(n_labels=1, n_missing=3, label_entropy_bits=0.0)
            },
            "configurations": tuple(map(with_one_value, RECOMMENDED.configurations)),
        },
    ),
    "interrupted": replace(
        NOT_IN_TURNS,
        configurations=tuple(
            replace(
                with_verdict(each, None), status="out of budget", cells_per_second=None, n_rounds=0
            )
            if each.configuration.num_workers or each.configuration.block_size == 4
            else each
            for each in NOT_IN_TURNS.configurations
        ),
        interrupted=True,
    ),
    "whole grid": WHOLE_GRID,
}


@pytest.fixture(scope="session")
def result_of():
    """Returns the result of a kind."""
    return RESULTS.__getitem__
