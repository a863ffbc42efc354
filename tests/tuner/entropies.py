"""The plug-in estimate of the entropy of labels, as it is defined."""

from collections import Counter
from math import log2


def plug_in(labels) -> float:
    """In bits, of the labels that are known: -1 is a missing one."""
    known = [label for label in labels if label >= 0]
    n = len(known)
    return -sum(c / n * log2(c / n) for c in Counter(known).values()) if n else 0.0
