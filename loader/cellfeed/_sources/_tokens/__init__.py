"""Token streams: folders of shards that were written independently."""

from cellfeed._sources._tokens._source import Span, TokenStream
from cellfeed._sources._tokens._storage import TOKENS
from cellfeed._sources._tokens._writer import TokenStreamWriter

__all__ = ["TOKENS", "Span", "TokenStream", "TokenStreamWriter"]
