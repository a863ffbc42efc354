"""The two files of a recording: the measurements as CSV, and the circumstances as JSON."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cellfeed import FormatError, ParameterError
from cellfeed_tuner._configuration import Configuration

SCHEMA = "cellfeed.recording/1"

SETTINGS = ("block_size", "fetch_factor", "num_workers")
COLUMNS = (
    *("run", *SETTINGS, "cells_per_second", "entropy_bits"),
    *("n_rounds", "round_spread", "peak_memory_bytes"),
)


@dataclass(slots=True, kw_only=True)
class Sitting:
    """One call that measured, until it finished or was interrupted.

    Parameters
    ----------
    began
        Date and time.
    load
        Load average of the machine in the minute before it began.
    seconds
        How long it measured.
    n_measured
        How many rows it added.
    """

    began: str
    load: float
    seconds: float = 0.0
    n_measured: int = 0


def facts_path(path: Path) -> Path:
    """Return the path of the facts that belong to a recorded grid."""
    return path.with_suffix(".json")


def read_facts(path: Path) -> dict[str, Any] | None:
    """Return the facts of a recorded grid, or None if there are none.

    Raises
    ------
    FormatError
        The file is not JSON, or not a recording.
    """
    beside = facts_path(path)
    if not beside.is_file():
        return None
    try:
        facts = json.loads(beside.read_text())
    except ValueError as error:
        msg = f"{beside}: not JSON: {error}; delete it, or give the grid another name"
        raise FormatError(msg) from error
    if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
        msg = f"{beside}: its schema is not {SCHEMA}; delete it, or give the grid another name"
        raise FormatError(msg)
    return facts


@dataclass(slots=True, kw_only=True)
class RecordingFiles:
    """A recording in progress; every row is written to disk immediately.

    Parameters
    ----------
    path
        The CSV file.
    facts
        What is measured and under which circumstances; plain values.
    done
        Runs and configurations that are measured.
    left_out
        Configurations that cannot be measured, and why.
    sittings
        The calls that measured.
    """

    path: Path
    facts: Mapping[str, Any]
    done: set[tuple[int, Configuration]] = field(default_factory=set)
    left_out: dict[Configuration, str] = field(default_factory=dict)
    sittings: list[Sitting] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, facts: Mapping[str, Any], same: Sequence[str]) -> Self:
        """Continue an existing recording, or begin one.

        Parameters
        ----------
        path
            The CSV file.
        facts
            What is to be measured and under which circumstances.
        same
            Names of facts that must equal those of an existing recording.

        Raises
        ------
        ParameterError
            A different recording exists at the path.
        FormatError
            The existing recording cannot be read.
        """
        if not path.exists():
            files = cls(path=path, facts=facts)
            with path.open("x", newline="") as file:
                csv.writer(file).writerow(COLUMNS)
            files.save()
            return files
        known = read_facts(path)
        if known is None:
            msg = f"{path}: there is no {facts_path(path).name} beside it, so it cannot continue"
            raise ParameterError(f"{msg}; give another --output")
        changed = [name for name in same if known.get(name) != facts[name]]
        if changed:
            name = changed[0]
            msg = (
                f"{path}: was recorded with another {name} ({known.get(name)}, now {facts[name]}); "
                "delete it, or give another --output"
            )
            raise ParameterError(msg)
        return cls(
            path=path,
            facts=known,
            done=_measured(path),
            left_out={_settings(each): each["why"] for each in known["left_out"]},
            sittings=[Sitting(**each) for each in known["sittings"]],
        )

    @property
    def seconds(self) -> float:
        """Seconds spent measuring so far."""
        return sum(each.seconds for each in self.sittings)

    def add(
        self,
        run: int,
        configuration: Configuration,
        *,
        cells_per_second: float,
        entropy_bits: float,
        round_seconds: NDArray[np.float64],
        peak_memory_bytes: int,
    ) -> None:
        """Write the row of one run of one configuration.

        Parameters
        ----------
        run
            Number of the run, from 0.
        configuration
            The settings.
        cells_per_second
            Mean throughput of its rounds.
        entropy_bits
            Expected label entropy of its minibatches, from the plan over the real labels.
        round_seconds
            Times of its rounds, of whole fetches; their number and their relative standard
            deviation are written.
        peak_memory_bytes
            Peak memory of the process and its workers.
        """
        n_rounds = round_seconds.size
        spread = round_seconds.std(ddof=1) / round_seconds.mean() if n_rounds > 1 else 0
        row = (
            run,
            *(configuration[name] for name in SETTINGS),
            *(f"{cells_per_second:.1f}", f"{entropy_bits:.4f}"),
            *(n_rounds, f"{spread:.4f}", peak_memory_bytes),
        )
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow(row)
        self.done.add((run, configuration))

    def save(self) -> None:
        """Write everything but the rows."""
        facts = dict(self.facts) | {
            "left_out": [dict(each) | {"why": why} for each, why in sorted(self.left_out.items())],
            "sittings": [asdict(each) for each in self.sittings],
        }
        target = facts_path(self.path)
        unfinished = target.with_suffix(".json.unfinished")
        unfinished.write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n")
        unfinished.replace(target)


def _measured(path: Path) -> set[tuple[int, Configuration]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        return {(int(row["run"]), _settings(row)) for row in rows}
    except (KeyError, TypeError, ValueError) as error:
        msg = f"{path}: not a recording: {error!r}; delete it, or give another --output"
        raise FormatError(msg) from error


def _settings(row: Mapping[str, Any]) -> Configuration:
    return Configuration(**{name: int(row[name]) for name in SETTINGS})
