"""Columns and values of the tables that compiled functions work on.

Tables are int64 arrays with one row per item; the names of their columns are below.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
"""Numbers, addresses, or a table."""

# Columns of a table of arrays.
(
    CODEC,
    SHUFFLED,
    ITEMSIZE,
    OUT_ITEMSIZE,
    DECODED_BYTES,
    CAST,
    INDEX_LIMIT,
    LOST_IS_ZERO,  # whether missing chunks are zeros
    STREAMED,  # whether writes bypass the cache, since there are more than it holds
    PLACING,  # how elements are written to their destinations; see below
    STEPS,  # address of the steps of transforms of values, each of whose segments is a row; or 0
    COLUMN_MAP,  # address of an int32 for each column: its new number, -1 if it is left out
    IS_SELECTED,  # SELECTED: address of a byte for each column: 1 if it is selected, else 0
    CHECKED,  # address of a bit for each chunk: whether it was fully decompressed; or see below
    NOT_PLACED,  # whether to stop after decompression
    DELTA,  # whether each element of a chunk is stored as its difference from the one before it
    CHECKSUMMED,  # whether a CRC32C of a chunk's bytes follows them
    DECOMPRESS,  # addresses of functions, which `resolve` fills in: of the codec,
    UNSHUFFLE,  # if chunks are SHUFFLED,
    ADD_UP,  # if they are stored as a DELTA,
    PLACE,  # and of PLACING
    N_ARRAY_COLUMNS,
) = range(22)

# In place of CHECKED: decompress each chunk completely every time, or only as far as needed.
EVERY_TIME, NEVER = 0, -1

# How the elements of a segment are written to their destination.
(
    COPIED,  # contiguously; column indices are renumbered by COLUMN_MAP, of which none is left out
    SELECTED,  # column indices; the selected ones are listed, see `_selecting`
    PICKED,  # values of selected elements, contiguously
    SPREAD,  # a dense row, each element to its column in COLUMN_MAP
) = range(4)

# Columns of a table of chunks. FD: a descriptor, or minus the address of the path of a file that
# is opened to read the chunk. FLAGS: filters that were skipped when this chunk was written. Its
# segments are FIRST_SEGMENT up to END_SEGMENT. NUMBER: number of the chunk in its array.
FD, OFFSET, SIZE, FLAGS, ARRAY, FIRST_SEGMENT, END_SEGMENT, NUMBER, N_CHUNK_COLUMNS = range(9)
UNCOMPRESSED, UNSHUFFLED, ABSENT = 1, 2, 4  # ABSENT: the chunk does not exist; its elements are 0
WHOLE_FILE, LOST = 8, 16  # the chunk is its whole file, of at most SIZE bytes; the file is missing
OWN_FILE = 32  # the file must have the size of an uncompressed chunk
IN_MEMORY = 64  # the bytes are in memory, at the address OFFSET; FD is unused
AT_HAND = 128  # of an array that is in memory: no store reads them

# Columns of a table of segments: elements of a chunk with one destination. WITHIN: position of the
# first element in its row or range; for PICKED, the address of the positions of its elements in
# their row.
FROM, COUNT, TO, WITHIN, N_SEGMENT_COLUMNS = range(5)

# What `decode` reports: a failure (0 if none) plus PER_CHUNK times the number of its chunk, in one
# word, since several threads may fail at once; whether the columns of each row ascend within each
# chunk. SELECTION: address of the list for SELECTED, and N_SELECTED its length.
# DECOMPRESSED: number of decompressed bytes. The others are nanoseconds, summed over all threads:
# for reading bytes, for decompressing, and for placing elements.
(
    FAILURE,
    NEXT_TASK,
    ASCENDING,
    SELECTION,
    N_SELECTED,
    DECOMPRESSED,
    READING,
    DECOMPRESSING,
    PLACING_ELEMENTS,
    N_REPORTS,
) = range(10)
PER_CHUNK = 16
(
    UNREADABLE,
    TRUNCATED,
    UNDECODABLE,
    WRONG_SIZE,
    BAD_INDEX,
    MISSING,
    STOPPED,
    TOO_LARGE,
    WRONG_CHECKSUM,
) = range(1, 10)
CHECKSUM_BYTES = 4

# Steps of transforms: address of the function that applies them to a row, see `applier`;
# address of two int64 that count values without a logarithm, and rows whose total is no integer;
# number of steps; and for each step, in float64, its kind and the sum of a row.
APPLY, NON_COUNTS, N_STEPS, FIRST_STEP = range(4)
NORMALIZED, LOG1P, NORMALIZED_LOG1P = range(3)

# Columns of a table of groups of rows to transform.
FIRST_ROW, VALUES, ROW_LENGTH, POINTERS, N_GROUP_COLUMNS = range(5)

# Chunks that a thread takes at a time, and the bytes that it reads at once.
CHUNKS_OF_A_TASK = 8
LARGEST_READ = 1 << 20
