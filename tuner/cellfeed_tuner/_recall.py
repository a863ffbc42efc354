"""Which earlier run bears on this one, by fingerprints of data, machine and versions."""

import platform
import re
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed import Collection, SamplingStrategy
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._entropy import count_labels
from cellfeed_tuner._history import Asked, EarlierRun, Fingerprint, Key, digest, fingerprint
from cellfeed_tuner._machine import Machine, package_version
from cellfeed_tuner._results import NOTHING_KNOWN, Earlier, SearchedStrategy
from cellfeed_tuner._subject import Selected, label_codes


def recall(
    runs: Sequence[EarlierRun], key: Key, asked: Asked, space: Container[Configuration]
) -> tuple[list[Configuration], Earlier]:
    """Return the configurations of a space that an earlier run measured, and which run that was.

    The last run of the same machine and versions counts, or else the last of any. Its choice comes
    first, then the fastest.
    """
    alike = [
        run
        for run in runs
        if run.key.data == key.data
        and run.asked.is_like(asked)
        and any(each in space for each in run.trials)
    ]
    if not alike:
        return [], NOTHING_KNOWN
    run = max(alike, key=lambda each: (each.key == key, each.began))
    costs = {each: np.mean(found) for each, found in run.trials.items() if each in space}
    return sorted(costs, key=lambda each: (each != run.choice, costs[each])), _used(run, key)


def _used(run: EarlierRun, key: Key) -> Earlier:
    if run.key.machine != key.machine:
        whose = f"another machine's result ({run.key.machine.facts.get('cpu') or 'unknown'})"
    elif run.key.versions != key.versions:
        whose = "a result of this machine with other versions"
    else:
        whose = "a result of this machine"
    sentence = f"The order of the first measurements follows {whose} of {run.date}."
    return Earlier(use="order", sentence=sentence)


# What reads, decodes and carries cells.
_PACKAGES = ("cellfeed", "deflate", "h5py", "numba", "numcodecs", "torch", "zarr", "zarrs")


def key_of(selected: Selected, label: str, machine: Machine) -> Key:
    """Return the key of results for rows with a label on a machine."""
    collection = selected.collection
    codes = label_codes(collection, label)
    return Key(
        data=data_fingerprint(collection, codes, selected.indices, selected.strategy),
        machine=machine_fingerprint(machine),
        versions=versions_fingerprint(),
    )


def machine_fingerprint(machine: Machine) -> Fingerprint:
    """Return the fingerprint of a machine, which survives a reboot.

    It has no serial numbers and no device names, which may change; of network file systems, it has
    the server's name.
    """
    kernel = re.match(r"\D*\d+", machine.platform.kernel)
    return fingerprint(
        {
            "cpu": machine.cpu.model,
            "architecture": machine.platform.architecture,
            "usable_cores": machine.cpu.usable_cores,
            # Kernels keep a little for themselves, and not always the same.
            "memory_gb": round(machine.memory.total_bytes / 1e9),
            "kernel": kernel[0] if kernel else machine.platform.kernel,
            "storage": [
                {
                    "file_system": each.file_system,
                    "kind": each.kind,
                    "server": each.device if each.kind == "network" else None,
                }
                for each in machine.storage
            ],
        }
    )


def data_fingerprint(
    collection: Collection,
    codes: NDArray[np.integer],
    indices: NDArray[np.int64] | None = None,
    strategy: SamplingStrategy | None = None,
) -> Fingerprint:
    """Return the fingerprint of a collection.

    It does not depend on where local files are; of remote files, it has the URL and the version
    that the server gives.
    """
    selected: dict[str, Any] = {} if indices is None else {"rows": _digest_of_numbers(indices)}
    if strategy is not None:
        known = SearchedStrategy.of(strategy)
        selected["strategy"] = {"name": known.name, **known.parameters}
        for name in known.arrays:
            values = np.asarray(getattr(strategy, name))
            content = np.ascontiguousarray(values.astype(str) if values.dtype == object else values)
            selected["strategy"][name] = digest(content.tobytes() + str(values.dtype).encode())
    if collection.uncached:
        selected["uncached"] = True
    if collection.is_remote:
        found = [f"{each.location} {each.version()}" for each in collection.sources]
        selected["files"] = digest("\n".join(found).encode())
        sizes = np.array([source.file_bytes() for source in collection.sources])
    else:
        sizes = np.array([path.stat().st_size for path in collection.files])
    parts = np.split(codes, np.cumsum(collection.cells_per_location)[:-1])
    counted = [count_labels(part) for part in parts]
    return fingerprint(
        {
            "n_cells": len(collection),
            "n_vars": collection.n_vars,
            "elements": [
                f"{each.name} {each.layout} {each.dtype}" for each in collection.elements.values()
            ],
            "n_files": len(collection.locations),
            "bytes_on_disk": int(sizes.sum()),
            "file_sizes": _digest_of_numbers(sizes),
            "rows_per_chunk": round(collection.rows_per_chunk, 3),
            "bytes_per_cell": round(collection.mean_row_bytes()),
            "label_counts": _digest_of_numbers(
                *(np.append(each.counts, each.n_missing) for each in counted)
            ),
            **selected,
        }
    )


def versions_fingerprint() -> Fingerprint:
    """Return the versions that bear on speed, to the first two numbers of each."""
    versions = {name: package_version(name) for name in _PACKAGES}
    versions["python"] = platform.python_version()
    return fingerprint(
        {name: version and ".".join(version.split(".")[:2]) for name, version in versions.items()}
    )


def _digest_of_numbers(*arrays: NDArray[np.integer]) -> str:
    # The size before the numbers keeps apart what is divided in another way.
    return digest(
        b"".join(np.insert(each, 0, each.size).astype("<i8").tobytes() for each in arrays)
    )
