"""Sums over all cells of a collection in one pass, and what follows from them.

Highly variable genes, and counts per cell and gene.
"""

from cellfeed.genes._highly_variable import highly_variable_genes
from cellfeed.genes._sums import qc_metrics

__all__ = ["highly_variable_genes", "qc_metrics"]
