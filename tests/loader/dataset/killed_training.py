"""Trainings that are killed at random moments, and go on from their last checkpoints.

Run as a script with a folder, the number of kills and a seed. There are as many trainings, one
after the other, as that many kills take: one may end before it is killed. Each
leaves a folder with the rows of all minibatches that count: those up to the last checkpoint of
each attempt.
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import scipy.sparse as sp

from cellfeed import BlockShuffling, CellDataset, open_collection

N_CELLS, N_EPOCHS = 403, 12


def train(folder: Path, num_workers: int, steps: int) -> None:
    """Train from the last checkpoint to the end; each step writes a byte to a pipe."""
    collection = open_collection(folder / "cells.h5ad")
    dataset = CellDataset(
        collection, BlockShuffling(4), batch_size=5, fetch_factor=6, seed=1, num_threads=1
    )
    loader: Any = dataset.loader(num_workers)
    checkpoint = folder / "checkpoint.json"
    saved = json.loads(checkpoint.read_text()) if checkpoint.exists() else None
    epoch = 0
    with (folder / "rows.txt").open("a") as log:
        if saved is not None:
            loader.load_state_dict(saved["state"])
            epoch = saved["state"]["epoch"]
        # Rows after the last checkpoint do not count; without one, none do.
        log.truncate(saved["n_bytes"] if saved is not None else 0)
        log.seek(0, os.SEEK_END)
        for number in range(epoch, N_EPOCHS):
            for step, minibatch in enumerate(loader):
                log.write(f"{number} {' '.join(map(str, minibatch.rows.tolist()))}\n")
                log.flush()
                os.write(steps, b".")
                if step % 3 == 0:
                    save(checkpoint, loader.state_dict(), log.tell())
        save(checkpoint, loader.state_dict(), log.tell())


def save(path: Path, state: dict[str, Any], n_bytes: int) -> None:
    """Write a checkpoint, whole or not at all."""
    path.with_suffix(".new").write_text(json.dumps({"state": state, "n_bytes": n_bytes}))
    path.with_suffix(".new").replace(path)


def main(folder: Path, n_kills: int, seed: int) -> None:
    """Train until all kills are done; write the number of kills, and of checkpoints they left."""
    warnings.simplefilter("ignore")
    moments = random.Random(seed)
    n_killed, places = 0, set[str]()
    while n_killed < n_kills:
        training = folder / f"training {n_killed}"
        training.mkdir()
        values = sp.random(N_CELLS, 20, density=0.3, format="csr", dtype=np.float32)
        anndata.AnnData(values).write_h5ad(training / "cells.h5ad")
        while attempt(training, moments, is_killed=n_killed < n_kills):
            n_killed += 1
            if (training / "checkpoint.json").exists():
                places.add((training / "checkpoint.json").read_text())
    sys.stdout.write(f"{n_killed} {len(places)}")


def attempt(folder: Path, moments: random.Random, *, is_killed: bool) -> bool:
    """Train from the last checkpoint on; return whether that was killed before its end."""
    num_workers = moments.choice([0, 0, 0, 1, 2])
    receiver, sender = os.pipe()
    process = os.fork()
    if process == 0:
        os.setpgrp()
        train(folder, num_workers, sender)
        os._exit(0)
    os.close(sender)
    with contextlib.suppress(OSError):  # whichever of the two is first
        os.setpgid(process, process)
    if is_killed:
        # After some steps and a little more, or, where there are fewer left, at its end.
        n_left = moments.choice([0, moments.randrange(150)])
        while n_left and (came := os.read(receiver, n_left)):
            n_left -= len(came)
        time.sleep(moments.uniform(0.0, 0.05))
        os.killpg(process, signal.SIGKILL)  # with its workers, as a scheduler does
    _, status = os.waitpid(process, 0)
    os.close(receiver)
    if not os.WIFSIGNALED(status) and status:
        raise SystemExit(f"the training failed: {os.waitstatus_to_exitcode(status)}")
    return os.WIFSIGNALED(status)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
