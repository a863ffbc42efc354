"""The description of any loader, from which the tuner chooses its settings."""

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
    """A loader to be tuned by `autotune`, or measured by `measure`.

    A subclass defines `open` and, for `autotune`, ``labels`` and `labels_of`. It is pickled and
    sent to the measuring process, which imports it: define it in a module of its own, not in a
    notebook or in the script that runs.

    Attributes
    ----------
    parameters
        The possible values of each setting, by name: a list, or a `range` of integers. Three names
        have a meaning: ``block_size``, rows that are contiguous and read together;
        ``fetch_factor``, minibatches that are read and shuffled together, which takes memory; and
        ``num_workers``, processes. If the loader calls these differently, translate in `open`; if
        it has none of them, it reads each minibatch separately. All other names are free.
    labels
        For each label, the value of each visited row, shape (n_rows,): any values, None or NaN if
        missing. Entropy is compared with random samples of these. The first label is shown in
        tables.
    batch_size
        Rows of a minibatch.
    files
        The files that the loader reads; folders stand for all files in them. Their pages are
        dropped from the page cache, so that measurements are cold. Without files, nothing is
        dropped.
    rows_per_chunk
        Mean number of rows in a unit of storage that is read as a whole; 1 if rows are read one by
        one.

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

        The settings are ``configuration.block_size``, ``configuration.fetch_factor``,
        ``configuration.num_workers``, and ``configuration[name]`` for any other name.

        Called in the measuring process, after Python's, NumPy's and PyTorch's global generators
        were seeded: differently each time, so take the loader's seed from them. The loader is
        iterated over in several epochs, and must yield whole minibatches only (``drop_last=True``).
        An epoch has ``len(loader)`` minibatches or, if it has no length, as many as there are rows
        in ``labels``.
        """

    def labels_of(self, minibatch: Any) -> Mapping[str, ArrayLike]:  # noqa: ARG002 - to override
        """Return the labels of a minibatch's rows, by name, each of shape (batch_size,).

        Its time counts, so it should be cheap. Values need not be those of ``labels``, as long as
        equal labels have equal values, such as codes.
        """
        return {}

    def planned_rows(
        self,
        configuration: Configuration,  # noqa: ARG002 - to override
        n_minibatches: int,  # noqa: ARG002 - to override
    ) -> NDArray[np.int64] | None:
        """Return the rows of the first minibatches, if they are known without reading.

        Entropy is then computed before anything is timed, and configurations that mix too little
        are not timed.

        Returns
        -------
        Row numbers in ``labels``, shape (at most n_minibatches, batch_size); None, as here, if they
        are unknown: entropy is then measured.
        """
        return None

    @property
    def name(self) -> str:
        """The name in reports."""
        return type(self).__name__

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files that the loader reads."""
        paths = map(Path, self.files)
        return tuple(
            file
            for path in paths
            for file in ([path] if path.is_file() else sorted(path.rglob("*")))
            if file.is_file()
        )

    def check(self) -> None:
        """Check everything that can be checked without opening the loader.

        Raises
        ------
        ParameterError
            The class is defined in the script that runs; ``batch_size`` is below one; labels
            differ in length; or the values of a setting are not a list of valid values.
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
    """Refuse invalid values of a setting."""
    if isinstance(values, range):
        return
    kinds = (int,) if name in SIZES else (bool, int, float, str, type(None))
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    if not is_list or not all(isinstance(each, kinds) for each in values):
        what = "whole numbers" if name in SIZES else "numbers, words, True, False or None"
        msg = f"parameters[{name!r}] of {tunable} must be a range or a list of {what}"
        raise ParameterError(f"{msg}, but is {values!r}")
