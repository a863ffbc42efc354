"""Sums over all cells of a collection in one pass, and what follows from them.

Highly variable genes, and counts per cell and gene.
"""

from cellfeed._genes._highly_variable import highly_variable_genes
from cellfeed._genes._sums import qc_metrics
