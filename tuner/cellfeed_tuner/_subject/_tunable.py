"""What the tuner needs to know of a loader, of any kind, to choose its settings."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import ParameterError
from cellfeed_tuner._configuration import SIZES, Configuration, Setting

__all__ = ["Tunable"]


class Tunable(ABC):
    """A loader whose settings are to be chosen; what `autotune` and `measure` take.

    A subclass says how to open the loader. It is sent to the process in which configurations
    are timed, so that it can be pickled, and is defined in a module that can be imported: not in
    a notebook, nor in the script that is run.

    Attributes
    ----------
    parameters
        What each setting may be, by name: a list of values, or a `range` of whole numbers. Three
        names have a meaning: ``block_size``, rows that lie together and are read together;
        ``fetch_factor``, minibatches that are read and shuffled at a time, which takes memory;
        and ``num_workers``, processes. A loader that has these under other names is given them in
        `open`; one that has none of them reads each minibatch by itself. Any other name is a
        further setting.
    labels
        For each label the value of each row that is visited, shape (n_rows,): any values, missing
        ones None or NaN. The first label is what tables show. Minibatches are held against random
        samples of these.
    batch_size
        Rows of a minibatch.
    files
        What the loader reads, for the state of the page cache; folders stand for all files in
        them.
    rows_per_chunk
        Mean number of rows in a unit of storage that is read as a whole.

    Examples
    --------
    >>> class Numbers(Tunable):
    ...     parameters = {"fetch_factor": [1, 4]}
    ...     labels = {"parity": [0, 1] * 500}
    ...     batch_size = 10
    ...
    ...     def open(self, configuration):
    ...         return np.random.permutation(1000).reshape(100, 10)
    ...
    ...     def labels_of(self, minibatch):
    ...         return {"parity": minibatch % 2}
    >>> Numbers().name
    'Numbers'
    """

    parameters: Mapping[str, Sequence[Setting]] = MappingProxyType({})
    labels: Mapping[str, ArrayLike] = MappingProxyType({})
    batch_size: int = 64
    files: Sequence[Path | str] = ()
    rows_per_chunk: float = 1.0

    @abstractmethod
    def open(self, configuration: Configuration) -> Iterable[Any]:
        """Return the loader with these settings.

        Called in the measuring process, where Python's, NumPy's and PyTorch's global generators
        are seeded anew each time. The loader is iterated over epoch after epoch, and gives whole
        minibatches only (``drop_last=True``); an epoch has as many as its ``len()``, or, without
        one, as the labels have rows for.
        """

    def labels_of(self, minibatch: Any) -> Mapping[str, ArrayLike]:  # noqa: ARG002 - to override
        """Return the labels of a minibatch's rows, each of shape (batch_size,); should be cheap.

        Equal values are equal labels; they need not be those of `labels`, such as codes.
        """
        return {}

    def planned_rows(
        self,
        configuration: Configuration,  # noqa: ARG002 - to override
        n_minibatches: int,  # noqa: ARG002 - to override
    ) -> NDArray[np.int64] | None:
        """Return the rows of the first minibatches, where that is known without reading.

        Entropy is then computed before anything is timed, and what mixes too little is not timed.

        Returns
        -------
        Row numbers as of `labels`, shape (at most n_minibatches, batch_size); None, as here, if
        they are not known: entropy is then measured.
        """
        return None

    @property
    def name(self) -> str:
        """What to call it."""
        return type(self).__name__

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files that it reads."""
        paths = map(Path, self.files)
        return tuple(
            file
            for path in paths
            for file in ([path] if path.is_file() else sorted(path.rglob("*")))
            if file.is_file()
        )

    def check(self) -> None:
        """Refuse what could not be sent to the measuring process, or has no sizes.

        Raises
        ------
        ParameterError
            It is of the script that is run, or ``batch_size`` is below one, or labels differ in
            length, or what a setting may be is no list of such values.
        """
        if type(self).__module__ == "__main__":
            msg = (
                f"{self.name} is defined in the script or notebook that is run, which the "
                "measuring process cannot import; move it to a module of its own"
            )
            raise ParameterError(msg)
        for name, values in self.parameters.items():
            _check_values(self.name, name, values)
        if self.batch_size < 1:
            msg = f"`batch_size >= 1` must hold, but {self.name} has {self.batch_size}"
            raise ParameterError(msg)
        sizes = {name: len(np.asarray(values)) for name, values in self.labels.items()}
        if len(set(sizes.values())) > 1:
            msg = f"labels of {self.name} must have a value for each row, but have {sizes} values"
            raise ParameterError(msg)


def _check_values(tunable: str, name: str, values: Any) -> None:
    """Refuse what a setting cannot be."""
    if isinstance(values, range):
        return
    kinds = (int,) if name in SIZES else (bool, int, float, str, type(None))
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    if not is_list or not all(isinstance(each, kinds) for each in values):
        what = "whole numbers" if name in SIZES else "numbers, words, True, False or None"
        msg = f"parameters[{name!r}] of {tunable} must be a range or a list of {what}"
        raise ParameterError(f"{msg}, but is {values!r}")
