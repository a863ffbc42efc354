"""Compare finding highly variable genes with other ways to do it, in turns.

Run from the root of the repository, as ``python -m bench.genes.compare PLATES``. Takes a folder of
.h5ad plates with counts that fit into memory. Each way runs in its own process, round after round,
with files in the page cache and code that is compiled before: cellfeed's pass; a loop over its
minibatches that sums with SciPy; and scanpy, after it has read all files, whose reading is part of
the time. Compare ratios, not absolute figures.
"""

import argparse
from functools import partial
from pathlib import Path
from textwrap import dedent

from bench._turns import answer_of, in_turns, warm

WAYS = {
    "cellfeed, one pass": "table = highly_variable_genes(open_collection(paths), **options)",
    "minibatches and SciPy": """
        collection = open_collection(paths)
        n, n_genes = len(collection), collection.n_vars
        sums, squares = np.zeros(n_genes), np.zeros(n_genes)
        for cells in CellDataset(collection, Streaming(), 1024, fetch_factor=4, as_torch=False):
            X = np.expm1(transformed(cells.X.astype(np.float32)))
            sums += X.sum(axis=0, dtype=np.float64)
            squares += X.multiply(X).sum(axis=0, dtype=np.float64)
    """,
    "scanpy in memory": """
        adata = ad.concat([ad.read_h5ad(path) for path in paths], merge="same")
        sc.pp.normalize_total(adata, target_sum=1e4)
        sc.pp.log1p(adata)
        table = sc.pp.highly_variable_genes(adata, n_top_genes=2000, inplace=False)
    """,
}
RUN = """
import json, os, resource, sys, tempfile, time, warnings
os.environ["CELLFEED_CACHE_DIR"] = tempfile.mkdtemp()  # so that sums are not there yet
warnings.simplefilter("ignore")
import anndata as ad, numpy as np, scanpy as sc
from cellfeed import CellDataset, Streaming, highly_variable_genes, open_collection
from cellfeed.transforms import Log1p, NormalizeTotal

*paths, n = sys.argv[1:]
options = dict(flavor="seurat", transform=[NormalizeTotal(1e4), Log1p()])

def transformed(X):
    totals = np.asarray(X.sum(axis=1)).ravel()
    X.data *= np.repeat(1e4 / np.maximum(totals, 1), np.diff(X.indptr)).astype(np.float32)
    np.log1p(X.data, out=X.data)
    return X

highly_variable_genes(open_collection(paths[:1]), indices=range(50), **options)
start, before = time.perf_counter(), time.process_time()
{way}
seconds, used = time.perf_counter() - start, time.process_time() - before
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
print(json.dumps({"cells/s": int(n) / seconds, "cells per second of processor time": int(n) / used,
                  "per GB of peak memory": 1 / peak}))
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plates", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    from cellfeed import open_collection  # noqa: PLC0415

    paths = sorted(options.plates.glob("*.h5ad"))
    n = len(open_collection(paths))
    turns = {name: partial(seeded, RUN.replace("{way}", dedent(way)), *paths, n)
             for name, way in WAYS.items()}  # fmt: skip
    in_turns(turns, options.rounds, against=["scanpy in memory"], before=partial(warm, paths))


def seeded(code, *arguments):
    """Run code; every seed gives the same."""
    *arguments, _ = arguments
    return answer_of(code, *arguments)


if __name__ == "__main__":
    main()
