"""Predict the expression of treated cells from that of controls of their own cell line.

python examples/matched_controls.py 'plates/*.h5ad'
"""

import sys

import torch
from torch import nn

from cellfeed import BlockShuffling, CellDataset, MatchedControls, open_collection
from cellfeed.transforms import Log1p, NormalizeTotal

K, EPOCHS = 2, 3


class Response(nn.Module):
    """The expression of a treated cell, from the mean of its controls and its drug."""

    def __init__(self, n_genes: int, n_drugs: int, width: int = 64) -> None:
        super().__init__()
        self.drug = nn.Embedding(n_drugs, width)
        self.cell = nn.Linear(n_genes, width)
        self.treated = nn.Sequential(nn.GELU(), nn.Linear(width, n_genes))

    def forward(self, controls: torch.Tensor, drugs: torch.Tensor) -> torch.Tensor:
        return self.treated(self.cell(controls) + self.drug(drugs))


def main(plates: str) -> None:
    torch.manual_seed(0)
    collection = open_collection(plates, obs=["drug", "cell_line"])
    strategy = MatchedControls(
        BlockShuffling(4),
        treatment="drug",
        control=collection.obs["drug"].categories[0],  # synthetic plates have no DMSO
        within=["cell_line"],
        k=K,
        unmatched="drop",
    )
    dataset = CellDataset(
        collection,
        strategy,
        batch_size=64,
        fetch_factor=8,
        dense=True,
        transform=[NormalizeTotal(1e4), Log1p()],
        seed=0,
    )
    model = Response(collection.n_vars, len(collection.obs["drug"].categories))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    n_matched = n_pairs = 0
    for epoch in range(EPOCHS):
        total = of_controls = 0.0
        for minibatch in dataset.loader():
            controls = minibatch.controls.X.reshape(len(minibatch), K, -1).mean(1)
            predicted = model(controls, minibatch.obs["drug"])
            loss = nn.functional.mse_loss(predicted, minibatch.X)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            of_controls += nn.functional.mse_loss(controls, minibatch.X).item()
            lines = minibatch.controls.obs["cell_line"].reshape(-1, K)
            n_matched += int((lines == minibatch.obs["cell_line"][:, None]).sum())
            n_pairs += lines.numel()
        n = len(dataset)
        print(f"epoch {epoch}: loss {total / n:.4f}, of controls alone {of_controls / n:.4f}")
    print(f"{n_matched} of {n_pairs} pairs have the same cell line")


if __name__ == "__main__":
    main(sys.argv[1])
