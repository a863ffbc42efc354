"""A classifier of cell lines in plain PyTorch: split, normalise, train, validate.

python examples/pytorch.py 'plates/*.h5ad'
"""

import sys

import torch

from cellfeed import BlockShuffling, CellDataset, Streaming, open_collection, random_split
from cellfeed.transforms import Log1p, NormalizeTotal

LABEL = "cell_line"


def main(plates: str) -> None:
    collection = open_collection(plates, obs=[LABEL])
    train_rows, validation_rows = random_split(collection, [0.8, 0.2], seed=0, stratify=LABEL)
    options = {"batch_size": 64, "fetch_factor": 16, "seed": 0}
    transform = [NormalizeTotal(1e4), Log1p()]
    train = CellDataset(
        collection, BlockShuffling(16, indices=train_rows), transform=transform, **options
    )
    validation = CellDataset(
        collection, Streaming(indices=validation_rows), transform=transform, **options
    )

    n_classes = len(collection.obs[LABEL].categories)
    model = torch.nn.Linear(collection.n_vars, n_classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        total = 0.0
        for minibatch in train.loader():
            optimizer.zero_grad()
            scores = minibatch.X @ model.weight.T + model.bias  # X is a sparse CSR tensor
            loss = torch.nn.functional.cross_entropy(scores, minibatch.obs[LABEL])
            loss.backward()
            optimizer.step()
            total += loss.item()
        n_right = 0
        with torch.no_grad():
            for minibatch in validation.loader():
                scores = minibatch.X @ model.weight.T + model.bias
                n_right += int((scores.argmax(1) == minibatch.obs[LABEL]).sum())
        print(
            f"epoch {epoch}: loss {total / len(train):.2f}, "
            f"accuracy {n_right / len(validation_rows):.0%} on {len(validation_rows):,} cells"
        )


if __name__ == "__main__":
    main(sys.argv[1])
