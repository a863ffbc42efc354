"""Writes HuggingFace datasets."""

import numpy as np
import pytest


def dataset_of(matrix, obs):
    """Return a dataset of a CSR matrix, which is in memory."""
    borders = np.asarray(matrix.indptr[1:-1], np.int64)
    columns = {
        "genes": np.split(matrix.indices, borders),
        "expressions": np.split(matrix.data, borders),
    }
    columns |= {name: obs[name].astype(object).where(obs[name].notna(), None) for name in obs}
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict(columns)
    # Of a column without any value Arrow does not know what the values would be.
    numbers = [name for name in obs if obs[name].dtype == np.float64 and obs[name].isna().all()]
    for name in numbers:
        made = made.cast_column(name, datasets.Value("float64"))
    return made


def write_dataset(folder, matrix, obs, **options):
    """Write a dataset with HuggingFace's library itself."""
    dataset_of(matrix, obs).save_to_disk(folder, **options)
    return folder
