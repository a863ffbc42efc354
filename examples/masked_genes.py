"""A small transformer that learns to fill in masked genes, from cells as sequences of tokens.

Cells are Geneformer's rank value encoding; for its models, take its own vocabulary and medians.

python examples/masked_genes.py 'plates/*.h5ad'
"""

import sys

import numpy as np
import torch
from torch import nn

from cellfeed import BlockShuffling, CellDataset, open_collection, random_split
from cellfeed.tokenizers import MaskTokens, RankTokens

SPECIAL = ["<pad>", "<mask>", "<cls>", "<eos>"]
LENGTH, WIDTH = 64, 32


class Transformer(nn.Module):
    """Two layers that read genes in order of rank, and say which genes are masked."""

    def __init__(self, n_tokens: int) -> None:
        super().__init__()
        self.genes, self.ranks = nn.Embedding(n_tokens, WIDTH), nn.Embedding(LENGTH, WIDTH)
        nn.init.normal_(self.genes.weight, std=0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.bias = nn.Parameter(torch.zeros(n_tokens))

    def loss(self, minibatch) -> torch.Tensor:
        tokens = minibatch["tokens"]
        embedded = self.genes(tokens) + self.ranks(torch.arange(tokens.shape[1]))
        encoded = self.encoder(embedded, src_key_padding_mask=~minibatch["attention_mask"])
        scores = encoded @ self.genes.weight.T + self.bias
        # Labels are -100 where nothing is masked, which cross entropy leaves out.
        return nn.functional.cross_entropy(scores.flatten(0, 1), minibatch["labels"].flatten())


def main(plates: str) -> None:
    torch.manual_seed(0)
    collection = open_collection(plates)
    train_rows, test_rows = random_split(collection, [0.8, 0.2], seed=0)
    vocabulary = [*SPECIAL, *collection.var_names]
    medians = medians_of(collection, train_rows)
    masking = MaskTokens(0.15)
    tokens = RankTokens(vocabulary, medians, max_length=LENGTH, masking=masking)
    options = {"batch_size": 64, "fetch_factor": 4, "seed": 0}
    options["transform"] = tokens
    train = CellDataset(collection, BlockShuffling(16, indices=train_rows), **options)
    test = CellDataset(collection, BlockShuffling(16, indices=test_rows), **options)

    model = Transformer(len(vocabulary))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(3):
        for minibatch in train.loader():
            optimizer.zero_grad()
            model.loss(minibatch).backward()
            optimizer.step()
        test.set_epoch(0)  # the same masks after each epoch
        with torch.no_grad():
            loss = np.mean([model.loss(minibatch).item() for minibatch in test])
        print(f"epoch {epoch}: loss {loss:.2f} on {len(test_rows):,} cells")
    statistics = train.statistics()
    print(f"{statistics.n_tokens / statistics.n_cells:.0f} tokens per cell")


def medians_of(collection, rows) -> dict[str, float]:
    """Return the median of each gene's normalised values other than 0, of up to 2,000 cells."""
    X = collection[rows[:2000]].X.tocsc().astype(np.float64)
    totals = np.asarray(X.sum(axis=1)).ravel()
    X.data *= 1e4 / totals[X.indices]
    parts = np.split(X.data, X.indptr[1:-1])
    named = zip(collection.var_names, parts, strict=True)
    return {gene: float(np.median(part)) for gene, part in named if part.size}


if __name__ == "__main__":
    main(sys.argv[1])
