"""Functions compiled by numba, cached on disk until any file in their folder changes.

numba reuses compiled code as long as the file of its function stays the same. But constants and
functions of other files are compiled into it as well, such as the columns of a table: after an
upgrade in place, old code would take addresses from the wrong columns, and write to them.
The cache here therefore depends on all sources in the folder of a function, and a function uses
only constants and functions from its own folder.
"""

import contextlib
import hashlib
import importlib.resources
import pickle
import sys
import uuid
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.serialize import dumps
from numba.core.sigutils import normalize_signature

__all__ = ["compiled", "compiled_callback"]

Function = Callable[..., Any]

_DIGEST_BYTES = hashlib.sha256().digest_size


def compiled(*signatures: str) -> Callable[[Function], Any]:
    """Return a decorator that compiles or loads a function immediately; it releases the GIL.

    Parameters
    ----------
    signatures
        All signatures of the function, in numba's notation.
    """

    def decorate(function: Function) -> Any:
        dispatcher = numba.njit(nogil=True)(function)
        _keep_on_disk(dispatcher, function)
        for signature in signatures:
            dispatcher.compile(signature)
        dispatcher.disable_compile()
        return dispatcher

    return decorate


def compiled_callback(signature: Any) -> Callable[[Function], Any]:
    """Return a decorator that compiles or loads a C callback, to be called by its ``address``.

    Parameters
    ----------
    signature
        The C signature of the function, in numba's types.
    """

    def decorate(function: Function) -> Any:
        callback = CFunc(function, normalize_signature(signature), locals={}, options={})
        _keep_on_disk(callback, function)
        callback.compile()
        return callback

    return decorate


def _keep_on_disk(compiled: Any, function: Function) -> None:
    """Make a dispatcher or callback, which has compiled nothing yet, cache its code on disk."""
    try:
        kept = _Cache(function)
    except (RuntimeError, OSError) as error:  # no folder is writable, or sources are missing
        msg = (
            f"compiled code cannot be cached, so each process compiles it again ({error}); "
            "set NUMBA_CACHE_DIR to a writable folder"
        )
        warnings.warn(msg, RuntimeWarning, stacklevel=2)
    else:
        compiled._cache = kept  # noqa: SLF001 - numba's `enable_caching` sets it


class _Cache(FunctionCache):  # type: ignore[misc]
    """The cache of one function, in the folder that numba chooses, but with `_Files`."""

    def __init__(self, function: Function) -> None:
        super().__init__(function)
        self._cache_file = _Files(Path(self.cache_path), function)

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(OSError):  # such as a full disk; it is compiled again next time
            super().save_overload(sig, data)


class _Files:
    """Compiled code of one function, a file for each signature and type of machine.

    The name and the header of a file identify everything that its code depends on. (numba numbers
    its files and keeps an index of them. If two processes write both at the same time, the
    index may be from one and the file from the other.)

    Parameters
    ----------
    folder
        The folder of the files.
    function
        The compiled function.
    """

    def __init__(self, folder: Path, function: Function) -> None:
        self._folder = folder
        self._package = function.__module__.rpartition(".")[0]
        self._sources = _sources_at_import(self._package)
        self._function = f"{function.__module__}.{function.__qualname__}"

    def load(self, key: Any) -> Any:
        """Return the saved code; None if there is none, or it is damaged."""
        path = self._folder / "-".join(self._names(key))
        try:
            content = path.read_bytes()
        except OSError:
            return None
        digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if digest != _digest(path.name.encode(), data):
            return None
        return pickle.loads(data)  # noqa: S301 - written below

    def save(self, key: Any, data: Any) -> None:
        """Save compiled code, and replace code that was compiled from other sources."""
        if _digest_of_sources(self._package) != self._sources:
            return  # they have changed since they were imported
        stem, version = self._names(key)
        path = self._folder / f"{stem}-{version}"
        content = dumps(data)
        written = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        try:
            written.write_bytes(_digest(path.name.encode(), content) + content)
            written.replace(path)
        finally:
            written.unlink(missing_ok=True)
        for earlier in self._folder.glob(f"{stem}-*.nbc"):
            if earlier != path:
                earlier.unlink(missing_ok=True)

    def flush(self) -> None:
        """Do nothing: files of other sources are never read."""

    def _names(self, key: Any) -> tuple[str, str]:
        """Return the parts of a file name: one for the function, one for its sources."""
        signature, machine, (code, captured) = key
        python = f"{sys.implementation.cache_tag}{getattr(sys, 'abiflags', '')}"
        kind = repr((self._function, signature, machine, captured, python, numba.__version__))
        name = self._function.rpartition(".<locals>.")[0] or self._function
        stem = f"{name}-{_digest(kind.encode()).hex()[:24]}"
        return stem, f"{_digest(self._sources, code.encode()).hex()[:24]}.nbc"


@cache
def _sources_at_import(package: str) -> bytes:
    """Return the digest of the sources at the time when the first function was compiled."""
    return _digest_of_sources(package)


def _digest_of_sources(package: str) -> bytes:
    """Return a digest of all modules in a package's folder, which may be in a zip file."""
    folder = importlib.resources.files(package)
    sources = sorted(
        (each.name, each.read_bytes()) for each in folder.iterdir() if each.name.endswith(".py")
    )
    return _digest(*(part for name, source in sources for part in (name.encode(), source)))


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
