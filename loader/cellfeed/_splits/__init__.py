"""Splits of a collection: training, validation and test sets, and folds."""

from cellfeed._splits._random_split import k_folds, random_split
from cellfeed._splits._result import Folds, Split

__all__ = ["Folds", "Split", "k_folds", "random_split"]
