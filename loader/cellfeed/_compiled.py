"""Functions compiled by numba when they are first used, cached on disk until their folder changes.

A function is compiled, or loaded from disk, at its first call from Python or when a function that
calls it is compiled. So an epoch waits only for what it uses: `decode` calls codecs and the
functions that place elements by address, and does not contain them.

numba reuses compiled code as long as the file of its function stays the same. But constants and
functions of other files are compiled into it as well, such as the columns of a table: after an
upgrade in place, old code would take addresses from the wrong columns, and write to them.
The cache here therefore depends on all sources in the folder of a function, and a function uses
only constants and functions from its own folder.
"""

import contextlib
import hashlib
import importlib.resources
import os
import pickle
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numba
from numba.core import caching, types, typing
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher
from numba.core.runtime import rtsys
from numba.core.serialize import dumps
from numba.core.sigutils import normalize_signature

from cellfeed.interrupts import interrupts_held

Function = Callable[..., Any]

_DIGEST_BYTES = hashlib.sha256().digest_size
_NOTICEABLE_SECONDS = 1.0


_everything: list["_Function"] = []


def compiled(
    *signatures: str, inner: bool = False, callback: bool = False
) -> Callable[[Function], Any]:
    """Return a decorator that compiles or loads a function when it is used; it releases the GIL.

    Parameters
    ----------
    signatures
        All signatures of the function, in numba's notation; each is compiled by itself.
    inner
        Whether only compiled functions call it, which saves some compilation.
    callback
        Whether it is only called by address, from any code; ``address`` of the function compiles
        or loads it.
    """

    def decorate(function: Function) -> Any:
        is_called = not (inner or callback)  # from Python
        options = {"nopython": True, "nogil": True, "no_cpython_wrapper": not is_called}
        options["no_cfunc_wrapper"] = not callback
        declared = (_Function if is_called else _Inner)(function, targetoptions=options)
        declared.signatures_declared = signatures
        with contextlib.suppress(OSError):  # where sources are missing, nothing is cached
            _sources_at_import(_package_of(function))
        _everything.append(declared)
        return declared

    return decorate


def compile_everything(on_progress: Callable[[int, int], object]) -> None:
    """Compile all functions of the modules that are imported, unless they are on disk.

    Parameters
    ----------
    on_progress
        Called with the number of functions that are ready, and their total number.
    """
    _NOTICE_ON_STDERR.silence()
    on_progress(0, len(_everything))
    for number, each in enumerate(_everything, 1):
        each.compile_declared()
        on_progress(number, len(_everything))


class _Function(CPUDispatcher):  # type: ignore[misc]  # numba has no types
    """A function that is compiled for a declared signature when it is first called with it."""

    signatures_declared: Sequence[str] = ()

    def compile_declared(self) -> None:
        """Compile all signatures."""
        for signature in self.signatures_declared:
            self._compiled_as(signature)

    @cached_property
    def address(self) -> int:
        """The address of a callback, which has one signature."""
        code = self._compiled_as(self.signatures_declared[0])
        return int(code.library.get_pointer_to_function(code.fndesc.llvm_cfunc_wrapper_name))

    def typeof_pyval(self, val: Any) -> Any:
        """Return numba's type of a value.

        Two threads that make the same type at once would give it two numbers, and calls would
        never find the code that was compiled for the other one.
        """
        with global_compiler_lock:
            return super().typeof_pyval(val)

    def _compile_for_args(self, *args: Any, **_: Any) -> Any:
        """Return the code for these arguments; numba calls this if it has none."""
        signature = self._declared_for([self.typeof_pyval(each) for each in args])
        return self._compiled_as(signature).entry_point

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Return the signature by which another compiled function calls this one."""
        pysig, args = self._compiler.fold_argument_types(args, kws)
        self._compiled_as(self._declared_for(args))
        name = self.py_func.__name__
        signatures = self.nopython_signatures
        template = typing.make_concrete_template(f"CallTemplate({name})", name, signatures)
        return template, pysig, args, {}

    def _compiled_as(self, signature: str) -> Any:
        with global_compiler_lock:
            args, _ = normalize_signature(_parsed(signature))
            if args not in self.overloads:
                self._keep_on_disk()
                # Ctrl-C waits, since what LLVM calls would print and ignore it.
                with interrupts_held(), _NOTICE_ON_STDERR.of(self._cache):
                    self.compile(_parsed(signature))
                if len(self.overloads) == len(self.signatures_declared):
                    self.disable_compile()  # other arguments are converted, or refused
            return self.overloads[args]

    def _keep_on_disk(self) -> None:
        """Cache code on disk, as numba's `enable_caching` does."""
        if isinstance(self._cache, caching.NullCache):
            try:
                self._cache: Any = _Cache(self.py_func)
            except (RuntimeError, OSError):  # no folder is writable, or sources are missing
                _warn_of_no_cache()

    def _declared_for(self, args: Sequence[Any]) -> str:
        """Return the first signature that these types convert to."""
        if len(self.signatures_declared) == 1:
            return self.signatures_declared[0]
        with global_compiler_lock:
            for signature in self.signatures_declared:
                wanted, _ = normalize_signature(_parsed(signature))
                if None not in map(self.typingctx.can_convert, args, wanted):
                    return signature
        msg = f"`{self.py_func.__name__}` is not compiled for {', '.join(map(str, args))}"
        raise TypeError(msg)


@cache
def _parsed(signature: str) -> Any:
    """Return a signature in numba's types.

    numba would evaluate the string itself. In a thread that reads, this makes Python forget that
    its main thread was interrupted: it would exit with status 1, and not as killed by SIGINT.
    """
    return eval(compile(signature, "<signature>", "eval"), {}, vars(types))  # noqa: S307 - our own


class _Inner(_Function):
    """A function that Python does not call."""

    def __call__(self, *_: Any) -> Any:
        msg = f"`{self.py_func.__name__}` can only be called by compiled functions"
        raise TypeError(msg)


class CompilingNotice:
    """Says once that functions are compiled, if that takes noticeable time.

    Parameters
    ----------
    say
        Function that prints a line.
    clock
        A clock, in seconds.

    Attributes
    ----------
    seconds
        Seconds that were spent so far.
    """

    def __init__(
        self, say: Callable[[str], object], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds = 0.0
        self._say = say
        self._clock = clock
        self._depth, self._began = 0, 0.0  # of the outermost function
        self._is_silent = False

    def silence(self) -> None:
        """Report nothing from now on."""
        self._is_silent = True

    @contextlib.contextmanager
    def of(self, kept: Any) -> Iterator[None]:
        """Count what a block compiles, unless it loads it from the cache ``kept``."""
        now = self._clock()
        if not self._depth:
            self._began = now
        seconds = self.seconds + now - self._began
        if seconds >= _NOTICEABLE_SECONDS and not self._is_silent and _may_speak():
            self.silence()
            self._say(
                "cellfeed: compiling code, once for this installation and processor (5 to 20 s on "
                "a free core; `cellfeed warm-up` compiles everything at once)"
            )
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth and not getattr(kept, "was_loaded", False):
                self.seconds += self._clock() - self._began


def _may_speak() -> bool:
    """Return whether this process reports: of the workers of a DataLoader, the first one does."""
    worker_info = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", None)
    worker = None if worker_info is None else worker_info()
    return worker is None or bool(worker.id == 0)


def _say_on_stderr(said: str) -> None:
    if sys.stderr is not None:  # as in a program without a terminal
        sys.stderr.write(f"{said}\n")
        sys.stderr.flush()


_NOTICE_ON_STDERR = CompilingNotice(_say_on_stderr)


def compiling_seconds() -> float:
    """Return how long this process has compiled functions so far, in seconds.

    Functions that were loaded from disk do not count.
    """
    return _NOTICE_ON_STDERR.seconds


# A process that is forked while another thread compiles would wait for that thread forever.
os.register_at_fork(
    before=global_compiler_lock.acquire,
    after_in_parent=global_compiler_lock.release,
    after_in_child=global_compiler_lock.release,
)


@cache
def _warn_of_no_cache() -> None:
    msg = (
        "compiled code cannot be cached, so each process compiles it again: neither the package "
        "nor the cache folder is writable; set NUMBA_CACHE_DIR to a writable folder"
    )
    warnings.warn(msg, RuntimeWarning, stacklevel=2)


class _Cache(caching.FunctionCache):  # type: ignore[misc]
    """The cache of one function, in a folder that numba chooses, but with `_Files`."""

    was_loaded = False

    def __init__(self, function: Function) -> None:
        super().__init__(function)
        self._cache_file = _Files(Path(self.cache_path), function)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # What compiled code calls; numba would import all that it compiles with, which takes a
        # quarter of the time of importing torch.
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            found = self._load_overload(sig, target_context)
            self.was_loaded = found is not None
            return found

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
        self._package = _package_of(function)
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


def _package_of(function: Function) -> str:
    return function.__module__.rpartition(".")[0]


@cache
def _sources_at_import(package: str) -> bytes:
    """Return the digest of the sources at the time when the first function was declared."""
    return _digest_of_sources(package)


def _digest_of_sources(package: str) -> bytes:
    """Return a digest of all modules in a package's folder, which may be in a zip file.

    A package whose compiled code calls that of other packages lists these as ``COMPILED_WITH``;
    their modules belong to its digest.
    """
    packages = (package, *getattr(sys.modules[package], "COMPILED_WITH", ()))
    sources = [
        (file.name, file.read_bytes())
        for each in packages
        for file in sorted(importlib.resources.files(each).iterdir(), key=lambda file: file.name)
        if file.name.endswith(".py")
    ]
    return _digest(*(part for name, source in sources for part in (name.encode(), source)))


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
