# ruff: noqa: S101 - a suite asserts
"""Tests of what a storage in files does with damage, for any storage."""

import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cellfeed._errors import CellfeedError, FormatError, PathError
from cellfeed.collection import Collection, open_collection
from cellfeed.dataset import CellDataset, ReadOptions
from cellfeed.rows import RaggedRows
from cellfeed.sampling import Streaming


class StorageDamageConformance:
    """Tests that every storage in files must pass; a subclass inherits them and stores cells.

    Damage gives an error or does no harm: it never gives other values than were stored, except for
    flipped bits if the format has no checksums. An error is one line that begins with the path.

    A subclass supplies the fixture ``stored``, which returns the path of a file, or of a folder of
    files, with at least 30 cells. The expected cells are those that are read before the damage;
    `SourceConformance` compares them with NumPy.

    Attributes
    ----------
    has_checksums
        Whether every flipped bit in `value_ranges` must give an error.
    detects_overwriting
        Whether reading an open file gives an error after its bytes were overwritten in place.
    n_flips
        Number of flipped bits to try.

    Examples
    --------
    >>> import numpy as np
    >>> import scipy.sparse as sp
    >>> class TestDamage(StorageDamageConformance):
    ...     @pytest.fixture
    ...     def stored(self, tmp_path):
    ...         X = sp.random(40, 9, density=0.5, format="csr")
    ...         for name in ("data", "indices", "indptr", "shape"):
    ...             np.save(tmp_path / f"{name}.npy", getattr(X, name))
    ...         return tmp_path
    """

    has_checksums: bool = False
    detects_overwriting: bool = True
    n_flips: int = 40

    def open(self, path: Path) -> Collection:
        """Open the storage."""
        return open_collection(path)

    def files(self, path: Path) -> list[Path]:
        """Return the files that are read: all below ``path``."""
        if path.is_file():
            return [path]
        return sorted(each for each in path.rglob("*") if each.is_file())

    def value_ranges(self, path: Path) -> list[tuple[Path, int, int]]:
        """Return where values lie, as files with first and last + 1 byte; by default, anywhere."""
        return [(each, 0, each.stat().st_size) for each in self.files(path)]

    def test_flipped_bits(self, stored: Path) -> None:
        """All are detected if there are checksums; others may give other values."""
        expected, random = _content(self.open(stored)), np.random.default_rng(0)
        ranges = [each for each in self.value_ranges(stored) if each[1] < each[2]]
        for _ in range(self.n_flips):
            path, first, stop = ranges[random.integers(len(ranges))]
            before = path.read_bytes()
            damaged, place = bytearray(before), int(random.integers(first, stop))
            damaged[place] ^= 1 << int(random.integers(8))
            path.write_bytes(damaged)
            found = self._outcome(stored, lambda: self.open(stored))
            if found is not None:
                _check(found, expected, are_values_checked=self.has_checksums)
            path.write_bytes(before)
        _check(_content(self.open(stored)), expected)

    @pytest.mark.parametrize("damage", ["empty", "half", "shorter", "a pipe", "missing"])
    def test_damaged_files(self, stored: Path, damage: str) -> None:
        """Each file in turn; at least one is needed, and nobody waits for the writer of a pipe."""
        expected, n_errors = _content(self.open(stored)), 0
        for path in self.files(stored):
            before = path.read_bytes()
            with _DAMAGES[damage](path):
                found = self._outcome(stored, lambda: self.open(stored))
            n_errors += found is None
            if found is not None:
                _check(found, expected)
            path.unlink(missing_ok=True)
            path.write_bytes(before)
        assert n_errors or damage != "missing"

    @pytest.mark.parametrize("was_read", [False, True])
    @pytest.mark.parametrize("change", ["replaced", "overwritten", "removed"])
    def test_files_that_change_after_opening(
        self, stored: Path, change: str, *, was_read: bool
    ) -> None:
        """The collection gives the old cells or an error; a copy of it, an error."""
        if change == "overwritten" and was_read and not self.detects_overwriting:
            pytest.skip("not detected")
        expected, collection = _content(self.open(stored)), self._opened_long_ago(stored)
        if was_read:
            collection[:]
        copy = pickle.dumps(collection)
        self._change(stored, change)
        found = self._outcome(stored, lambda: collection)
        if found is not None:
            _check(found, expected)
        with pytest.raises(PathError if change == "removed" else FormatError) as raised:
            _content(pickle.loads(copy))  # noqa: S301 - our own
        self._check_message(raised.value, stored)

    @pytest.mark.parametrize("change", ["replaced", "overwritten", "removed"])
    def test_files_that_change_during_an_epoch(self, stored: Path, change: str) -> None:
        """Minibatches have the old values until there is an error, if there is one.

        Without checksums, a fetch that is being read may get bytes that are overwritten meanwhile.
        """
        are_values_checked = change != "overwritten" or self.has_checksums
        expected, collection = _content(self.open(stored)), self._opened_long_ago(stored)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is read slowly
            dataset = CellDataset(
                collection,
                Streaming(),
                batch_size=5,
                fetch_factor=2,
                as_torch=False,
                read_options=ReadOptions(num_threads=2),
            )
        seen = list[int]()
        try:
            for minibatch in dataset:
                rows = np.asarray(minibatch.rows)
                _check(minibatch.X, expected[rows], are_values_checked=are_values_checked)
                if not seen:
                    self._change(stored, change)
                seen += rows.tolist()
        except CellfeedError as error:
            self._check_message(error, stored)
        assert seen == list(range(len(seen)))
        assert seen

    def _opened_long_ago(self, path: Path) -> Collection:
        for each in self.files(path):
            os.utime(each, ns=(0, 0))  # so that a change is visible in its time
        return self.open(path)

    def _change(self, path: Path, change: str) -> None:
        """Invert all bytes of all files, or remove them."""
        for each in self.files(path):
            other = bytes(255 - byte for byte in each.read_bytes())
            if change == "replaced":
                new = each.with_name(f".{each.name}.new")
                new.write_bytes(other)
                new.replace(each)
            elif change == "overwritten":
                each.write_bytes(other)
            else:
                each.unlink()

    def _outcome(self, path: Path, opened: Callable[[], Collection]) -> Any:
        """Return all cells; None if there was an error."""
        try:
            return _content(opened())
        except CellfeedError as error:
            self._check_message(error, path)
            return None

    def _check_message(self, error: CellfeedError, path: Path) -> None:
        assert str(error).startswith(str(path)), error
        assert "\n" not in str(error)


def _content(collection: Collection) -> Any:
    return collection[:].X


def _arrays(X: Any) -> Iterator[np.ndarray[Any, Any]]:
    if isinstance(X, RaggedRows):
        yield from (X.offsets, X.values)
    else:
        yield X.toarray() if hasattr(X, "toarray") else np.asarray(X)


def _check(found: Any, expected: Any, *, are_values_checked: bool = True) -> None:
    assert found.shape == expected.shape
    if are_values_checked:
        for one, other in zip(_arrays(found), _arrays(expected), strict=True):
            np.testing.assert_array_equal(one, other)


@contextmanager
def _cut(path: Path, share: float) -> Iterator[None]:
    os.truncate(path, int(share * path.stat().st_size))
    yield


@contextmanager
def _missing(path: Path) -> Iterator[None]:
    path.unlink()
    yield


@contextmanager
def _as_pipe(path: Path) -> Iterator[None]:
    """Let a file be a pipe, and be its writer if somebody waits for one, which is an error."""
    path.unlink()
    os.mkfifo(path)
    is_done, waited = threading.Event(), list[Path]()

    def end_waiting() -> None:
        while not is_done.wait(0.2):
            with suppress(OSError):  # nobody has opened it
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                waited.append(path)

    writer = threading.Thread(target=end_waiting)
    writer.start()
    try:
        yield
    finally:
        is_done.set()
        writer.join()
    assert not waited


_DAMAGES: Mapping[str, Callable[[Path], AbstractContextManager[None]]] = {
    "empty": partial(_cut, share=0.0),
    "half": partial(_cut, share=0.5),
    "shorter": partial(_cut, share=0.99),
    "a pipe": _as_pipe,
    "missing": _missing,
}
