"""Token streams: folders of shards that were written independently."""

from cellfeed._storages._tokens._stream import TOKEN_STREAM, Span, TokenStream
from cellfeed._storages._tokens._writer import TokenStreamWriter
