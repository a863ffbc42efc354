"""Train on some conditions of a perturbation study, and predict those that were held out.

python examples/perturbation_split.py 'plates/*.h5ad'
"""

import sys

import numpy as np
import torch
from torch import nn

from cellfeed import (
    BlockShuffling,
    CellDataset,
    MatchedControls,
    open_collection,
    perturbation_split,
)
from cellfeed.transforms import Log1p, NormalizeTotal

EPOCHS = 4


class Response(nn.Module):
    """The expression of a treated cell, from that of a control and its drug."""

    def __init__(self, n_genes: int, n_drugs: int, width: int = 64) -> None:
        super().__init__()
        self.drug = nn.Embedding(n_drugs, width)
        self.cell = nn.Linear(n_genes, width)
        self.treated = nn.Sequential(nn.GELU(), nn.Linear(width, n_genes))

    def forward(self, pairs) -> torch.Tensor:
        return self.treated(self.cell(pairs.controls.X) + self.drug(pairs.obs["drug"]))


def main(plates: str) -> None:
    torch.manual_seed(0)
    collection = open_collection(plates, obs=["drug", "cell_line"])
    drugs, lines = (collection.obs[each].categories for each in ("drug", "cell_line"))
    # A fifth of the drugs of a cell line for validation, and two fifths for testing.
    treated = np.unique(collection.obs["drug"].values[collection.obs["cell_line"].values == 1])
    drawn = [drugs[code] for code in np.random.default_rng(0).permutation(treated[treated > 0])]
    fifth = len(drawn) // 5
    # Or the path of a TOML file in the layout of STATE.
    held_out = {
        "zeroshot": {lines[0]: "test"},
        "fewshot": {lines[1]: {"val": drawn[:fifth], "test": drawn[fifth : 3 * fifth]}},
    }
    split = perturbation_split(
        collection, held_out, treatment="drug", control=drugs[0], cell_type="cell_line"
    )
    print(split)

    def dataset_of(part: str, rows: np.ndarray) -> CellDataset:
        strategy = MatchedControls(
            BlockShuffling(4, indices=rows),
            treatment="drug",
            control=drugs[0],
            within=["cell_line"],
            control_indices=split.controls(part),
        )
        steps = [NormalizeTotal(1e4), Log1p()]
        return CellDataset(collection, strategy, 64, 8, seed=0, dense=True, transform=steps)

    train, val, test = map(dataset_of, ("train", "val", "test"), split)
    model = Response(collection.n_vars, len(drugs))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_on(dataset: CellDataset) -> float:
        dataset.set_epoch(0)  # the same pairs after each epoch
        with torch.no_grad():
            return np.mean([nn.functional.mse_loss(model(each), each.X) for each in dataset])

    for epoch in range(EPOCHS):
        for pairs in train.loader():
            optimizer.zero_grad()
            nn.functional.mse_loss(model(pairs), pairs.X).backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss_on(val):.4f} on conditions of validation")
    *_, rows = split
    print(f"loss {loss_on(test):.4f} on {rows.size} cells of the conditions of the test")


if __name__ == "__main__":
    main(sys.argv[1])
