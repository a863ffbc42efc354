"""Minibatches of those cells of a TileDB-SOMA experiment that a query selects.

python examples/soma.py atlas_soma "n_counts > 500" --label plate
"""

import argparse

from cellfeed import BlockShuffling, CellDataset, SomaSource, open_collection


def main(experiment: str, query: str | None, label: str) -> None:
    source = SomaSource(experiment, obs_query=query)
    collection = open_collection(source, obs=[label])
    print(f"{len(collection):,} cells x {collection.n_vars:,} genes of {source}")
    # Large fetches pay off more than elsewhere: the blocks of a fetch share compressed chunks.
    dataset = CellDataset(
        collection, BlockShuffling(64), batch_size=256, fetch_factor=64, drop_last=False, seed=0
    )
    for epoch in range(2):
        seen = total = 0.0
        for minibatch in dataset.loader():
            seen += len(minibatch)
            total += float(minibatch.X.values().sum())  # sparse CSR, in PyTorch
            labels = minibatch.obs[label]  # codes, or numbers
        print(f"epoch {epoch}: {seen:,.0f} cells, {total / seen:,.1f} counts each")
    print(f"last labels: {collection.obs[label].decode(labels.numpy()[:3]).tolist()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment")
    parser.add_argument("query", nargs="?")
    parser.add_argument("--label", default="plate")
    given = parser.parse_args()
    main(given.experiment, given.query, given.label)
