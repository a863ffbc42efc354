"""The inputs: checks that they have not changed, and their short names."""

from dataclasses import dataclass

from cellfeed._bytes import Location, identity
from cellfeed._errors import MismatchError, PathError

__all__ = ["InputFile", "file_labels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """An input file, with its size and modification time.

    Parameters
    ----------
    path
        Absolute path, or a URL.
    n_bytes
        Size in bytes; for a folder (a zarr store), the size of its metadata.
    modified_ns
        Modification time in nanoseconds; for a folder, that of its metadata.
    """

    path: str
    n_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, location: Location) -> "InputFile":
        """Describe the current state of an input; for a remote one, only its URL.

        Raises
        ------
        PathError
            There is no such file.
        """
        if location.path is None:
            return cls(path=str(location), n_bytes=0, modified_ns=0)
        stamped = absolute = location.path.absolute()
        for name in ("zarr.json", ".zgroup"):  # which change with the store
            if (absolute / name).is_file():
                stamped = absolute / name
                break
        try:
            n_bytes, modified_ns = identity(stamped.stat())
        except OSError as error:
            msg = f"{location}: no such file; give a path that every worker can read"
            raise PathError(msg) from error
        return cls(path=str(absolute), n_bytes=n_bytes, modified_ns=modified_ns)

    def check(self) -> None:
        """Check that the file has not changed.

        Raises
        ------
        PathError
            There is no such file.
        MismatchError
            The file has changed.
        """
        if InputFile.of(Location(self.path)) != self:
            msg = (
                f"{self.path}: has changed since shuffling began; remove the output, or give "
                "another, and start over"
            )
            raise MismatchError(msg)


def file_labels(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return short names of files, without the folder if these are unique.

    Examples
    --------
    >>> file_labels(("/data/a.h5ad", "/data/b.h5ad"))
    ('a.h5ad', 'b.h5ad')
    >>> file_labels(("/data/1/a.h5ad", "/data/2/a.h5ad"))
    ('/data/1/a.h5ad', '/data/2/a.h5ad')
    """
    names = tuple(Location(path).name for path in paths)
    return names if len(set(names)) == len(names) else paths
