"""Random windows of a token stream with cellfeed, a NumPy memory map and litdata.

So many ``--tokens`` are written to ``--data`` once for each loader (for litdata if ``--litdata`` is
the Python of an environment that has it). They are read in minibatches of 64 windows of 4,096
uint16 tokens, shuffled, with so many ``--windows`` that none is read twice. A memory map makes no
read call, but causes page faults that wait for the disk. In the table, a cell is a window.
"""

import itertools
import os

import numpy as np
import torch
from bench._harness import CALLS, FAULTS, PER_CPU, RATE, Case, turn, way

WINDOW, BATCH = 4096, 64


def cellfeed(seed, folder, windows, elements):
    from cellfeed import BlockShuffling, CellDataset, TokenStream, open_collection

    stream = TokenStream(f"{folder}/cellfeed", WINDOW)
    collection = open_collection(stream, elements=elements)
    rows = np.sort(np.random.default_rng(seed).permutation(len(collection))[:windows])
    strategy = BlockShuffling(1, indices=rows)
    for each in CellDataset(collection, strategy, BATCH, 16, drop_last=True, seed=seed):
        if "spans" in elements:
            stream.spans(each)
        yield len(each)


def memory_map(seed, folder, windows):
    tokens = np.memmap(f"{folder}/tokens.bin", np.uint16, "r")
    order = np.random.default_rng(seed).permutation(tokens.size // WINDOW)[:windows]
    for k in range(0, windows, BATCH):
        rows = [tokens[i * WINDOW : (i + 1) * WINDOW] for i in order[k : k + BATCH].tolist()]
        yield len(torch.from_numpy(np.stack(rows)))


def litdata(seed, folder, windows):
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    dataset = StreamingDataset(
        f"{folder}/litdata", item_loader=TokensLoader(block_size=WINDOW), shuffle=True, seed=seed
    )
    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0)
    return map(len, itertools.islice(loader, windows // BATCH))


def write_litdata(seed, folder):
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    tokens, step = np.memmap(f"{folder}/tokens.bin", np.uint16, "r"), WINDOW * 256
    loader = TokensLoader(WINDOW)
    writer = BinaryWriter(f"{folder}/litdata", chunk_size=step * 32, item_loader=loader)
    for k in range(tokens.size // step):
        writer[k] = torch.from_numpy(tokens[k * step : (k + 1) * step].copy())
    writer.done()
    writer.merge()
    return {}


def cases(options):
    if not options.data.joinpath("tokens.bin").exists():
        write(options.data, options.tokens)
    given = {"folder": options.data, "windows": options.windows}
    decoded = ["X", "spans"]
    ways = {
        "cellfeed": way(cellfeed, elements=["X"], **given),
        "cellfeed, spans decoded": way(cellfeed, elements=decoded, **given),
        "NumPy memory map": way(memory_map, **given),
    }
    if options.litdata:
        if not options.data.joinpath("litdata").exists():
            turn(way(write_litdata, python=options.litdata, folder=options.data))
        ways["litdata"] = way(litdata, python=options.litdata, **given)
    yield Case(ways, "windows", files=[options.data])


def write(folder, n_tokens):
    """Write random tokens in four shards, with a span per document, and as one file."""
    from cellfeed import TokenStreamWriter

    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    with (folder / "tokens.bin").open("wb") as flat:
        for shard in range(4):
            with TokenStreamWriter(folder / "cellfeed", "uint16", shard=str(shard)) as writer:
                while writer.n_tokens < n_tokens // 4:
                    document = random.integers(0, 50_000, random.integers(100, 8000), np.uint16)
                    title = {"document": writer.n_tokens, "species": "human", "source": "a b c"}
                    writer.append(document, metadata=title)
                    flat.write(document)
        flat.flush()
        os.fsync(flat.fileno())


OPTIONS = {
    "columns": (RATE, PER_CPU, CALLS, FAULTS),
    "tokens": 1_000_000_000,
    "windows": 16_384,
    "litdata": "",
    "cache": ["cold", "warm"],
}
