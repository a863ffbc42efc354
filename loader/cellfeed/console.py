"""What cellfeed's commands have in common: one-line errors, and figures that people can read."""

import errno
from typing import TYPE_CHECKING, Any, NoReturn

import click

from cellfeed._errors import CellfeedError, ParameterError
from cellfeed._sizes import parse_size

__all__ = [
    "ByteSize",
    "OneLineErrorCommand",
    "OneLineErrorGroup",
    "format_bytes",
    "interrupted",
]

_INTERRUPTED = 130  # as shells say it
# What the extra of this name installs.
_OF_TUNE = ("jinja2", "matplotlib", "msgspec", "optuna", "rich", "torch")
# How libraries say so that raise no MemoryError, such as while they are imported.
_OUT_OF_MEMORY = ("std::bad_alloc", "failed to map segment", "Cannot allocate memory")
# What Python raises, as a RuntimeError, where a limit of processes is reached.
_NO_THREAD = "can't start new thread"
_MORE_PROCESSES = "end other programs, or allow more processes by `ulimit -u`"
_REMEDIES = {
    errno.EACCES: "change its permissions, or name another",
    errno.EPERM: "change its permissions, or name another",
    errno.EAGAIN: _MORE_PROCESSES,
    errno.EMFILE: "allow this shell more by `ulimit -n 65536`",
    errno.ENFILE: "end other programs that hold files open",
    errno.ENOSPC: "free some space there, or name another folder",
    errno.EDQUOT: "free some space there, or name another folder",
    errno.EROFS: "name another folder",
}


class _OneLineError(click.ClickException):
    exit_code = 2


class _OneLineErrors(click.Command):
    """Turns what went wrong outside of the program into one line on stderr and exit code 2.

    An interruption becomes one line and exit code 130.
    """

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        try:
            return super().make_context(*arguments, **options)
        except KeyboardInterrupt:  # such as while help is printed; click would exit with 1
            interrupted("Interrupted.")

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # whoever read the output has seen enough; click ends quietly
        except (CellfeedError, OSError) as error:
            raise _OneLineError(_one_line(error)) from error
        except MemoryError as error:
            raise _OneLineError(_out_of_memory(error)) from error
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in _OF_TUNE:
                raise
            msg = f"`{ctx.info_name}` needs {package}, which is not installed"
            raise _OneLineError(f"{msg}; install it: pip install 'cellfeed[tune]'") from error
        except (ImportError, RuntimeError) as error:
            if str(error) == _NO_THREAD:
                raise _OneLineError(f"{error}; {_MORE_PROCESSES}") from error
            if not any(each in str(error) for each in _OUT_OF_MEMORY):
                raise
            raise _OneLineError(_out_of_memory(error)) from error
        except KeyboardInterrupt:
            interrupted("Interrupted.")


class OneLineErrorCommand(_OneLineErrors):
    """A command that reports a `CellfeedError` or `OSError` as one line, without a traceback.

    Examples
    --------
    >>> @click.command(cls=OneLineErrorCommand)
    ... def command() -> None: ...
    """


class OneLineErrorGroup(_OneLineErrors, click.Group):
    """A group of commands that does the same for each of them."""


if TYPE_CHECKING:
    BytesParameter = click.ParamType[int]
else:  # older ones say nothing of the type of values
    BytesParameter = click.ParamType


class ByteSize(BytesParameter):
    """A size on the command line, such as 800MB or 8GiB, in bytes.

    Examples
    --------
    >>> ByteSize().convert("1.5GB", None, None)
    1500000000
    """

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes."""
        try:
            return parse_size(value)
        except ParameterError:
            self.fail(f"{value!r} is no size; write it as 800MB or 8GiB", param, ctx)


def interrupted(said: str) -> NoReturn:
    """End a command that was interrupted: a line on stderr, and exit code 130."""
    click.echo(f"\n{said}", err=True)
    raise SystemExit(_INTERRUPTED)


def format_bytes(n_bytes: int) -> str:
    """Return a size in decimal units, as disks are sold.

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
    return f"out of memory{said}; ask for less at once, such as by --memory, or end other programs"


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f": `{error.filename}`" if error.filename else ""
        remedy = _REMEDIES.get(error.errno or 0)
        return f"{error.strerror}{where}" + (f"; {remedy}" if remedy else "")
    return " ".join(str(error).split()) or type(error).__name__
