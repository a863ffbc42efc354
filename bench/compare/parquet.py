"""cellfeed on Parquet files, and HuggingFace's `datasets`, streaming and mapped.

Cells in the layout of Tahoe-100M are written to ``--data`` once: ``--files`` of ``--rows`` cells,
row groups of 1,000, some 2,700 genes a cell; and the Arrow copy that `datasets` maps. All loaders
deliver all cells once, as CSR minibatches of 64. Streaming shuffles as many cells as the others
read at a time, or reads in order of the files. Opening is not timed, filling a buffer is.
"""

from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import scipy.sparse as sp
from bench._harness import BYTES, PER_CPU, RATE, Case, way

from cellfeed import BlockShuffling, CellDataset, open_collection

N_GENES, N_GROUP = 62_710, 1_000
SHAPE = N_GENES + 3


def csr(rows):
    indptr = np.cumsum([0, *map(len, rows["genes"])])
    parts = np.concatenate(rows["expressions"]), np.concatenate(rows["genes"]), indptr
    return sp.csr_array(parts, shape=(len(indptr) - 1, SHAPE))


def csr_of_arrow(rows):
    lengths = pc.list_value_length(rows["genes"]).to_numpy()
    parts = [pc.list_flatten(rows[name]).to_numpy() for name in ("expressions", "genes")]
    return sp.csr_array((*parts, np.concatenate([[0], np.cumsum(lengths)])), (len(lengths), SHAPE))


CSR = {"numpy": csr, "arrow": csr_of_arrow}


def after_first(function):
    """Return the sizes of an epoch; what is imported and compiled once is not timed."""
    for _ in function("first"):
        pass
    return function("cells")


def streaming(seed, folder, fetch, form):
    def minibatches(part):
        dataset = load(folder, part, streaming=True).with_format(form)
        if form == "numpy":  # the other comes in order
            dataset = dataset.shuffle(seed=seed, buffer_size=fetch)
        return (len(CSR[form](rows).indptr) - 1 for rows in dataset.iter(batch_size=64))

    return after_first(minibatches)


def mapped(seed, folder, fetch, block, form):
    def minibatches(part):
        dataset = load(folder, part, cache_dir=Path(folder, "arrow")).with_format(form)
        loader = CellDataset(
            dataset, BlockShuffling(block), batch_size=64, fetch_factor=fetch // 64,
            fetch_transform=CSR[form], seed=seed,
        )  # fmt: skip
        return (minibatch.shape[0] for minibatch in loader)

    return after_first(minibatches)


def cellfeed(seed, folder, fetch, block):
    strategy = BlockShuffling(block, align="chunks" if block >= N_GROUP else None)

    def minibatches(part):
        collection = open_collection(Path(folder, part))
        return map(len, CellDataset(collection, strategy, 64, fetch // 64, seed=seed))

    return after_first(minibatches)


def load(folder, part, **options):
    datasets.disable_progress_bars()
    files = sorted(map(str, Path(folder, part, "data").glob("*.parquet")))
    columns = ["genes", "expressions"]
    if options.get("streaming"):  # of which only these are read, as cellfeed does
        options["columns"] = columns
    return datasets.load_dataset("parquet", data_files=files, split="train",
                                 **options).select_columns(columns)  # fmt: skip


def cases(options):
    for part, sizes in (("first", [256]), ("cells", [options.rows] * options.files)):
        if not (options.data / part).exists():
            write_tahoe_layout(options.data / part, sizes)
        load(options.data, part, cache_dir=options.data / "arrow")
    given = {"folder": options.data, "fetch": options.fetch}
    streams = {
        "datasets, streaming": way(streaming, form="numpy", **given),
        "datasets, streaming Arrow in order": way(streaming, form="arrow", **given),
    }
    for block in options.blocks:
        ways = {
            "datasets, mapped": way(mapped, block=block, form="numpy", **given),
            "datasets, mapped Arrow": way(mapped, block=block, form="arrow", **given),
        }
        ways |= streams if block == options.blocks[0] else {}
        others = list(ways)
        ways["cellfeed"] = way(cellfeed, block=block, **given)
        yield Case(ways, f"block {block:,}", others, files=[options.data])


def write_tahoe_layout(folder, sizes):
    """Write cells as Tahoe-100M is published: token ids from 3, and a marker first."""
    random, tokens = np.random.default_rng(0), np.arange(3, SHAPE)
    for name in ("data", "metadata"):
        (folder / name).mkdir(parents=True)
    names = dict.fromkeys(("gene_symbol", "ensembl_id"), tokens.astype(str))
    table = pa.table(names | {"token_id": tokens})
    pq.write_table(table, folder / "metadata/gene_metadata.parquet")
    shares = np.cumsum(1 / np.arange(1, N_GENES + 1) ** 0.8)
    order = random.permutation(tokens)
    for file, n_rows in enumerate(sizes):
        lists = []
        for n in random.lognormal(np.log(3_200), 0.5, n_rows).astype(int) + 1:
            drawn = np.searchsorted(shares / shares[-1], random.random(n))
            lists.append(np.append(1, np.unique(order[drawn])))
        offsets = pa.array(np.cumsum([0, *map(len, lists)]), pa.int32())
        values = random.geometric(0.6, offsets[-1].as_py()).astype(np.float32)
        values[np.asarray(offsets)[:-1]] = -2
        columns = {
            "genes": pa.ListArray.from_arrays(offsets, np.concatenate(lists)),
            "expressions": pa.ListArray.from_arrays(offsets, values),
            "drug": [f"drug {k // 100 % 380}" for k in range(n_rows)],
            "plate": [f"plate{file % 14 + 1}"] * n_rows,
        }
        path = folder / "data" / f"train-{file:05d}-of-{len(sizes):05d}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=N_GROUP)


OPTIONS = {
    "columns": (RATE, PER_CPU, BYTES),
    "cache": ["cold"],
    "files": 2,
    "rows": 10_000,
    "blocks": [16, 1024],
    "fetch": 4096,
}
