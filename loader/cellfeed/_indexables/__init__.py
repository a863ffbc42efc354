"""What else takes row numbers in brackets."""

from cellfeed._indexables._indexables import HuggingFaceCells, MemoryMappedCells
from cellfeed._indexables._multi_indexable import MultiIndexable
from cellfeed._indexables._rows import count_rows, in_memory

__all__ = ["HuggingFaceCells", "MemoryMappedCells", "MultiIndexable", "count_rows", "in_memory"]
