"""What is in the page cache, as far as a few chunks tell."""

import os

import numpy as np
import pytest

from cellfeed.decode._kernels import _fields as fields
from cellfeed.decode._reads import seem_to_be_in_memory

N, SIZE = 4096, 4096


def chunks_of(fd, n=N):
    chunks = np.zeros((n, fields.N_CHUNK_COLUMNS), np.int64)
    chunks[:, fields.FD] = fd
    chunks[:, fields.OFFSET] = SIZE * np.arange(n)
    chunks[:, fields.SIZE] = SIZE
    return chunks


@pytest.fixture
def descriptor(tmp_path):
    """A file that was just read, on a system and a file system that tell what is in memory."""
    (tmp_path / "file").write_bytes(bytes(N * SIZE))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        os.fsync(fd)
        os.pread(fd, N * SIZE, 0)
        os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
    except (AttributeError, OSError):
        os.close(fd)
        pytest.skip("nothing tells what is in memory here")
    yield fd
    os.close(fd)


def test_a_file_that_was_read_is(descriptor):
    assert seem_to_be_in_memory(chunks_of(descriptor))


def test_a_file_that_was_dropped_is_not(descriptor):
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # so that looking brings nothing
    try:
        os.preadv(descriptor, [bytearray(1)], SIZE * (N - 1), os.RWF_NOWAIT)
    except BlockingIOError:
        assert not seem_to_be_in_memory(chunks_of(descriptor))
    else:
        pytest.skip("this file system keeps what it was asked to drop")


def test_of_few_nobody_asks(descriptor):
    assert not seem_to_be_in_memory(chunks_of(descriptor, 2047))


def test_what_is_brought_or_cannot_be_asked_is_not(descriptor, tmp_path):
    brought = chunks_of(descriptor)
    brought[:, fields.FLAGS] = fields.IN_MEMORY
    receiving, sending = os.pipe()
    try:
        for chunks in (brought, chunks_of(-1), chunks_of(receiving), chunks_of(1 << 20)):
            assert not seem_to_be_in_memory(chunks)
    finally:
        os.close(receiving)
        os.close(sending)
