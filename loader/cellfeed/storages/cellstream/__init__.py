"""Archives of cellstream, whose library reads the rows."""

from cellfeed.storages.cellstream._source import CELLSTREAM

__all__ = ["CELLSTREAM"]
