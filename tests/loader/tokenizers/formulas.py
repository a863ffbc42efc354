"""The formulas of `cellfeed.tokenizers` in plain NumPy, a cell at a time."""

import numpy as np

from cellfeed.sampling import derive_key, random_words
from cellfeed.tokenizers import BinnedValues, MaskTokens, MaskValues, RankTokens

PURPOSE = 2  # of the key of an epoch
BINS, SUBSET, MASKED, REPLACED = range(4)


def row_key(seed, epoch, row):
    key = derive_key(seed, epoch, PURPOSE)
    return int(random_words(key, np.array([row]))[0])


def uniform(key, stream, numbers):
    words = random_words(key, (stream << 40) + np.asarray(numbers, np.int64))
    return (words >> np.uint64(11)) * 2.0**-53


def chosen_of(n, n_chosen, key, stream):
    chosen = np.zeros(n, bool)
    for i, drawn in enumerate(uniform(key, stream, np.arange(n))):
        chosen[i] = (n - i) * drawn < n_chosen
        n_chosen -= chosen[i]
    return chosen


def ranked(values, tokens, medians):
    """Return tokens of genes from the most to the least expressed, of one dense row."""
    known = np.flatnonzero((values != 0) & (tokens >= 0))
    total = values.astype(np.float64).sum()
    scores = values[known].astype(np.float64) / total * 10_000 / medians[known]
    return tokens[known[np.lexsort([tokens[known], -scores])]]


def binned(values, n_bins, key, places):
    """Return the bin of each value other than 0, by `binning` of scGPT with words of our own."""
    edges = np.quantile(values, np.linspace(0, 1, n_bins - 1))
    left, right = np.digitize(values, edges), np.digitize(values, edges, right=True)
    return np.ceil(uniform(key, BINS, places) * (right - left) + left)


def made_of(  # noqa: C901
    tokenizer, values, tokens, medians, key, masking=None
):
    """Return tokens, values, labels and where they are masked, of one dense row; some are None."""
    special = (getattr(tokenizer, name, None) for name in ("cls", "eos"))
    before, after = ([] if each is None else [tokenizer.token_of(each)] for each in special)
    room = tokenizer.max_length - len(before) - len(after)
    own_values = None
    if isinstance(tokenizer, RankTokens):
        own = ranked(values, tokens, medians)[:room]
    else:
        genes = np.flatnonzero(tokens >= 0)
        if tokenizer.genes == "nonzero":
            genes = genes[values[genes] != 0]
        own, own_values = tokens[genes], values[genes].astype(np.float64)
        nonzero = np.flatnonzero(own_values)
        kept = np.ones(genes.size, bool)
        if genes.size > room:
            kept = chosen_of(genes.size, room, key, SUBSET)
        if isinstance(tokenizer, BinnedValues) and nonzero.size:
            of_dtype = values[genes[nonzero]]
            own_values[nonzero] = binned(of_dtype, tokenizer.n_bins, key, nonzero)
        own, own_values = own[kept], own_values[kept].astype(np.float32)
    n = own.size
    labels = is_masked = None
    if masking is not None:
        chosen = chosen_of(n, int(n * masking.fraction), key, MASKED)
        is_masked = np.concatenate(
            [np.zeros(len(before), bool), chosen, np.zeros(len(after), bool)]
        )
    if isinstance(masking, MaskTokens):
        labels = np.full(len(before) + n + len(after), -100)
        labels[is_masked] = own[chosen]
        replacements = tokens[tokens >= 0]
        own = own.copy()
        for i in np.flatnonzero(chosen):
            drawn, place = uniform(key, REPLACED, [2 * i, 2 * i + 1])
            if drawn < masking.random:
                own[i] = replacements[int(place * replacements.size)]
            elif drawn >= masking.random + masking.kept:
                own[i] = tokenizer.token_of(masking.mask)
    if own_values is not None:
        own_values = np.concatenate([np.zeros(len(before), np.float32), own_values])
    if isinstance(masking, MaskValues):
        assert own_values is not None
        labels = own_values.copy()
        own_values[is_masked] = masking.value
    return np.concatenate([before, own, after]).astype(np.int64), own_values, labels, is_masked
