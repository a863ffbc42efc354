"""10x Genomics' ``.h5`` files."""

from cellfeed.storages.tenx._source import TenxSource, matrices

__all__ = ["TenxSource", "matrices"]
