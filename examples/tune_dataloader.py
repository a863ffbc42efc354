"""Choose the workers of a plain PyTorch DataLoader on this machine.

python examples/tune_dataloader.py plates [seconds]
"""

import sys
from pathlib import Path

import anndata
import torch
from anndata.experimental import AnnCollection
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from cellfeed_tuner import tune_dataloader


class Cells(torch.utils.data.Dataset):
    """Cells with their plate, read from the files on demand."""

    def __init__(self, files):
        plates = [anndata.read_h5ad(path, backed="r") for path in files]
        self.cells = AnnCollection(plates, join_vars="inner", harmonize_dtypes=False)

    def __len__(self):
        return len(self.cells)

    def __getitem__(self, rows):
        cells = self.cells[rows]
        return torch.from_numpy(cells.X.toarray()), cells.obs["plate"].to_numpy()


def main(folder: str, seconds: str = "20") -> None:
    cells = Cells(sorted(Path(folder).glob("*.h5ad")))
    rows = BatchSampler(RandomSampler(range(len(cells))), batch_size=64, drop_last=True)
    loader = DataLoader(cells, batch_size=None, sampler=rows)
    loader, result = tune_dataloader(loader, label=1, budget=float(seconds), workers=[0, 1])
    print(result)
    (plates,) = result.chosen.labels.values()
    print(f"{plates.entropy_bits.measured.value:.2f} bits of plates in a minibatch")


if __name__ == "__main__":
    main(*sys.argv[1:])
