"""10x Genomics' ``.h5`` files."""

from cellfeed.storages.tenx._source import TENX, TenxSource

__all__ = ["TENX", "TenxSource"]
