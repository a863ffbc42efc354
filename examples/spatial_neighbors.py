"""Classify cells of slides by their own expression and that of their neighbours in space.

python examples/spatial_neighbors.py 'slides/*.h5ad'
"""

import sys

import torch
from torch import nn

from cellfeed import BlockShuffling, CellDataset, open_collection, random_split
from cellfeed.spatial import Graph, WithNeighbors, nearest_neighbors, to_graph
from cellfeed.transforms import Log1p, NormalizeTotal

K, EPOCHS = 6, 3


class MeanOfNeighbors(nn.Module):
    """One layer of message passing: a cell, and the mean of its neighbours (as GraphSAGE)."""

    def __init__(self, n_genes: int, n_types: int, width: int = 32) -> None:
        super().__init__()
        self.own, self.near = nn.Linear(n_genes, width), nn.Linear(n_genes, width)
        self.cell_type = nn.Sequential(nn.GELU(), nn.Linear(width, n_types))

    def forward(self, graph: Graph) -> torch.Tensor:
        X, (source, target) = graph.nodes.X, graph.edge_index
        near = torch.zeros(graph.n_seeds, X.shape[1]).index_add_(0, target, X[source])
        n_near = torch.bincount(target, minlength=graph.n_seeds).clamp(min=1)
        return self.cell_type(self.own(X[: graph.n_seeds]) + self.near(near / n_near[:, None]))


def main(slides: str) -> None:
    torch.manual_seed(0)
    collection = open_collection(slides, elements=["X", "obsm/spatial"], obs=["cell_type"])
    neighbors = nearest_neighbors(collection, K)
    train_rows, test_rows = random_split(collection, [0.8, 0.2], seed=0)
    options = {"batch_size": 64, "fetch_factor": 4, "seed": 0, "dense": True}
    options |= {"transform": {"X": [NormalizeTotal(1e4), Log1p()]}, "batch_transform": to_graph}
    train, test = (
        CellDataset(
            collection, WithNeighbors(BlockShuffling(16, indices=rows), neighbors), **options
        )
        for rows in (train_rows, test_rows)
    )
    model = MeanOfNeighbors(collection.n_vars, len(collection.obs["cell_type"].categories))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(EPOCHS):
        for graph in train.loader():
            labels = graph.nodes.obs["cell_type"][: graph.n_seeds]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(graph), labels).backward()
            optimizer.step()
        n_right = n = 0
        with torch.no_grad():
            for graph in test:
                labels = graph.nodes.obs["cell_type"][: graph.n_seeds]
                n_right += int((model(graph).argmax(1) == labels).sum())
                n += graph.n_seeds
        print(f"epoch {epoch}: accuracy {n_right / n:.2f} on {n} cells")


if __name__ == "__main__":
    main(sys.argv[1])
