"""Sources of rows: base classes, a registry, and a file or folder for each storage."""

from cellfeed._storages._anndata import (
    ANNDATA,
    AnnDataSource,
    StoredCsc,
    TenxSource,
    open_sources,
    open_to_copy,
)
from cellfeed._storages._cellstream import CELLSTREAM
from cellfeed._storages._huggingface import HUGGINGFACE, HuggingFaceSource
from cellfeed._storages._in_memory import AnnDataObjectSource, locations_or_sources
from cellfeed._storages._memory_maps import MEMORY_MAPS, SCDL, MemoryMapSource
from cellfeed._storages._parquet import PARQUET, ParquetSource
from cellfeed._storages._postgres import POSTGRES, PostgresSource
from cellfeed._storages._registry import (
    Storage,
    built_in,
    find_storage,
    open_location,
    register,
    select_elements,
    storage_of,
    suffixes,
)
from cellfeed._storages._soma import SOMA, SomaSource
from cellfeed._storages._source import (
    ChunkedCsr,
    ChunkedDense,
    ChunkedRagged,
    DirectCsr,
    FoundCsr,
    Layout,
    Source,
    StoredElement,
)
from cellfeed._storages._tokens import TOKEN_STREAM, Span, TokenStream, TokenStreamWriter

for _storage in (
    ANNDATA, PARQUET, SOMA, POSTGRES, HUGGINGFACE, MEMORY_MAPS, SCDL, CELLSTREAM, TOKEN_STREAM,
):  # fmt: skip
    register(_storage)
