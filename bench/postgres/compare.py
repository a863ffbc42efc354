"""Compare cellfeed with a dataset that selects each minibatch: cells/s from PostgreSQL, in turns.

Run from the root of the repository, as ``python -m bench.postgres.compare PLATE ...``. Takes .h5ad
files and loads them into the server that the tests use, behind a proxy that adds 0
and 150 ms of round trip. cellfeed reads blocks of 16 with its defaults for remote storage. It is
compared with what a user would write: a map-style dataset whose ``__getitems__`` runs ``SELECT
... WHERE id = ANY(%s)`` for the same blocks, 64 cells at a time, with torch's DataLoader and 0 or
4 workers, and which unpacks rows as fast as cellfeed. All data are in the server's memory; each
turn is its own process, and reads for some seconds after its first 1024 cells. Compare ratios, not
absolute figures.
"""

import argparse
import os
from functools import partial

from bench._turns import RATES, answer_of, in_turns
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
url, workers, seconds, seed = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
report(minibatches(url, workers, 100 * seed), seconds, first=1024)
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
                turns = {
                    name: partial(answer_of, RATES + code + RUN, url, workers, options.seconds)
                    for name, (code, workers) in TURNS.items()
                }
                title = f"{milliseconds:g} ms, "
                in_turns(turns, options.rounds, against=["cellfeed"], title=title)


if __name__ == "__main__":
    main()
