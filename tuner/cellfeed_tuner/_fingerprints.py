"""What a result belongs to: fingerprints of data, machine and versions."""

import platform
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed import Collection, SamplingStrategy
from cellfeed_tuner._entropy import count_labels
from cellfeed_tuner._history import Fingerprint, Key, digest, fingerprint
from cellfeed_tuner._machine import Machine, package_version
from cellfeed_tuner._results import SearchedStrategy
from cellfeed_tuner._subject import Selected, label_codes

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
