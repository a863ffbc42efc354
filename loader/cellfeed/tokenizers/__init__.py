"""Tokenizers: cells as sequences of tokens, made while minibatches are read.

A tokenizer is the last of the transforms of a `CellDataset`. In place of the element, minibatches
then have:

========================  ==========================================================================
``"tokens"``              int64, shape (n_cells, width)
``"values"``              float32, in the same shape; not of `RankTokens`
``"attention_mask"``      bool, in the same shape: True except for padding
``"lengths"``             int64, shape (n_cells,): number of tokens of each cell
``"labels"``              in the same shape as tokens, with ``masking``; see `MaskTokens` and
                          `MaskValues`
``"masked"``              bool, in the same shape, with ``masking``: where
========================  ==========================================================================

With ``padding="longest"``, the width is that of the longest cell of the minibatch; with
``"max_length"`` it is ``max_length``; with None, rows are ragged (`cellfeed.RaggedTensor`), and
there is no attention mask.

Values must be counts, or made of these so that they are finite and not negative, as by
`cellfeed.transforms.NormalizeTotal` and `Log1p`. Genes that are not in the vocabulary are left
out, and counted: ``n_unknown`` of `CellDataset.statistics`. What is drawn at random depends on the
seed, the epoch and the row alone, so that it is the same after resuming, and with any number of
workers and ranks. A cell that comes twice in an epoch is the same twice.
"""

import math
import reprlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from cellfeed.decode import Counters
from cellfeed.extending import ParameterError, pd, require_one_of, require_positive
from cellfeed.fetch import ReplaceRows, RowTransform
from cellfeed.rows import Element
from cellfeed.tokenizers._made import ElementTokens, genes_of

__all__ = [
    "BinnedValues",
    "GeneSubset",
    "MaskTokens",
    "MaskValues",
    "RankTokens",
    "Tokenizer",
]

Padding: TypeAlias = Literal["longest", "max_length"] | None
Genes: TypeAlias = Literal["nonzero", "all"]

# Of a token in a minibatch, with its label (int64), value, mask and attention mask.
_TOKEN_BYTES = 2 * 8 + 4 + 2
_LARGEST_TOKEN = np.iinfo(np.int32).max


@dataclass(frozen=True, eq=False, repr=False)
class _ByName:
    """Values by name.

    Parameters
    ----------
    names
        Names, str, each once, shape (n,).
    values
        The value of each, shape (n,).
    """

    names: NDArray[Any]
    values: NDArray[Any]

    @classmethod
    def read(
        cls, what: str, source: Any, dtype: Any, is_valid: Callable[[Any], bool], valid: str
    ) -> "_ByName":
        """Return the values of a mapping or Series, or what this returned before.

        Parameters
        ----------
        what, source
            The name of a parameter, and what was given.
        dtype
            Dtype of the values.
        is_valid, valid
            Whether a value is valid, and which are.

        Raises
        ------
        ParameterError
            It is neither, has a name twice, or a value is invalid.
        """
        if isinstance(source, _ByName):
            return source
        if not callable(getattr(source, "items", None)):
            msg = f"`{what}` must be a mapping from names, or a Series, but got"
            msg = f"{msg} {reprlib.repr(source)}; read a file with json.load, or pickle.load"
            raise ParameterError(msg)
        pairs = [(str(name), value) for name, value in source.items()]
        names = [name for name, _ in pairs]
        for name, count in Counter(names).most_common(1):
            if count > 1:
                msg = (
                    f"`{what}` must have each name once, but has {name!r} {count} times; name "
                    "genes by ids, and give `gene_names`, such as collection.var['gene_ids']"
                )
                raise ParameterError(msg)
        for name, value in pairs:
            if not is_valid(value):
                msg = f"`{what}` must have {valid}, but that of {name!r} is {value!r}"
                raise ParameterError(msg)
        return cls(np.array(names, dtype=object), np.array([each for _, each in pairs], dtype))

    def at(self, names: Sequence[str] | NDArray[Any], missing: Any) -> NDArray[Any]:
        """Return the value of each name, or ``missing``."""
        by_name = dict(zip(self.names.tolist(), self.values.tolist(), strict=True))
        return np.array([by_name.get(each, missing) for each in names], self.values.dtype)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class MaskTokens:
    """How tokens of genes are masked for masked language modelling, as BERT and Geneformer do.

    ``int(fraction * n)`` of a cell's n genes are chosen, every set of as many with equal
    probability. Of these, a share ``random`` is replaced by random known genes of the collection,
    a share ``kept`` stays, and the others become ``mask``. ``minibatch["labels"]``, int64, are the
    original tokens there, and -100 elsewhere, which `torch.nn.functional.cross_entropy` leaves out.

    Source: Devlin et al., "BERT", NAACL 2019, 3.1. (BERT decides for each token by itself, so that
    the number of masked tokens varies.)

    Parameters
    ----------
    fraction
        Share of the genes of a cell, above 0, at most 1.
    mask
        Name of the special token.
    random, kept
        Shares of the masked tokens, at least 0, at most 1 together.

    Raises
    ------
    ParameterError
        A share is invalid.
    """

    fraction: float = 0.15
    mask: str = "<mask>"
    random: float = 0.1
    kept: float = 0.1
    masks: ClassVar = "tokens"

    def __post_init__(self) -> None:
        """Check the shares."""
        _require_share("fraction", self.fraction)
        if self.random < 0 or self.kept < 0 or self.random + self.kept > 1:
            msg = (
                "`random >= 0`, `kept >= 0` and `random + kept <= 1` must hold, but got "
                f"random={self.random!r} and kept={self.kept!r}"
            )
            raise ParameterError(msg)


@dataclass(frozen=True)
class MaskValues:
    """How values of genes, whose tokens stay, are masked, as scGPT does.

    ``int(fraction * n)`` of a cell's n genes are chosen, every set of as many with equal
    probability, and their values become ``value``. ``minibatch["labels"]``, float32, are all values
    as they were; ``minibatch["masked"]`` says which to learn from.

    Source: `random_mask_value` of scGPT.

    Parameters
    ----------
    fraction
        Share of the genes of a cell, above 0, at most 1.
    value
        Value of masked genes; -1 in scGPT.

    Raises
    ------
    ParameterError
        The fraction is invalid.
    """

    fraction: float = 0.4
    value: float = -1.0
    masks: ClassVar = "values"

    def __post_init__(self) -> None:
        """Check the fraction."""
        _require_share("fraction", self.fraction)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Tokenizer(RowTransform):
    """Base class of the tokenizers in this module, which are compiled.

    Parameters
    ----------
    vocabulary
        Tokens of genes by name, and of special tokens: a mapping; a pandas Series with names as its
        index; or a list or array of names, whose tokens are 0, 1, 2, ... Tokens are integers, at
        least 0, below 2^31.
    max_length
        Largest number of tokens of a cell, with special tokens.
    pad
        Name of the special token of padding.
    padding
        Width of minibatches: "longest", "max_length", or None for ragged rows; see above.
    gene_names
        The names that the vocabulary has for the genes of the collection, if these are others: one
        for each gene, in their order, such as ``collection.var["ensembl_id"]``. Two genes may share
        a symbol. Genes whose name is None or NaN are unknown.
    masking
        How some tokens or values are masked, `MaskTokens` or `MaskValues`; None for no masks.
    """

    vocabulary: Any
    max_length: int = 2048
    pad: str = "<pad>"
    padding: Padding = "longest"
    gene_names: Any = None
    masking: MaskTokens | MaskValues | None = None
    has_values = True

    def __post_init__(self) -> None:
        """Check the parameters."""
        source = self.vocabulary
        if isinstance(source, list | tuple | np.ndarray):
            source = pd.Series(range(len(source)), index=[*source])
        valid = "integers of at least 0 and below 2^31"
        self._set("vocabulary", _ByName.read("vocabulary", source, np.int64, _is_token, valid))
        self._set("max_length", require_positive("max_length", self.max_length))
        require_one_of("padding", self.padding, ("longest", "max_length", None))
        special = [getattr(self, name, None) for name in ("cls", "eos")]
        n_special = sum(each is not None for each in special)
        for name in (self.pad, *special):
            if name is not None:
                self.token_of(name)
        if self.max_length <= n_special:
            msg = (
                f"`max_length > {n_special}` must hold, the number of special tokens, but "
                f"got max_length={self.max_length}"
            )
            raise ParameterError(msg)
        require_one_of("genes", getattr(self, "genes", "nonzero"), get_args(Genes))
        masking: Any = self.masking
        possible = (MaskTokens, MaskValues) if self.has_values else (MaskTokens,)
        if masking is not None and not isinstance(masking, possible):
            names = " or ".join(each.__name__ for each in possible)
            raise ParameterError(f"`masking` must be {names}, but got {masking!r}")
        if isinstance(masking, MaskTokens):
            self.token_of(masking.mask)

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name}({len(self.vocabulary):,} tokens, max_length={self.max_length})"

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def token_of(self, name: str) -> int:
        """Return the token of a special token.

        Raises
        ------
        ParameterError
            The vocabulary does not have it.
        """
        (token,) = self.vocabulary.at([name], -1).tolist()
        if token < 0:
            msg = (
                f"the vocabulary has no {name!r}; name the special token that it has in its place, "
                "or None to leave it out"
            )
            raise ParameterError(msg)
        return int(token)

    @property
    def row_bytes(self) -> int:
        """Upper bound of what the tokens of a cell take in a minibatch, in bytes."""
        return self.max_length * _TOKEN_BYTES

    def require_fit(self, element: Element) -> None:
        """Check that an element has genes with tokens.

        Raises
        ------
        ParameterError
            It has not.
        """
        if len(element.row_shape) != 1:
            msg = f"{element.name!r} has no rows of genes, of which {self!r} makes tokens"
            raise ParameterError(msg)
        genes_of(self, element.column_names)

    def bind(self, element: Element, counters: Counters) -> ReplaceRows:
        """Return the function that makes tokens of rows."""
        return ElementTokens(self, element, counters)

    def tokens_of(self, genes: NDArray[Any]) -> NDArray[np.int64]:
        """Return the token of each gene of a collection, -1 if it is unknown.

        Parameters
        ----------
        genes
            Names of genes, such as ``collection.var_names``.

        Raises
        ------
        ParameterError
            None is known, or two have the same token.
        """
        names = self._names_of(genes)
        tokens: NDArray[np.int64] = self.vocabulary.at(names, -1)
        known = np.flatnonzero(tokens >= 0)
        if not known.size:
            msg = (
                f"none of {len(genes):,} genes is in the vocabulary: genes are called "
                f"{_shown(names)}, and the vocabulary has {_shown(self.vocabulary.names[::-1])}; "
                "give `gene_names`, such as collection.var['ensembl_id']"
            )
            raise ParameterError(msg)
        order = known[np.argsort(tokens[known], kind="stable")]
        same = np.flatnonzero(np.diff(tokens[order]) == 0)
        if same.size:
            one, other = genes[order[same[0]]], genes[order[same[0] + 1]]
            msg = (
                f"genes {one!r} and {other!r} have the same token {tokens[order[same[0]]]}; give "
                "`gene_names` that tell them apart, such as collection.var['gene_ids'], or leave "
                "one of them out: `open_collection(genes=...)` also takes a mask"
            )
            raise ParameterError(msg)
        return tokens

    def divisors_of(self, genes: NDArray[Any]) -> NDArray[np.float64]:
        """Return by what the values of each gene of a collection are divided."""
        return np.ones(len(genes))

    def _names_of(self, genes: NDArray[Any]) -> NDArray[Any]:
        """Return the names by which the vocabulary may know genes."""
        if self.gene_names is None:
            return genes
        names = self.gene_names
        is_of_these = np.shape(names) == np.shape(genes)
        if isinstance(names, pd.Series):
            is_of_these &= np.array_equal(names.index, genes)
        if not is_of_these:
            msg = (
                f"`gene_names` must have a name for each of the {len(genes):,} genes of the "
                "collection, in its order, such as a column of collection.var, but got "
                f"{reprlib.repr(names)}"
            )
            raise ParameterError(msg)
        return np.array([None if pd.isna(each) else str(each) for each in names], object)


@dataclass(frozen=True, eq=False, repr=False)
class RankTokens(Tokenizer):
    """Geneformer's rank value encoding: genes from the most to the least expressed.

    A cell's values v are divided by their total and by the median m of each gene, which makes
    genes that tell cells apart more prominent: ``v / sum(v) * 10000 / m``, in float64 and in this
    order. Genes with values other than 0 are sorted by this, descending, and equal ones by token,
    so that the order of genes in files does not matter (Geneformer leaves that open).
    The first ``max_length`` are kept, less special tokens.

    Source: Theodoris et al., "Transfer learning enables predictions in network biology", Nature
    618 (2023), Methods; `tokenize_anndata` and `rank_genes` of Geneformer.

    Parameters
    ----------
    medians
        Median of each gene's normalised values other than 0, over a large collection: a mapping or
        Series from names of the vocabulary to numbers above 0. Genes without a median, or with NaN,
        are unknown. None divides by nothing.
    cls, eos
        Names of the special tokens before and after the genes; None for none, as in Geneformer's
        first models.
    vocabulary, max_length, pad, padding, gene_names, masking
        See `Tokenizer`.

    Raises
    ------
    ParameterError
        A median is not a finite number above 0, the vocabulary lacks a special token, or another
        parameter is invalid. When a dataset is made: no gene of the vocabulary has a median.

    Examples
    --------
    >>> from cellfeed.tokenizers import RankTokens
    >>> vocabulary = {"<pad>": 0, "<cls>": 1, "<eos>": 2, "ACTB": 3, "CD4": 4}
    >>> RankTokens(vocabulary, {"ACTB": 8.0, "CD4": 1.5}, max_length=16)
    RankTokens(5 tokens, max_length=16)
    """

    vocabulary: Any
    medians: Any = None
    cls: str | None = field(default="<cls>", kw_only=True)
    eos: str | None = field(default="<eos>", kw_only=True)
    has_values = False

    def __post_init__(self) -> None:
        """Check the parameters."""
        super().__post_init__()
        if self.medians is not None:
            valid = "finite numbers above 0"
            medians = _ByName.read("medians", self.medians, np.float64, _is_median, valid)
            self._set("medians", medians)

    def tokens_of(self, genes: NDArray[Any]) -> NDArray[np.int64]:
        """See `Tokenizer`; genes without a median are unknown, and one must have a median."""
        tokens = super().tokens_of(genes)
        known = np.flatnonzero(tokens >= 0)
        tokens[np.isnan(self.divisors_of(genes))] = -1
        if not (tokens >= 0).any():
            names = self._names_of(genes)[known]
            msg = (
                f"no gene has a median: there are {known.size:,} genes of the vocabulary, such as "
                f"{_shown(names)}, and {len(self.medians):,} medians, such as "
                f"{_shown(self.medians.names)}; give medians by the names of the vocabulary"
            )
            raise ParameterError(msg)
        return tokens

    def divisors_of(self, genes: NDArray[Any]) -> NDArray[np.float64]:
        """Return the median of each gene of a collection; NaN if it has none."""
        if self.medians is None:
            return super().divisors_of(genes)
        divisors: NDArray[np.float64] = self.medians.at(self._names_of(genes), np.nan)
        return divisors


@dataclass(frozen=True, eq=False, repr=False)
class BinnedValues(Tokenizer):
    """scGPT's input: genes, and the bins of their values between quantiles of the cell.

    The values other than 0 of a cell's known genes are divided into bins 1 to ``n_bins - 1``,
    whose bounds are the ``n_bins - 1`` quantiles from 0 to 1, interpolated linearly; 0 is in bin 0.
    A value that equals several bounds is in a bin drawn uniformly among those that it bounds: with
    u in [0, 1), ``ceil(u * (a - b) + b)``, where a bounds are below the value, and b not above it.
    If a cell has more genes than ``max_length``, less special tokens, a random subset is kept after
    binning, other genes in each epoch. Genes come in the order of the collection.

    Source: Cui et al., "scGPT: toward building a foundation model for single-cell multi-omics using
    generative AI", Nature Methods 21 (2024), Methods; `binning`, `_digitize` and `DataCollator` of
    scGPT, which draws genes in random order.

    Parameters
    ----------
    n_bins
        Number of bins, with that of 0; at least 2.
    genes
        "nonzero", or "all" genes of the collection that the vocabulary has.
    cls
        Name of the special token before the genes, whose value is 0; None for none.
    pad_value
        Value of padding; -2 in scGPT.
    vocabulary, max_length, pad, padding, gene_names, masking
        See `Tokenizer`; scGPT's ``vocab.json`` is a vocabulary.

    Raises
    ------
    ParameterError
        The vocabulary lacks a special token, or a parameter is invalid.
    """

    vocabulary: Any
    n_bins: int = 51
    max_length: int = field(default=1200, kw_only=True)
    genes: Genes = field(default="nonzero", kw_only=True)
    cls: str | None = field(default="<cls>", kw_only=True)
    pad_value: float = field(default=-2.0, kw_only=True)

    def __post_init__(self) -> None:
        """Check the parameters."""
        super().__post_init__()
        if require_positive("n_bins", self.n_bins) < _LEAST_BINS:
            msg = f"`n_bins >= 2` must hold, but got n_bins={self.n_bins}"
            raise ParameterError(msg)


@dataclass(frozen=True, eq=False, repr=False)
class GeneSubset(Tokenizer):
    """A random subset of genes for each cell, other genes in each epoch, with their values.

    Values are those that are read, after other transforms; genes come in the order of the
    collection.

    Parameters
    ----------
    max_length
        Largest number of tokens, with ``cls``. A cell that has fewer has all of them.
    genes
        "all" genes of the collection that the vocabulary has, so that each cell has equally many,
        also zeros; or those whose values are other than 0, "nonzero".
    cls
        Name of the special token before the genes, whose value is 0; None for none.
    pad_value
        Value of padding.
    vocabulary, pad, padding, gene_names, masking
        See `Tokenizer`.

    Raises
    ------
    ParameterError
        The vocabulary lacks a special token, or a parameter is invalid.
    """

    vocabulary: Any
    max_length: int = 2048
    genes: Genes = field(default="all", kw_only=True)
    cls: str | None = field(default=None, kw_only=True)
    pad_value: float = field(default=0.0, kw_only=True)


_LEAST_BINS = 2


def _require_share(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        msg = f"`0 < {name} <= 1` must hold, but got {name}={value!r}"
        raise ParameterError(msg)


def _is_token(value: Any) -> bool:
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_integer and 0 <= value <= _LARGEST_TOKEN


def _is_median(value: Any) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and (math.isnan(value) or 0 < value < math.inf)


def _shown(names: NDArray[Any]) -> str:
    return next((repr(each) for each in names if each is not None), "nothing")
