"""Helpers of cellfeed's commands: one-line errors, and readable sizes."""

import errno
import re
from decimal import Decimal
from typing import Any, NoReturn

import click

from cellfeed.extending import CellfeedError, lacks_threads

__all__ = [
    "ByteSize",
    "OneLineErrorCommand",
    "OneLineErrorGroup",
    "format_bytes",
    "interrupted",
]

_INTERRUPTED = 130  # the exit code of shells
# The packages that the extra "tune" installs.
_OF_TUNE = ("jinja2", "matplotlib", "msgspec", "optuna", "rich", "torch")
# Messages of libraries that do not raise MemoryError, for example while they are imported.
_OUT_OF_MEMORY = ("std::bad_alloc", "failed to map segment", "Cannot allocate memory")
_MORE_PROCESSES = "close other programs, or raise the limit of processes with `ulimit -u`"
_REMEDIES = {
    errno.EACCES: "change its permissions, or name another",
    errno.EPERM: "change its permissions, or name another",
    errno.EAGAIN: _MORE_PROCESSES,
    errno.EMFILE: "raise the limit of this shell with `ulimit -n 65536`",
    errno.ENFILE: "close other programs that have files open",
    errno.EFBIG: "raise the limit of file sizes with `ulimit -f unlimited`, or name another folder",
    errno.ENOSPC: "free some space there, or name another folder",
    errno.EDQUOT: "free some space there, or name another folder",
    errno.EROFS: "name another folder",
}


class _OneLineError(click.ClickException):
    exit_code = 2


class _OneLineErrors(click.Command):
    """Reports errors outside of the program as one line on stderr, with exit code 2.

    An interruption is reported as one line, with exit code 130.
    """

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        try:
            return super().make_context(*arguments, **options)
        except KeyboardInterrupt:  # for example while help is printed; click would exit with 1
            interrupted("Interrupted.")

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader closed the pipe; click exits quietly
        except (CellfeedError, OSError) as error:
            raise _OneLineError(self._with_options(_one_line(error))) from error
        except MemoryError as error:
            raise _OneLineError(_out_of_memory(error)) from error
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in _OF_TUNE:
                raise
            msg = f"`{ctx.info_name}` needs {package}, which is not installed"
            raise _OneLineError(f"{msg}; install it: pip install 'cellfeed[tune]'") from error
        except (ImportError, RuntimeError) as error:
            if lacks_threads(error):
                raise _OneLineError(f"{error}; {_MORE_PROCESSES}") from error
            if not any(each in str(error) for each in _OUT_OF_MEMORY):
                raise
            raise _OneLineError(_out_of_memory(error)) from error
        except KeyboardInterrupt:
            interrupted("Interrupted.")

    def _with_options(self, text: str) -> str:
        """Return a message with options of this command in place of parameters in Python."""
        for each in self.params:
            if isinstance(each, click.Option):
                option = max(each.opts, key=len)
                text = text.replace(f"`{each.name}`", f"`{option}`")
                # Not in paths, nor where a value is more than a word.
                value = rf"(?<![\w/.-]){each.name}='?([\w.+-]+)'?(?![\w/(])"
                text = re.sub(value, rf"{option} \1", text)
        return text

    def get_short_help_str(self, limit: int = 45) -> str:  # noqa: ARG002 - click's parameter
        """Return the first paragraph of the help, which lists of commands wrap rather than cut."""
        return " ".join((self.help or "").partition("\n\n")[0].split())


class OneLineErrorCommand(_OneLineErrors):
    """A click command that reports `CellfeedError` and `OSError` as one line, with exit code 2.

    Messages name options: for an option ``join_vars``, "give join_vars='inner'" becomes "give
    --join-vars inner".

    Examples
    --------
    >>> @click.command(cls=OneLineErrorCommand)
    ... def command() -> None: ...
    """


class OneLineErrorGroup(_OneLineErrors, click.Group):
    """A click group that reports errors of its commands as `OneLineErrorCommand` does."""

    command_class = OneLineErrorCommand


class ByteSize(click.ParamType):  # type: ignore[type-arg]  # older versions are not generic
    """Parameter type for sizes such as 800MB or 8GiB, converted to bytes.

    Examples
    --------
    >>> ByteSize().convert("1.5GB", None, None)
    1500000000
    """

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes."""
        given = "" if isinstance(value, float) else str(value).strip().lower()
        match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*(?:([kmgt])(i?))?b?", given, re.ASCII)
        n_bytes = 0
        if match:
            unit = (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ")
            n_bytes = int(Decimal(match[1]) * unit)
        if not n_bytes:
            self.fail(f"{value!r} is not a size; write 800MB or 8GiB, for example", param, ctx)
        return n_bytes


def interrupted(said: str) -> NoReturn:
    """Exit from an interrupted command, with a line on stderr and exit code 130."""
    click.echo(f"\n{said}", err=True)
    raise SystemExit(_INTERRUPTED)


def format_bytes(n_bytes: int) -> str:
    """Return a size as text, in decimal units.

    Examples
    --------
    >>> format_bytes(999), format_bytes(1_234_567), format_bytes(314_000_000_000)
    ('999 B', '1.2 MB', '314.0 GB')
    """
    size, unit = float(n_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if round(size, 1) < 1000:  # noqa: PLR2004 - what a kilo is
            break
        size, unit = size / 1000, larger
    return f"{n_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def _out_of_memory(error: Exception) -> str:
    said = f" ({_one_line(error)})" if str(error) else ""
    return f"out of memory{said}; use less, for example with --memory, or close other programs"


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f": `{error.filename}`" if error.filename else ""
        remedy = _REMEDIES.get(error.errno or 0)
        return f"{error.strerror}{where}" + (f"; {remedy}" if remedy else "")
    return " ".join(str(error).split()) or type(error).__name__
