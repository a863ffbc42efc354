"""Compare cellfeed on Parquet files with HuggingFace's `datasets`, streaming and mapped, in turns.

Run from the root of the repository, as ``python -m bench.parquet.compare SCRATCH``. Writes cells in
the layout of Tahoe-100M to SCRATCH once: files of 10,000 cells, row groups of 1,000, some 2,700
genes a cell; and the Arrow copy that `datasets` maps. All loaders deliver all cells once, as CSR
minibatches of 64, each in its own process, one after the other and round after round, with the
files dropped from the page cache before. Time and bytes are those from the first request of a
minibatch to the last minibatch: opening is not in them, filling a buffer is. Streaming shuffles as
many cells as the others read at a time, or reads in order of the files. Bytes are those that the
disk was asked for. Compare ratios, not absolute figures.
"""

import argparse
from functools import partial
from pathlib import Path
from textwrap import dedent, indent

from bench._turns import RATES, answer_of, drop, in_turns

N_GENES, N_VALUES, N_ROWS, N_GROUP = 62_710, 2_000, 10_000, 1_000

LOADERS = {
    "datasets, streaming": """
        dataset = load(streaming=True).with_format("numpy").shuffle(seed=seed, buffer_size=fetch)
        return map(csr, dataset.iter(batch_size=64))
    """,
    "datasets, streaming Arrow in order": """
        dataset = load(streaming=True).with_format("arrow")
        return map(csr_of_arrow, dataset.iter(batch_size=64))
    """,
    "datasets, mapped": """
        dataset = load(cache_dir=arrow).with_format("numpy")
        return CellDataset(dataset, BlockShuffling(block), batch_size=64,
                           fetch_factor=fetch // 64, fetch_transform=csr, seed=seed)
    """,
    "datasets, mapped Arrow": """
        dataset = load(cache_dir=arrow).with_format("arrow")
        return CellDataset(dataset, BlockShuffling(block), batch_size=64,
                           fetch_factor=fetch // 64, fetch_transform=csr_of_arrow, seed=seed)
    """,
    "cellfeed": """
        strategy = BlockShuffling(block, align="chunks" if block >= 1000 else None)
        return CellDataset(open_collection(cells), strategy, batch_size=64,
                           fetch_factor=fetch // 64, seed=seed)
    """,
}
RUN = """
import os, time, numpy as np, scipy.sparse as sp
from pathlib import Path
from cellfeed import BlockShuffling, CellDataset, open_collection

first, cells, arrow, block, fetch, seed = sys.argv[1:]
block, fetch, seed = int(block), int(fetch), int(seed)

def csr(rows):
    indptr = np.cumsum([0, *map(len, rows["genes"])])
    parts = np.concatenate(rows["expressions"]), np.concatenate(rows["genes"]), indptr
    return sp.csr_array(parts, shape=(len(indptr) - 1, N_GENES + 3))

def csr_of_arrow(rows):
    import pyarrow.compute as pc
    lengths = pc.list_value_length(rows["genes"]).to_numpy()
    parts = [pc.list_flatten(rows[name]).to_numpy() for name in ("expressions", "genes")]
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    return sp.csr_array((*parts, indptr), shape=(len(lengths), N_GENES + 3))

def opened(cells):
    def load(**options):
        import datasets
        datasets.disable_progress_bars()
        files = sorted(map(str, Path(cells, "data").glob("*.parquet")))
        columns = ["genes", "expressions"]
        if options.get("streaming"):  # of which only these are read, as cellfeed does
            options["columns"] = columns
        return datasets.load_dataset("parquet", data_files=files, split="train",
                                     **options).select_columns(columns)

{opened}

def n_read():
    text = Path("/proc/self/io").read_text()
    return int(text.partition("\\nread_bytes: ")[2].split()[0])

for minibatch in opened(first):
    pass  # what is imported, loaded and compiled once is not measured
loader = opened(cells)
begin, n, start, used = n_read(), 0, time.perf_counter(), time.process_time()
for minibatch in loader:
    n += minibatch.shape[0] if sp.issparse(minibatch) else len(minibatch.rows)
wall, used = time.perf_counter() - start, time.process_time() - used
print(json.dumps({"cells/s": n / wall, "cells per second of processor time": n / used,
                  "bytes read a cell": (n_read() - begin) / n}), flush=True)
os._exit(0)  # threads of `datasets` that stream would abort
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scratch", type=Path, help="where the cells are, or are written")
    parser.add_argument("--files", type=int, default=2, help="of 10,000 cells each")
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 1024])
    parser.add_argument("--fetch", type=int, default=4096, help="cells that are read at a time")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    first, cells, arrow = (options.scratch / name for name in ("first", "cells", "arrow"))
    for folder, sizes in ((first, [256]), (cells, [N_ROWS] * options.files)):
        if not folder.exists():
            write_tahoe_layout(folder, sizes)
    for opened in LOADERS.values():  # the Arrow copy is written, and code compiled
        answer_of(code_of(opened), first, cells, arrow, 64, options.fetch, 0)
    for block in options.blocks:
        turns = {
            name: partial(answer_of, code_of(opened), first, cells, arrow, block, options.fetch)
            for name, opened in LOADERS.items()
            if block == options.blocks[0] or "streaming" not in name  # which has no blocks
        }
        in_turns(
            turns, options.rounds, against=[*turns][:-1], title=f"block {block:,}, cold: ",
            before=partial(drop, [cells, arrow]),
        )  # fmt: skip


def write_tahoe_layout(folder, sizes):
    """Write cells as Tahoe-100M is published: token ids from 3, and a marker first."""
    import numpy as np  # noqa: PLC0415 - nothing of this is needed twice
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    random, tokens = np.random.default_rng(0), np.arange(3, 3 + N_GENES)
    for name in ("data", "metadata"):
        (folder / name).mkdir(parents=True)
    genes = {
        "gene_symbol": tokens.astype(str),
        "ensembl_id": tokens.astype(str),
        "token_id": tokens,
    }
    pq.write_table(pa.table(genes), folder / "metadata/gene_metadata.parquet")
    shares = np.cumsum(1 / np.arange(1, N_GENES + 1) ** 0.8)
    order = random.permutation(tokens)
    for file, n_rows in enumerate(sizes):
        lists = []
        for n in random.lognormal(np.log(1.6 * N_VALUES), 0.5, n_rows).astype(int) + 1:
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


def code_of(opened):
    code = RATES + RUN.replace("{opened}", indent(dedent(opened), "    "))
    return code.replace("N_GENES", str(N_GENES))


if __name__ == "__main__":
    main()
