"""Token streams: genes of cells as tokens with a count each, and metadata for each cell.

    python examples/tokens.py FOLDER_OF_PLATES

Each cell becomes a document: its genes by decreasing count, as (gene, count). Each plate is a
shard, which another process could write. Windows over all cells then train a small model that
predicts the next gene, with metadata for the cells of each window. Finally, documents are padded.
"""

import sys
import tempfile
from pathlib import Path

import anndata as ad
import numpy as np
import torch
from torch import nn

from cellfeed import BlockShuffling, CellDataset, TokenStream, TokenStreamWriter, open_collection

TOKEN = np.dtype([("gene", "uint16"), ("count", "float32")])
N_GENES_OF_A_CELL = 100


def write_shard(folder: Path, plate: Path) -> None:
    adata = ad.read_h5ad(plate)
    with TokenStreamWriter(
        folder, TOKEN, shard=plate.stem, documents=True, obs=["cell_line"]
    ) as writer:
        for k, row in enumerate(adata.X):
            best = np.argsort(-row.data, kind="stable")[:N_GENES_OF_A_CELL]
            tokens = np.empty(best.size, TOKEN)
            tokens["gene"], tokens["count"] = row.indices[best], row.data[best]
            cell_line = adata.obs["cell_line"].iloc[k]
            metadata = {"cell": adata.obs_names[k], "cell_line": cell_line}
            writer.append(tokens, metadata=metadata, obs={"cell_line": cell_line})


def main() -> None:
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp()) / "stream"
    plates = sorted(Path(sys.argv[1]).glob("*.h5ad"))
    for plate in plates:
        write_shard(folder, plate)

    stream = TokenStream(folder, window=256)
    collection = open_collection(stream, elements=["X", "spans"], obs=["shard"])
    dataset = CellDataset(collection, BlockShuffling(1), batch_size=16, fetch_factor=4, seed=0)
    n_genes = 2**16
    embedding, head = nn.Embedding(n_genes, 16), nn.Linear(16, n_genes)
    optimizer = torch.optim.Adam([*embedding.parameters(), *head.parameters()], lr=1e-2)
    for step, minibatch in zip(range(4), dataset, strict=False):
        genes = minibatch["X/gene"].long()
        logits = head(embedding(genes[:, :-1:16]))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), genes[:, 1::16].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first = stream.spans(minibatch)[0][0]
        print(f"step {step}: loss {loss.item():.2f}, begins in {first.metadata['cell']}")

    documents = open_collection(TokenStream(folder, documents=True), obs=["cell_line"])
    minibatch = next(iter(CellDataset(documents, BlockShuffling(1), batch_size=8, seed=0)))
    print(f"{len(plates)} shards, {len(documents)} cells")
    print(f"padded to {tuple(minibatch['X/gene'].padded().shape)}")


if __name__ == "__main__":
    main()
