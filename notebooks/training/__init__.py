"""What mixing is worth: linear classifiers, trained for one epoch and tested on other cells.

The protocol of the scDataset paper's Figure 5. A linear model has nothing to tune but its
learning rate, and its problem is convex, so two runs differ only in the order of the cells.
"""

from ._classifiers import LinearClassifiers
from ._comparison import compare_settings, paired_differences
from ._scores import Score, evaluate, macro_f1
from ._training import train_linear_classifiers

__all__ = [
    "LinearClassifiers",
    "Score",
    "compare_settings",
    "evaluate",
    "macro_f1",
    "paired_differences",
    "train_linear_classifiers",
]
