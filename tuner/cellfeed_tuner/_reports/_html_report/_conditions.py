"""What a result was measured on, and what was asked for."""

from collections.abc import Sequence
from dataclasses import asdict

from cellfeed.console import format_bytes
from cellfeed_tuner._machine._description import Machine, Platform
from cellfeed_tuner._machine._storage import Storage
from cellfeed_tuner._reports._html_report._elements import Html, definitions, element, join
from cellfeed_tuner._reports._wording import cache_in_words, cache_name
from cellfeed_tuner._results._autotune_result import AutotuneResult
from cellfeed_tuner._results._recommended import Constraints

__all__ = ["conditions"]

_UNKNOWN = "unknown"
_Pairs = list[tuple[str, object]]


def conditions(result: AutotuneResult) -> Html:
    """Return data set, constraints, machine, storage, versions and run, each as a card."""
    machine = result.machine
    cards = [
        ("Data", _data(result)),
        ("Asked for", _constraints(result.constraints)),
        ("Machine", _machine(machine)),
        *(("Storage", _storage(storage)) for storage in machine.storage),
        ("Versions", _versions(machine.platform)),
        ("Run", _run(result)),
    ]
    return element("div", *(_card(name, pairs) for name, pairs in cards), class_="cards")


def _card(name: str, pairs: _Pairs) -> Html:
    return element("div", element("h3", name), definitions(pairs))


def _data(result: AutotuneResult) -> _Pairs:
    dataset, order, one = result.dataset, result.storage_order, result.configurations[0]
    further: _Pairs = []
    for name, each in dataset.further_labels.items():
        further += [
            ("label", name),
            ("values", f"{each.n_labels:,}, {each.label_entropy_bits:.3f} bits"),
            ("without label", f"{each.n_missing:,} cells"),
            ("random sampling", f"{one.further_labels[name].entropy_bits.random:.3f} bits"),
        ]
    pairs: _Pairs = [
        ("matrix", f"{dataset.n_cells:,} cells x {dataset.n_vars:,} genes"),
        *([("visited", dataset.selection.in_words)] if dataset.selection else []),
        *([("strategy", result.strategy.in_python())] if result.strategy else []),
        ("stored as", f"{dataset.layout}, {dataset.dtype}, {format_bytes(dataset.bytes_on_disk)}"),
        ("a cell in storage", format_bytes(round(dataset.stored_bytes_per_cell))),
        ("read as a whole", f"{dataset.rows_per_chunk:,.1f} cells per chunk"),
        *([("slow reading", dataset.slow_reading)] if dataset.slow_reading else []),
        ("minibatch", f"{dataset.batch_size} cells"),
        ("label", dataset.label),
        ("values", f"{dataset.n_labels:,}, {dataset.label_entropy_bits:.3f} bits"),
        ("without label", f"{dataset.n_missing:,} cells"),
        ("random sampling", f"{one.entropy_bits.random:.3f} bits"),
        *further,
        ("storage order", order.sentence if order else "not checked"),
        ("files", _files(dataset.paths)),
    ]
    return pairs


def _files(paths: Sequence[str]) -> Html:
    return element(
        "details",
        element("summary", f"{len(paths)} file(s)"),
        element("ul", *(element("li", path) for path in paths)),
    )


def _constraints(asked: Constraints) -> _Pairs:
    need, step = asked.need_cells_per_second, asked.step_seconds
    return [
        ("entropy", f"at least {asked.entropy_floor:g} times random sampling's"),
        ("memory", f"at most {format_bytes(asked.memory_bytes)}"),
        ("throughput", "as high as can be" if need is None else f"at least {need:,.0f} cells/s"),
        *([("training step", f"{1000 * step:g} ms")] if step is not None else []),
    ]


def _machine(machine: Machine) -> _Pairs:
    cpu, memory, platform = machine.cpu, machine.memory, machine.platform
    total, available = format_bytes(memory.total_bytes), format_bytes(memory.available_bytes)
    return [
        ("processor", cpu.model or _UNKNOWN),
        ("cores", f"{cpu.usable_cores:g} usable of {cpu.logical_cores}"),
        ("memory", f"{available} available of {total}"),
        ("system", platform.system or _UNKNOWN),
        ("kernel", f"{platform.kernel}, {platform.architecture}"),
    ]


def _storage(storage: Storage) -> _Pairs:
    return [
        ("file system", f"{storage.file_system or _UNKNOWN} ({storage.kind or _UNKNOWN})"),
        ("mounted on", storage.mount_point or _UNKNOWN),
        ("device", storage.device or _UNKNOWN),
        ("model", storage.model or _UNKNOWN),
    ]


def _versions(platform: Platform) -> _Pairs:
    packages = asdict(platform.packages)
    return [
        ("Python", platform.python),
        *((name, version or "not installed") for name, version in packages.items()),
    ]


def _run(result: AutotuneResult) -> _Pairs:
    busy = result.busy
    return [
        ("date", f"{result.date:%Y-%m-%d %H:%M %Z}".strip()),
        ("took", f"{result.seconds:,.0f} s"),
        (cache_name(result), join(element("div", line) for line in cache_in_words(result))),
        *([("other programs", f"{busy.other_cores:.1f} cores busy")] if busy else []),
    ]
