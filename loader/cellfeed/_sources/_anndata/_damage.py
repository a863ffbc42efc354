"""Error messages for damaged files."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from cellfeed._bytes import Location
from cellfeed._errors import CellfeedError, FormatError, lacks_threads
from cellfeed._remote import failure, is_of_server
from cellfeed._runs import Runs
from cellfeed._sources._anndata._hdf5_filters import lacking_filter

__all__ = ["damage_named"]

# What the machine lacks, not the file.
_LACKING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


@contextmanager
def damage_named(location: Location, element: str, runs: Runs | None = None) -> Iterator[None]:
    """Convert errors of h5py, zarr and anndata into one line with the location.

    They almost always mean damage, unless HDF5 lacks the filter that compressed the file.
    """
    try:
        yield
    except CellfeedError:
        raise
    except MemoryError as error:
        words = " ".join(str(error).split())
        msg = (
            f"{location}: `{element}` takes more memory than is available "
            f"({words or 'of unknown size'}); read fewer rows at a time or, if it should be "
            "small, copy or download the file again"
        )
        raise FormatError(msg) from error
    except Exception as error:  # they have no common base, nor a list of what they raise
        if getattr(error, "errno", None) in _LACKING or lacks_threads(error):
            raise
        if is_of_server(error):
            raise failure(error, location) from None
        compression = lacking_filter(location.path, element)
        if compression is not None:
            msg = f"{location}: `{element}` is compressed with {compression}"
            raise FormatError(msg) from error
        rows = "" if runs is None or not len(runs) else f", rows {runs[0, 0]} to {runs[-1, 1]}"
        words = " ".join(str(error).split())  # some are of several lines
        msg = (
            f"{location}: `{element}`{rows} cannot be read ({words}); "
            "the file is damaged, copy or download it again"
        )
        raise FormatError(msg) from error
