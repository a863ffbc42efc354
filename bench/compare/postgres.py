"""cellfeed on PostgreSQL, and a dataset that selects each minibatch.

The cells of ``--data`` are loaded into the server that the tests use, behind a proxy that adds each
of ``--milliseconds`` of round trip. cellfeed reads blocks of 16 with its defaults for remote
storage. A user would write the other: a map-style dataset whose ``__getitems__`` runs ``SELECT ...
WHERE id = ANY(%s)`` for the same blocks, 64 cells at a time, with torch's DataLoader and 0 or 4
workers, and which unpacks rows as fast as cellfeed. All data are in the server's memory. The first
1024 cells are not timed.
"""

import os

import numpy as np
import psycopg
import torch
from bench._harness import Case, after, plates_of, way, without_end
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import DelayingProxy

import cellfeed as cf
from cellfeed.storages.postgres._packed import unpack_rows


def cellfeed(seed, url):
    collection = cf.open_collection(url)
    dataset = cf.CellDataset(collection, cf.BlockShuffling(16), 64, fetch_factor=16, seed=seed)
    return after(1024, without_end(dataset))


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
        shape = len(ids), self.n_genes
        return torch.sparse_csr_tensor(indptr, indices.astype(np.int64), data, shape)


def select(seed, url, workers):
    where, _, schema = url.partition("?collection=")
    with psycopg.connect(where, autocommit=True) as connection:
        n, genes = (
            connection.execute(f'SELECT value FROM "{schema}".cellfeed WHERE key = %s', (key,))
            .fetchone()[0] for key in ("n_cells", "genes/var")
        )  # fmt: skip
    random, dataset = np.random.default_rng(seed), Cells(where, schema, n, len(genes))

    def sizes():
        while True:
            order = (random.permutation(n // 16)[:, None] * 16 + np.arange(16)).ravel()
            batches = [order[k : k + 64].tolist() for k in range(0, order.size, 64)]
            for minibatch in torch.utils.data.DataLoader(
                dataset, batch_sampler=batches, num_workers=workers, collate_fn=lambda rows: rows
            ):
                yield minibatch.shape[0]

    return after(1024, sizes())


def cases(options):
    with PostgresServer() as server:
        os.environ["PGPASSWORD"] = server.password
        cf.load_database(list(map(str, plates_of(options))), server.url, "cells")
        for milliseconds in options.milliseconds:
            with DelayingProxy(server.url, milliseconds / 1000) as proxy:
                address = proxy.url.rpartition("//")[2]
                url = f"postgresql://postgres@{address}/postgres?collection=cells"
                ways = {f"select, {n} workers": way(select, url=url, workers=n) for n in (0, 4)}
                yield Case({"cellfeed": way(cellfeed, url=url), **ways}, f"{milliseconds:g} ms")


OPTIONS = {"cells": 28_000, "seconds": 10.0, "milliseconds": [0.0, 150.0]}
