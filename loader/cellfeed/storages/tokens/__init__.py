"""Token streams: folders of shards that were written independently."""

from cellfeed.storages.tokens._stream import TOKEN_STREAM, Span, TokenStream
from cellfeed.storages.tokens._writer import TokenStreamWriter

__all__ = ["TOKEN_STREAM", "Span", "TokenStream", "TokenStreamWriter"]
