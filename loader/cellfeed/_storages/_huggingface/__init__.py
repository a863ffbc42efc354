"""HuggingFace datasets."""

from cellfeed._storages._huggingface._source import HUGGINGFACE, HuggingFaceSource
