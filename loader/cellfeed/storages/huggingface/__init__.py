"""Datasets of HuggingFace, in folders that their library saved, or as objects."""

from cellfeed.storages.huggingface._source import HUGGINGFACE, HuggingFaceSource

__all__ = ["HUGGINGFACE", "HuggingFaceSource"]
