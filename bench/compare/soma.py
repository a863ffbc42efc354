"""cellfeed and TileDB-SOMA-ML on one experiment, ``--data``.

Both deliver sparse minibatches of 256 cells from contiguous blocks of 64, with one label, and read
as many cells at a time: a whole epoch in its own process.
"""

from bench._harness import Case, way


def cellfeed(seed, path, label, fetch):
    from cellfeed import BlockShuffling, CellDataset, open_collection

    collection = open_collection(path, obs=[label])
    dataset = CellDataset(
        collection, BlockShuffling(64), batch_size=256, fetch_factor=fetch // 256, seed=seed
    )
    return map(len, dataset)


def soma_ml(seed, path, label, fetch):
    import tiledbsoma
    import tiledbsoma_ml

    query = tiledbsoma.open(path).axis_query("RNA")
    dataset = tiledbsoma_ml.ExperimentDataset(
        query, layer_name="data", obs_column_names=[label], batch_size=256, io_batch_size=fetch,
        shuffle_chunk_size=64, shuffle=True, seed=seed, return_sparse_X=True,
    )  # fmt: skip
    return (minibatch[0].shape[0] for minibatch in dataset)


def cases(options):
    for fetch in options.fetch:
        given = {"path": options.data, "label": options.label, "fetch": fetch}
        ways = {"TileDB-SOMA-ML": way(soma_ml, **given), "cellfeed": way(cellfeed, **given)}
        yield Case(ways, f"{fetch:,} cells per fetch", files=[options.data])


OPTIONS = {"cache": ["warm"], "label": "plate", "fetch": [4096, 16384, 65536]}
