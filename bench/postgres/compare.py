"""Compare cellfeed with a dataset that selects each minibatch: cells/s from PostgreSQL, in turns.

Takes .h5ad files and loads them into the server that the tests use, behind a proxy that adds 0
and 150 ms of round trip. cellfeed reads blocks of 16 with its defaults for remote storage. It is
compared with what a user would write: a map-style dataset whose ``__getitems__`` runs ``SELECT
... WHERE id = ANY(%s)`` for the same blocks, 64 cells at a time, with torch's DataLoader and 0 or
4 workers, and which unpacks rows as fast as cellfeed. All data are in the server's memory; each
turn is its own process, and reads for some seconds after its first 1024 cells. Compare ratios, not
absolute figures.
"""

import argparse
import os
import statistics
import subprocess
import sys

from tests.servers.postgres import PostgresServer
from tests.servers.proxy import DelayingProxy

from cellfeed import load_database

CELLFEED = """
def minibatches(url, workers, seed):
    from cellfeed import BlockShuffling, CellDataset, open_collection
    collection = open_collection(url)
    dataset = CellDataset(collection, BlockShuffling(16), batch_size=64, fetch_factor=16, seed=seed)
    while True:
        for minibatch in dataset.loader(workers):
            yield len(minibatch.rows)
"""
SELECTING = """
import numpy as np, psycopg, torch
from cellfeed._decode._packed import unpack_rows
class Cells(torch.utils.data.Dataset):
    connection = None
    def __init__(self, url, schema, n_cells, n_genes):
        self.url, self.n_cells, self.n_genes = url, n_cells, n_genes
        self.query = f'SELECT id, "X" FROM "{schema}".packed WHERE id = ANY(%s)'
    def __len__(self):
        return self.n_cells
    def __getitems__(self, ids):
        if self.connection is None:
            self.connection = psycopg.connect(self.url, autocommit=True)
        rows = dict(self.connection.execute(self.query, (ids,), binary=True).fetchall())
        packed = [rows[each] for each in ids]
        indptr, indices, data = unpack_rows(packed, np.dtype("float32"), self.n_genes)
        values = torch.sparse_csr_tensor(indptr, indices.astype(np.int64), data,
                                         (len(ids), self.n_genes))
        return values
def minibatches(url, workers, seed):
    where, _, schema = url.partition("?collection=")
    with psycopg.connect(where, autocommit=True) as connection:
        n, genes = (connection.execute(f'SELECT value FROM "{schema}".cellfeed WHERE key = %s',
                                       (key,)).fetchone()[0] for key in ("n_cells", "genes/var"))
    random, dataset = np.random.default_rng(seed), Cells(where, schema, n, len(genes))
    while True:
        blocks = random.permutation(n // 16)
        order = (blocks[:, None] * 16 + np.arange(16)).ravel()
        batches = [order[k : k + 64].tolist() for k in range(0, order.size, 64)]
        loader = torch.utils.data.DataLoader(
            dataset, batch_sampler=batches, num_workers=workers, collate_fn=lambda rows: rows)
        for minibatch in loader:
            yield minibatch.shape[0]
"""
RUN = """
import sys, time, warnings
warnings.simplefilter("ignore")
url, workers, seed, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
delivered = minibatches(url, workers, seed)
n = 0
for _ in range(1024 // 64):
    next(delivered)
start = time.perf_counter()
while time.perf_counter() - start < seconds:
    n += next(delivered)
print(n / (time.perf_counter() - start))
"""
TURNS = {"cellfeed": (CELLFEED, 0), "select, 0 workers": (SELECTING, 0),
         "select, 4 workers": (SELECTING, 4)}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[0, 150])
    options = parser.parse_args()
    with PostgresServer() as server:
        os.environ["PGPASSWORD"] = server.password
        load_database(options.files, server.url, "cells")
        for milliseconds in options.milliseconds:
            with DelayingProxy(server.url, milliseconds / 1000) as proxy:
                address = proxy.url.rpartition("//")[2]
                url = f"postgresql://postgres@{address}/postgres?collection=cells"
                compare(url, milliseconds, options)


def compare(url, milliseconds, options):
    rates = {name: [] for name in TURNS}
    for seed in range(options.rounds):
        for name, (code, workers) in TURNS.items():
            rates[name].append(measured(code, [url, workers, 100 * seed, options.seconds]))
    for name, found in rates.items():
        ratio = statistics.median(a / b for a, b in zip(rates["cellfeed"], found, strict=True))
        each = ", ".join(f"{rate:,.0f}" for rate in found)
        said = f"{milliseconds:g} ms, {name}: {each} cells/s; cellfeed {ratio:.2f} times\n"
        sys.stdout.write(said)
        sys.stdout.flush()


def measured(code, arguments):
    command = [sys.executable, "-W", "ignore", "-c", code + RUN, *map(str, arguments)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
