"""Writing files that are there as a whole, or as they were before."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["replaced_file"]


@contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of another once it is complete, and leaves nothing if not.

    An `OSError` of a full disk, or of its folder, names the path.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "result.json"
    >>> with replaced_file(path) as file:
    ...     _ = file.write(b"{}")
    >>> path.read_text()
    '{}'
    """
    target = path.resolve()  # what a link leads to is replaced, and not the link
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # some file systems say only now that they are full
        unfinished.replace(target)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)
