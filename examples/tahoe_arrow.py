"""Training from the files of a HuggingFace dataset of cells, such as Tahoe-100M.

    python examples/tahoe_arrow.py folder/of/save_to_disk gene_metadata.parquet

Each row has the lists `genes` (token ids, beginning with a marker's) and `expressions`, and obs
columns such as `drug`. The table of genes has a `token_id` and a `gene_symbol` for each gene.
"""

import sys

import pandas as pd
import torch

from cellfeed import BlockShuffling, CellDataset, HuggingFaceSource, open_collection
from cellfeed.transforms import Log1p, NormalizeTotal

LABEL = "drug"


def main(folder: str, gene_table: str) -> None:
    genes = pd.read_parquet(gene_table).set_index("gene_symbol")
    source = HuggingFaceSource(folder, gene_table=genes, n_markers=1)
    collection = open_collection(source, obs=[LABEL])
    print(collection)

    train = CellDataset(
        collection,
        BlockShuffling(16),
        batch_size=64,
        fetch_factor=16,
        dtype="float32",
        transform=[NormalizeTotal(1e4), Log1p()],
        seed=0,
    )
    model = torch.nn.Linear(collection.n_vars, len(collection.obs[LABEL].categories))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        total = 0.0
        for minibatch in train.loader():
            optimizer.zero_grad()
            scores = minibatch.X @ model.weight.T + model.bias
            loss = torch.nn.functional.cross_entropy(scores, minibatch.obs[LABEL])
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(train):.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
