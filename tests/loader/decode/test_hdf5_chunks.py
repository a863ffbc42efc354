import math
from typing import Any

import h5py
import numpy as np
import pytest

from cellfeed.decode._array import chunk_grid
from cellfeed.decode._hdf5 import list_chunks


def oracle(dataset):
    """Each chunk as HDF5 tells of it when it is asked for that one."""
    grid = chunk_grid(dataset.shape, dataset.chunks)
    table = np.full((math.prod(grid), 3), -1, np.int64)
    for k in range(dataset.id.get_num_chunks()):
        chunk = dataset.id.get_chunk_info(k)
        place = [first // n for first, n in zip(chunk.chunk_offset, dataset.chunks, strict=True)]
        number = np.ravel_multi_index(place, grid)
        table[number] = chunk.byte_offset, chunk.size, chunk.filter_mask
    return table


# HDF5 has an index of its own for each: B-trees of two versions, arrays of two kinds, one chunk.
INDEXES: dict[str, dict[str, Any]] = {
    "B-tree": {},
    "B-tree, grows": {"maxshape": (None,)},
    "fixed array": {"libver": "latest"},
    "extensible array": {"libver": "latest", "maxshape": (None,)},
    "one chunk": {"libver": "latest", "chunks": (1000,)},
}


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("index", INDEXES)
def test_of_one_dimension(new_folder, index, compression):
    options = {"chunks": (7,), "compression": compression, **INDEXES[index]}
    libver = options.pop("libver", None)
    with h5py.File(new_folder() / "a.h5", "w", libver=libver) as file:
        dataset = file.create_dataset("d", data=np.arange(1000) % 50, **options)
        file.flush()
        listed = list_chunks(dataset, dataset.chunks, chunk_grid(dataset.shape, dataset.chunks))
        assert listed.tolist() == oracle(dataset).tolist()
        assert (listed[:, 0] > 0).all()


@pytest.mark.parametrize("maxshape", [None, (None, 11), (None, None)])
def test_of_two_dimensions_with_chunks_that_are_not_there_or_not_compressed(new_folder, maxshape):
    with h5py.File(new_folder() / "a.h5", "w") as file:
        options = {"chunks": (4, 3), "dtype": "f4", "compression": "gzip", "maxshape": maxshape}
        dataset = file.create_dataset("d", (10, 11), **options)
        dataset[5:, :7] = 1
        dataset.id.write_direct_chunk((0, 3), bytes(48), filter_mask=1)
        file.flush()
        listed = list_chunks(dataset, (4, 3), (3, 4))
        assert listed.tolist() == oracle(dataset).tolist()
        assert (listed[:, 0] < 0).any()
        assert listed[1].tolist()[1:] == [48, 1]


@pytest.mark.parametrize("grid", [(2,), (1,)])
def test_chunks_outside_of_the_grid_are_refused(new_folder, grid):
    with h5py.File(new_folder() / "a.h5", "w") as file:
        dataset = file.create_dataset("d", data=np.arange(30), chunks=(10,))
        file.flush()
        with pytest.raises(ValueError, match="it has a chunk outside of"):
            list_chunks(dataset, (10,), grid)


def test_what_hdf5_cannot_list_is_told_in_its_words(new_folder):
    with h5py.File(new_folder() / "a.h5", "w") as file:
        dataset = file.create_dataset("d", data=np.arange(30))  # not in chunks
        with pytest.raises((RuntimeError, ValueError, TypeError, OSError), match=r"\w"):
            list_chunks(dataset, (10,), (3,))
