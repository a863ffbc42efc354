"""Count the chunks that are decompressed for a treated cell and its control, beside other ways.

Run from the root of the repository, as ``python -m bench.controls.compare SCRATCH``. Writes
synthetic plates to SCRATCH once. Every figure is a count and depends on seeds alone, not on the
machine: chunks decompressed for each pair, of both arrays of the sparse matrix, over one epoch or
over ``--pairs`` of it. A control has the plate and the cell line of its treated cell.

- cellfeed: its own counter, `CellDataset.statistics`.
- one by one: treated cells at random, controls drawn uniformly for each; each minibatch is read at
  once, so that a chunk is decompressed once for all its rows.
- cell-load, if it is installed (``pip install cell-load``): the slices that it requests from h5py,
  without a cache, and with a cache of the share ``--cached`` of the chunks, least recently used
  ones dropped first, as those of HDF5 for a file that is larger.
"""

import argparse
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np

from cellfeed import BlockShuffling, CellDataset, Fetch, MatchedControls, open_collection
from cellfeed.stages import FetchStages
from cellfeed.synthetic import write_tahoe_like

BATCH, CONTROL, WITHIN = 64, "drug_001", ["plate", "cell_line"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scratch", type=Path, help="where the cells are, or are written")
    parser.add_argument("--cells", type=int, default=20_000)
    parser.add_argument("--genes", type=int, default=20_000)
    parser.add_argument("--pairs", type=int, default=4096)
    parser.add_argument("--cached", type=float, default=0.05)
    options = parser.parse_args()
    paths = write_tahoe_like(
        options.scratch,
        n_cells=options.cells,
        n_genes=options.genes,
        n_plates=2,
        n_drugs=6,
        n_cell_lines=10,
    )
    collection = open_collection(paths, obs=["drug", *WITHIN])
    say(collection)
    say(f"{collection.rows_per_chunk:.1f} cells in a chunk; chunks decompressed for a pair:")
    found = {}
    for block, factor in ((16, 16), (16, 64), (64, 64)):
        name = f"cellfeed, block {block}, fetch factor {factor}"
        found[name] = of_cellfeed(collection, block, factor)
    found["one by one, each minibatch at once"] = of_single_controls(collection, options.pairs)
    try:
        found |= of_cell_load(paths, options.scratch, options.pairs, options.cached)
    except ImportError as error:
        say(f"cell-load is left out: {error}")
    for name, chunks in found.items():
        say(f"  {name:44} {chunks:8.3f}")


def say(text: object) -> None:
    sys.stdout.write(f"{text}\n")


def strategy_of(block: int) -> MatchedControls:
    return MatchedControls(BlockShuffling(block), "drug", CONTROL, WITHIN, unmatched="drop")


def of_cellfeed(collection, block: int, factor: int) -> float:
    dataset = CellDataset(collection, strategy_of(block), BATCH, factor, seed=0)
    for _ in dataset:
        pass
    done = dataset.statistics()
    return done.n_chunks / done.n_cells


def of_single_controls(collection, n_pairs: int) -> float:
    """Return the count of minibatches of random treated cells, each with a random control."""
    strategy = strategy_of(1).bound_to(collection)
    pools, rng = strategy.pools, np.random.default_rng(0)
    n_chunks = 0
    with FetchStages(collection, BATCH) as stages:
        for _ in range(n_pairs // BATCH):
            treated = rng.choice(strategy.indices, BATCH, replace=False)
            of_cells = pools.pool_of[treated]
            places = rng.integers(pools.starts[of_cells], pools.starts[of_cells + 1])
            rows, order = np.unique([*treated, *pools.rows[places]], return_inverse=True)
            n_chunks += stages.volume(stages.plan(Fetch(rows.astype(np.int64), order))).n_chunks
    return n_chunks / (n_pairs // BATCH * BATCH)


def of_cell_load(paths, scratch: Path, n_pairs: int, cached: float) -> dict[str, float]:
    """Return the counts of cell-load, which controls of one cell line and plate are mapped to."""
    import h5py  # noqa: PLC0415 - of this loader alone
    from cell_load.data_modules import PerturbationDataModule  # noqa: PLC0415

    config = scratch / "split.toml"
    config.write_text(f'[datasets]\nplates = "{scratch}"\n\n[training]\nplates = "train"\n')
    module = PerturbationDataModule(
        toml_config_path=str(config), embed_key=None, num_workers=0, batch_size=BATCH,
        batch_col="plate", pert_col="drug", cell_type_key="cell_line", control_pert=CONTROL,
        output_space="all", basal_mapping_strategy="random", should_yield_control_cells=False,
        cell_sentence_len=1,
    )  # fmt: skip
    module.setup()
    sizes = dict[tuple[str, str], tuple[int, int]]()
    for path in paths:
        with h5py.File(path) as file:
            for name in ("/X/data", "/X/indices"):
                sizes[str(path), name] = (file[name].chunks[0], file[name].id.get_num_chunks())
    requested, read = list[tuple[str, str, int]](), h5py.Dataset.__getitem__

    def recorded(dataset, which, *others, **options):
        key = dataset.file.filename, dataset.name
        if key in sizes and isinstance(which, slice):
            size = sizes[key][0]
            chunks = range(which.start // size, (max(which.start + 1, which.stop) - 1) // size + 1)
            requested.extend((*key, int(number)) for number in chunks)
        return read(dataset, which, *others, **options)

    n = 0
    loader = module.train_dataloader()
    h5py.Dataset.__getitem__ = recorded
    try:
        for batch in loader:
            n += len(batch["pert_name"])
            if n >= n_pairs:
                break
    finally:
        h5py.Dataset.__getitem__ = read
    misses, held = 0, dict[tuple[str, str], OrderedDict[int, None]]()
    for path, name, number in requested:
        cache = held.setdefault((path, name), OrderedDict())
        misses += number not in cache
        cache[number] = None
        cache.move_to_end(number)
        while len(cache) > max(1, cached * sizes[path, name][1]):
            cache.popitem(last=False)
    return {
        "cell-load, without a cache": len(requested) / n,
        f"cell-load, cache of {cached:.0%} of the chunks": misses / n,
    }


if __name__ == "__main__":
    main()
