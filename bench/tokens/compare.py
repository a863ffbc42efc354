"""Random windows of a token stream with cellfeed, a NumPy memory map and litdata, in turns.

Run from the root of the repository. ``python -m bench.tokens.compare FOLDER --write 4e9`` writes
the same tokens for each loader to the folder (for litdata with ``--litdata``, the Python of an
environment that has it). Without ``--write`` it reads them: minibatches of 64 windows of 4,096
uint16 tokens, shuffled, each run in its own process, with so many windows that none is read twice.
Before each run the files are dropped from the page cache (posix_fadvise), so that every window
comes from the disk, as with a stream larger than memory; with ``--warm`` all files are read once
before. Reads are system calls of the process; a memory map makes none, but causes page faults that
wait for the disk. Compare ratios, not absolute figures.
"""

import argparse
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from bench._turns import answer_of, drop, in_turns, warm

COMMON = """
import json, os, resource, sys, time
import numpy as np
folder, n, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
WINDOW, BATCH = 4096, 64
def calls():
    return int(open("/proc/self/io").read().split("syscr: ")[1].split()[0])
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
def measure(minibatches):
    done, before, was = 0, calls(), faults()
    start, used = time.perf_counter(), time.process_time()
    for tokens in minibatches:
        assert tuple(tokens.shape) == (BATCH, WINDOW), tokens.shape
        done += BATCH
        if done >= n:
            break
    took, cpu = time.perf_counter() - start, time.process_time() - used
    print(json.dumps({"windows/s": done / took, "windows/CPU s": done / cpu,
                      "reads/window": (calls() - before) / done,
                      "faults/window": (faults() - was) / done}), flush=True)
    os._exit(0)
"""
CELLFEED = """
from cellfeed import BlockShuffling, CellDataset, TokenStream, open_collection
stream = TokenStream(folder + "/cellfeed", WINDOW)
collection = open_collection(stream, elements=ELEMENTS)
rows = np.sort(np.random.default_rng(seed).permutation(len(collection))[:n])
strategy = BlockShuffling(1, indices=rows)
dataset = CellDataset(collection, strategy, BATCH, 16, drop_last=True, seed=seed)
measure(each.X if not SPANS else (stream.spans(each), each.X)[1] for each in dataset)
"""
NUMPY = """
import torch
tokens = np.memmap(folder + "/tokens.bin", np.uint16, "r")
order = np.random.default_rng(seed).permutation(tokens.size // WINDOW)[:n]
def minibatches():
    for k in range(0, n, BATCH):
        rows = [tokens[i * WINDOW:(i + 1) * WINDOW] for i in order[k:k + BATCH].tolist()]
        yield torch.from_numpy(np.stack(rows))
measure(minibatches())
"""
LITDATA = """
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
dataset = StreamingDataset(folder + "/litdata", item_loader=TokensLoader(block_size=WINDOW),
                           shuffle=True, seed=seed)
measure(StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0))
"""
WRITE_LITDATA = """
import sys
import numpy as np, torch
from litdata.streaming.item_loader import TokensLoader
from litdata.streaming.writer import BinaryWriter
folder = sys.argv[1]
tokens = np.memmap(folder + "/tokens.bin", np.uint16, "r")
step = 4096 * 256
writer = BinaryWriter(folder + "/litdata", chunk_size=step * 32, item_loader=TokensLoader(4096))
for k in range(tokens.size // step):
    writer[k] = torch.from_numpy(tokens[k * step:(k + 1) * step].copy())
writer.done()
writer.merge()
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", type=float, help="bytes of tokens to write")
    parser.add_argument("--litdata", help="a Python that has litdata")
    parser.add_argument("--windows", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", action="store_true")
    options = parser.parse_args()
    if options.write:
        write(options.folder, int(options.write) // 2)
        if options.litdata:
            command = [options.litdata, "-c", WRITE_LITDATA, options.folder]
            subprocess.run(list(map(str, command)), check=True)
        return
    only_tokens = 'ELEMENTS, SPANS = ["X"], False\n'
    with_spans = 'ELEMENTS, SPANS = ["X", "spans", "metadata"], True\n'
    kinds = {
        "cellfeed": (sys.executable, COMMON + only_tokens + CELLFEED),
        "cellfeed, spans decoded": (sys.executable, COMMON + with_spans + CELLFEED),
        "NumPy memory map": (sys.executable, COMMON + NUMPY),
    }
    if options.litdata:
        kinds["litdata"] = options.litdata, COMMON + LITDATA
    turns = {
        name: partial(answer_of, code, options.folder, options.windows, python=python)
        for name, (python, code) in kinds.items()
    }
    prepare = partial(warm if options.warm else drop, [options.folder])
    in_turns(turns, options.rounds, against=["cellfeed"], before=prepare)


def write(folder, n_tokens):
    """Write random tokens in four shards, with a span per document, and as one file."""
    import numpy as np  # noqa: PLC0415 - after the limits of threads are known

    from cellfeed import TokenStreamWriter  # noqa: PLC0415

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


if __name__ == "__main__":
    main()
