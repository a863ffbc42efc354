"""The entries of the comparison: loaders with their settings, floors, and the machine's limits."""

from dataclasses import dataclass, field, replace
from typing import Any

BATCH_SIZE = 64
LIMITS = "machine"
BLOCKS_OF_16 = "CSR, blocks of 16"
LARGE_BLOCKS = "CSR, larger blocks"
SINGLE_CELLS = "CSR, single cells"
DENSE = "dense"
PROCESSES = "cellfeed by threads and worker processes"
MACHINE = "the machine's limits"
SECTIONS = (BLOCKS_OF_16, LARGE_BLOCKS, SINGLE_CELLS, DENSE, PROCESSES, MACHINE)
STORAGE_NAMES = {
    "h5ad": ".h5ad plates",
    "annbatch": "annbatch's store",
    "cellfeed": "cellfeed's preshuffled store",
    "delta": "cellfeed's preshuffled store with delta",
    "cellstream": "cellstream's archive",
    "tiledbsoma": "TileDB-SOMA experiment",
    None: "memory",
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of the comparison.

    Attributes
    ----------
    name
        Unique.
    peer
        What ``--peers`` selects by; `jobs/loaders.py` has its loader.
    section
        Rows of a section do comparable work.
    environment
        Virtual environment whose interpreter runs it; None is the project's own.
    storage
        What it reads: the plates, the store of a conversion, or nothing.
    settings
        By the loader's own names.
    batch_size
        Cells of a minibatch.
    limits
        Names of the entries that are its upper limits.
    versus
        Name of cellfeed's entry that does the same work.
    """

    name: str
    peer: str
    section: str
    environment: str | None = None
    storage: str | None = "h5ad"
    settings: dict = field(default_factory=dict)
    batch_size: int = BATCH_SIZE
    limits: tuple[str, ...] = ()
    versus: str | None = None

    @property
    def is_limit(self) -> bool:
        """Whether this is a limit of the machine rather than a loader."""
        return self.section == MACHINE

    @property
    def output(self) -> str:
        """Kind of minibatches."""
        return "dense" if self.settings.get("dense") else "CSR"


def decompression(storage: str, block_size: int | None = None, fetch_factor: int = 256) -> str:
    """Return the name of a limit of decompression."""
    what = "gzip of the plates" if storage == "h5ad" else f"blosc of {STORAGE_NAMES[storage]}"
    if block_size is None:
        return f"decompress {what}, each chunk once"
    return f"decompress {what}, block {block_size}, fetch {fetch_factor}"


def disk(storage: str) -> str:
    """Return the name of a limit of reading."""
    return f"read {STORAGE_NAMES[storage]} from end to end"


FILL = "write dense minibatches"
COPY = "copy dense minibatches"


def cellfeed_name(
    storage: str, block_size: int, fetch_factor: int, output: str, *, aligned: bool = False
) -> str:
    """Return the name of an entry of cellfeed."""
    block = f"block {block_size}" + (" aligned with chunks" if aligned else "")
    return f"cellfeed on {STORAGE_NAMES[storage]}, {block}, fetch {fetch_factor}, {output}"


def all_entries() -> list[Entry]:
    """Return every entry, in the order of the table."""
    return [*_cellfeed_entries(), *_peers(), *_floors(), *_limits()]


def _limits_of(storage: str, block_size: int, fetch_factor: int, output: str) -> tuple[str, ...]:
    limits = (decompression(storage, block_size, fetch_factor), disk(storage))
    return (*limits, FILL) if output == "dense" else limits


def _section(block_size: int, output: str) -> str:
    if output == "dense":
        return DENSE
    return {1: SINGLE_CELLS, 16: BLOCKS_OF_16}.get(block_size, LARGE_BLOCKS)


def _cellfeed(
    storage: str,
    block_size: int,
    fetch_factor: int = 256,
    output: str = "CSR",
    *,
    aligned: bool = False,
    limits: tuple[str, ...] | None = None,
) -> Entry:
    return Entry(
        name=cellfeed_name(storage, block_size, fetch_factor, output, aligned=aligned),
        peer="cellfeed",
        section=_section(block_size, output),
        storage=storage,
        settings={
            "block_size": block_size,
            "fetch_factor": fetch_factor,
            "dense": output == "dense",
            "align": "chunks" if aligned else None,
        },
        limits=_limits_of(storage, block_size, fetch_factor, output) if limits is None else limits,
    )


def _cellfeed_entries() -> list[Entry]:
    by_default = {output: _cellfeed("h5ad", 16, output=output) for output in ("CSR", "dense")}
    return [
        by_default["CSR"],
        # Whole chunks are the fewest that any fetch can touch.
        _cellfeed("h5ad", 16, aligned=True, limits=(decompression("h5ad"), disk("h5ad"))),
        _cellfeed("h5ad", 256),
        _cellfeed("h5ad", 1024, 64),
        _cellfeed("h5ad", 1),
        by_default["dense"],
        *(_cellfeed("annbatch", block_size) for block_size in (16, 256, 512)),
        _cellfeed("annbatch", 512, output="dense"),
        _cellfeed("cellfeed", 512),
        *(_cellfeed("delta", block_size, limits=(disk("delta"),)) for block_size in (512, 1)),
        _cellfeed("cellstream", 1, limits=()),
        *(
            replace(
                entry,
                name=f"{entry.name}, {how}",
                section=PROCESSES,
                settings=entry.settings | {"num_threads": n_threads, "num_workers": n_workers},
                versus=entry.name,
            )
            for entry in by_default.values()
            for how, n_threads, n_workers in (
                ("1 thread", 1, 0),
                ("1 worker of 2 threads", 2, 1),
                ("2 workers of 1 thread", 1, 2),
            )
        ),
    ]


def _peers() -> list[Entry]:
    entries = []

    def add(peer: str, name: str, block_size: int, output: str = "CSR", **others: Any) -> None:
        """Add an entry; its environment and storage are those of the peer's name by default."""
        given = {"environment": peer, "storage": peer} | others
        entries.append(Entry(name=name, peer=peer, section=_section(block_size, output), **given))

    for fetch_factor in (1, 256):  # by its own gather, for each minibatch, or for a fetch, sorted
        add(
            "cellstream", f"cellstream, {fetch_factor * BATCH_SIZE:,} random cells at a time, CSR",
            1, environment=None, settings={"fetch_factor": fetch_factor},
            versus=cellfeed_name("cellstream", 1, 256, "CSR"),
        )  # fmt: skip
    for block_size, output, densify in (
        *((16, "CSR", None), (256, "CSR", None)),
        *((16, "dense", "minibatch"), (16, "dense", "fetch")),
    ):
        made = f"{output} made of each {densify}" if densify else output
        for n_workers in (0, 2):
            add(
                "scdataset",
                f"scDataset, block {block_size}, fetch 256, {made}, {n_workers} workers",
                block_size, output, storage="h5ad",
                settings={"block_size": block_size, "fetch_factor": 256, "num_workers": n_workers,
                          "dense": output == "dense", "densify": densify},
                limits=_limits_of("h5ad", block_size, 256, output),
                versus=cellfeed_name("h5ad", block_size, 256, output),
            )  # fmt: skip
    for output in ("CSR", "dense"):
        add(
            "annloader", f"AnnLoader, {output}", 1, output, environment="scdataset",
            storage="h5ad", settings={"dense": output == "dense"},
            limits=_limits_of("h5ad", 1, 1, output),
            versus=cellfeed_name("h5ad", 1, 256, "CSR") if output == "CSR" else None,
        )  # fmt: skip
    # 512 and 32 are its defaults, and make a buffer of 256 minibatches of 64 cells. Its other
    # default, minibatches of one cell, is not used in its documentation either.
    for chunk_size, preload, batch_size, output, remark in (
        (512, 32, BATCH_SIZE, "CSR", " (defaults but for minibatches of 64)"),
        (512, 32, 1, "CSR", " (all defaults, minibatches of 1)"),
        (256, 64, BATCH_SIZE, "CSR", ""),
        (16, 1024, BATCH_SIZE, "CSR", ""),
        (512, 32, BATCH_SIZE, "dense", ""),
    ):
        add(
            "annbatch", f"annbatch, chunk {chunk_size}, preload {preload}, {output}{remark}",
            chunk_size, output, batch_size=batch_size,
            settings={"chunk_size": chunk_size, "preload_nchunks": preload,
                      "dense": output == "dense"},
            limits=_limits_of("annbatch", chunk_size, 256, output),
            versus=cellfeed_name("annbatch", chunk_size, 256, output) if batch_size > 1 else None,
        )  # fmt: skip
    add(
        "annbatch", "annbatch on cellfeed's preshuffled store, chunk 512, preload 32, CSR", 512,
        storage="cellfeed", settings={"chunk_size": 512, "preload_nchunks": 32},
        limits=(disk("cellfeed"),), versus=cellfeed_name("cellfeed", 512, 256, "CSR"),
    )  # fmt: skip
    # 64 and 65536 are its defaults.
    for chunk, io_batch, output, remark in (
        (64, 65_536, "CSR", " (defaults)"),
        (64, 16_384, "CSR", ""),
        (16, 16_384, "CSR", ""),
        (16, 16_384, "dense", ""),
    ):
        what = f"shuffle chunk {chunk}, I/O batch {io_batch}, {output}{remark}"
        add(
            "tiledbsoma", f"TileDB-SOMA-ML, {what}", chunk, output,
            settings={"shuffle_chunk_size": chunk, "io_batch_size": io_batch,
                      "dense": output == "dense"},
            versus=cellfeed_name("h5ad", 16, 256, output) if chunk == 16 else None,
        )  # fmt: skip
    return entries


def _floors() -> list[Entry]:
    return [
        Entry(
            name=f"slices by {library} of {STORAGE_NAMES[storage]}, block {block_size}, fetch 256",
            peer=library, section=_section(block_size, "CSR"), environment=environment,
            storage=storage, settings={"block_size": block_size, "fetch_factor": 256},
            limits=_limits_of(storage, block_size, 256, "CSR"),
            versus=cellfeed_name(storage, block_size, 256, "CSR"),
        )
        for library, storage, environment in (
            ("h5py", "h5ad", None),
            ("zarr", "annbatch", "annbatch"),
        )
        for block_size in (16, 256)
    ]  # fmt: skip


def _limits() -> list[Entry]:
    found = []
    for storage, block_size, fetch_factor in (
        *(("h5ad", None, 256), ("h5ad", 1024, 64), ("h5ad", 256, 256), ("h5ad", 16, 256)),
        *(("h5ad", 1, 256), ("h5ad", 1, 1), ("annbatch", None, 256), ("annbatch", 512, 256)),
        *(("annbatch", 256, 256), ("annbatch", 16, 256), ("cellfeed", 512, 256)),
    ):
        blocks = {} if block_size is None else {"block_size": block_size}
        settings = {"limit": "decompression", "storage": storage, "fetch_factor": fetch_factor}
        name = decompression(storage, block_size, fetch_factor)
        found.append((name, storage, settings | blocks))
    found += [(disk(storage), storage, {"limit": "disk", "storage": storage})
              for storage in ("h5ad", "annbatch", "cellfeed", "delta")]  # fmt: skip
    found += [(name, "h5ad", {"limit": "memory", "copy": name == COPY, "dense": True})
              for name in (FILL, COPY)]  # fmt: skip
    return [
        Entry(name=name, peer=LIMITS, section=MACHINE, storage=storage, settings=settings)
        for name, storage, settings in found
    ]
