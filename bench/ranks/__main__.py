"""How many ranks are fed: what `autotune --ranks 1:8` predicts, and what so many ranks then do.

    python -m bench.ranks [FOLDER]

Storage whose bandwidth all ranks share, storage that answers late, and with a folder of .h5ad
files, these. Ranks sleep for as long as a training step takes.
"""

import sys
import time
from itertools import count
from typing import Any

import click
from bench.ranks.storages import BATCH_SIZE, Throttled

from cellfeed import Collection, open_collection
from cellfeed_tuner import Configuration, Measurement, Ranks, Tunable
from cellfeed_tuner._measuring._measurement import measure_with
from cellfeed_tuner._measuring._process import MeasuringProcess
from cellfeed_tuner._measuring._timing import TimingRequest
from cellfeed_tuner._scaling import Scaling, ScalingSearch, utilization

SECONDS = 60.0
COUNTS = range(1, 9)
CHECKED = (1, 2, 3, 4, 6, 8)


def compare(name: str, subject: Tunable | Collection, step_seconds: float) -> list[float]:
    """Print predicted and measured utilizations, and return their differences in points."""
    is_ours = not isinstance(subject, Tunable)
    configuration = Configuration(block_size=16 if is_ours else 1, fetch_factor=4)
    began, number = time.monotonic(), count()
    with MeasuringProcess(subject) as process:
        process.start()

        def timed(chosen: Configuration, **given: Any) -> Measurement:
            limit = given.pop("limit_seconds")
            request = TimingRequest(
                configuration=chosen, batch_size=BATCH_SIZE, labels=(), cache="warm", seed=0,
                number=next(number), seconds=1.0, **given,
            )  # fmt: skip
            return measure_with(process, request, limit_seconds=limit)

        found: Scaling = ScalingSearch(
            timed=timed,
            configuration=configuration,
            counts=COUNTS,
            step_seconds=step_seconds,
            batch_size=BATCH_SIZE,
            left=lambda: began + SECONDS - time.monotonic(),
            has_threads=is_ours,
            cache="warm" if is_ours else "cold",
        ).run()
        click.echo(f"\n{name}: {found.sentence}")
        differences = list[float]()
        for each in found.ranks:
            if each.n_ranks not in CHECKED:
                continue
            ranks = Ranks(n_local=each.n_ranks, n_total=each.n_ranks)
            true = timed(
                configuration, ranks=ranks, step_seconds=step_seconds, least_rounds=12,
                limit_seconds=120.0,
            )  # fmt: skip
            assert true.round_seconds, true.failure
            used, said = each.utilization, utilization(true, step_seconds).value
            differences.append(100 * (used.value - said))
            click.echo(
                f"{each.n_ranks} ranks: {used.value:.1%} [{used.low:.1%}, {used.high:.1%}] "
                f"{each.remark}; measured then {said:.1%}, difference {differences[-1]:+.1f}"
            )
    return differences


def main() -> None:
    """Compare all."""
    storages: dict[str, Tunable | Collection] = {
        "shared bandwidth": Throttled(1_600.0),
        "late answers": Throttled(1e9, seconds=0.5),
    }
    if len(sys.argv) > 1:
        storages["files"] = open_collection(sys.argv[1])
    found = [
        each
        for name, storage in storages.items()
        for step_seconds in ((0.1, 0.2) if isinstance(storage, Tunable) else (0.01, 0.03))
        for each in compare(f"{name}, {1e3 * step_seconds:g} ms", storage, step_seconds)
    ]
    click.echo(f"\nlargest difference: {max(map(abs, found)):.1f} points")


if __name__ == "__main__":
    main()
