"""The suite of sources for what is written to a path."""

import pytest

from cellfeed.testing import SourceConformance


class Suite(SourceConformance):
    """A subclass writes what is `storable` of each case, by `stored`.

    Attributes
    ----------
    suffix
        Of the names of files or folders.
    decoded_here
        What `is_decoded_here` says of every case.
    """

    suffix = ""
    decoded_here: bool | None = None

    def cases(self, **options):
        return super().cases(**options).map(self.storable)

    def storable(self, case):
        """Return the case, or what of it can be stored."""
        return case

    def is_decoded_here(self, case):
        return self.decoded_here

    def stored(self, path, case):
        """Write a case; return the path, or an open source."""
        raise NotImplementedError

    def opened(self, stored, case):
        """Return what is read of it."""
        return stored

    @pytest.fixture
    def write(self, new_path):
        return lambda case: self.opened(self.stored(new_path(self.suffix), case), case)
