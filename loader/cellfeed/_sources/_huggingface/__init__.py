"""HuggingFace datasets."""

from cellfeed._sources._huggingface._source import HuggingFaceSource
from cellfeed._sources._huggingface._storage import HUGGINGFACE

__all__ = ["HUGGINGFACE", "HuggingFaceSource"]
