"""Training from PostgreSQL, on the cells that an SQL condition selects.

Before, in Python: cellfeed.load_database("plates/", "postgresql://me@host/cells", "plates"). Then:
PGPASSWORD=... python examples/postgres.py 'postgresql://me@host/cells?collection=plates'
"""

import sys

import torch

from cellfeed import BlockShuffling, CellDataset, PostgresSource, open_collection

LABEL = "cell_line"


def main(url: str) -> None:
    source = PostgresSource(url, where=f"id % 2 = 0 AND {LABEL} IS NOT NULL")
    collection = open_collection(source, obs=[LABEL])
    n_all = PostgresSource(url).n_rows
    print(f"{len(collection):,} of {n_all:,} cells to train on")
    n_lines = len(collection.obs[LABEL].categories)
    dataset = CellDataset(collection, BlockShuffling(4), batch_size=64, fetch_factor=4, seed=0)
    model = torch.nn.Linear(collection.n_vars, n_lines)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(3):
        losses = []
        for minibatch in dataset.loader():
            outputs = model(minibatch.X.to_dense().log1p())
            loss = torch.nn.functional.cross_entropy(outputs, minibatch.obs[LABEL].long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
