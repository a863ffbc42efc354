"""Splits of a collection: training, validation and test sets, and folds."""

from cellfeed._collection._splits._random_split import k_folds, random_split
from cellfeed._collection._splits._result import Folds, Split
