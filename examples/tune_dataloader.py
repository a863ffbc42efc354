"""Tune a plain PyTorch DataLoader on this machine.

python examples/tune_dataloader.py plates [seconds]
"""

import sys
from pathlib import Path

import anndata
import numpy as np
import torch
from anndata.experimental import AnnCollection
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from cellfeed_tuner import Tunable, autotune

LABEL = "plate"


class Cells(torch.utils.data.Dataset):
    """Cells with their label, read from the files on demand."""

    def __init__(self, files):
        plates = [anndata.read_h5ad(path, backed="r") for path in files]
        self.cells = AnnCollection(plates, join_vars="inner", harmonize_dtypes=False)

    def __len__(self):
        return len(self.cells)

    def __getitem__(self, rows):
        cells = self.cells[rows]
        return torch.from_numpy(cells.X.toarray()), cells.obs[LABEL].to_numpy()


class Plates(Tunable):
    """Describe the loader to the tuner: its settings, how to open it, and its labels."""

    def __init__(self, files):
        self.parameters = {"num_workers": [0, 1], "prefetch_factor": [2, 8]}
        self.files = files
        obs = [anndata.read_h5ad(path, backed="r").obs[LABEL] for path in files]
        self.labels = {LABEL: np.concatenate(obs)}

    def open(self, configuration):
        cells, n_workers = Cells(self.files), configuration.num_workers
        rows = BatchSampler(RandomSampler(range(len(cells))), self.batch_size, drop_last=True)
        prefetch = configuration["prefetch_factor"] if n_workers else None
        return DataLoader(
            cells, batch_size=None, sampler=rows, num_workers=n_workers, prefetch_factor=prefetch
        )

    def labels_of(self, minibatch):
        return {LABEL: minibatch[1]}


def main(folder: str, seconds: str = "20") -> None:
    files = sorted(Path(folder).glob("*.h5ad"))
    result = autotune(Plates(files), budget=float(seconds), entropy_floor=0.5)
    print(result)
    chosen = result.chosen
    print(f"{chosen.entropy_bits.share_of_random:.0%} of random sampling's entropy")


if __name__ == "__main__":
    from tune_dataloader import main  # by module name, so that the measuring process can import it

    main(*sys.argv[1:])
