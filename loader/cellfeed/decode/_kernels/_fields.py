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
    COLUMN_MAP,  # address of an int32 for each column: its new number, -1 if it is left out
    IS_SELECTED,  # SELECTED: address of a byte for each column: 1 if it is selected, else 0
    STEPS,  # TRANSFORMED: address of an int64 for each step: its kind
    NUMBERS,  # address of a float64 for each step: its number
    N_STEPS,
    CHECKED,  # address of a bit for each chunk: whether it was fully decompressed; or see below
    NOT_PLACED,  # whether to stop after decompression
    DELTA,  # whether each element of a chunk is stored as its difference from the one before it
    CHECKSUMMED,  # whether a CRC32C of a chunk's bytes follows them
    DECOMPRESS,  # addresses of functions, which `decode` fills in: of the codec,
    UNSHUFFLE,  # if chunks are SHUFFLED,
    ADD_UP,  # if they are stored as a DELTA,
    PLACE,  # of PLACING,
    APPLY_STEP,  # and, if rows are TRANSFORMED, of the function that applies a step to one
    N_ARRAY_COLUMNS,
) = range(25)

# In place of CHECKED: decompress each chunk completely every time, or only as far as needed.
EVERY_TIME, NEVER = 0, -1

# How the elements of a segment are written to their destination.
(
    COPIED,  # contiguously, unchanged
    RENUMBERED,  # column indices, renumbered by COLUMN_MAP; none is left out
    SELECTED,  # column indices; the selected ones are listed, see `_selecting`
    SCATTERED,  # values of selected elements, each to its slot
    SPREAD,  # a dense row, each element to its column in COLUMN_MAP
    TRANSFORMED,  # values of sparse rows, to which STEPS are applied
) = range(6)

# Columns of a table of chunks. FD: a descriptor, or minus the address of the path of a file that
# is opened to read the chunk. FLAGS: filters that were skipped when this chunk was written. Its
# segments are FIRST_SEGMENT up to END_SEGMENT. NUMBER: number of the chunk in its array.
FD, OFFSET, SIZE, FLAGS, ARRAY, FIRST_SEGMENT, END_SEGMENT, NUMBER, N_CHUNK_COLUMNS = range(9)
UNCOMPRESSED, UNSHUFFLED, ABSENT = 1, 2, 4  # ABSENT: the chunk does not exist; its elements are 0
WHOLE_FILE, LOST = 8, 16  # the chunk is its whole file, of at most SIZE bytes; the file is missing
OWN_FILE = 32  # the file must have the size of an uncompressed chunk
IN_MEMORY = 64  # the bytes are in memory, at the address OFFSET; FD is unused
AT_HAND = 128  # they always were: no store reads them

# Columns of a table of segments: elements of a chunk with one destination. WITHIN: position of the
# first element in its row or range; for SCATTERED, the address of its entries; for TRANSFORMED,
# WHOLE_ROW if it is one, else the address of a row of the table below.
FROM, COUNT, TO, WITHIN, N_SEGMENT_COLUMNS = range(5)
WHOLE_ROW = -1

# Columns of a table of the pieces of rows that lie in several chunks: position of the first element
# of a piece in its row; number of elements and of pieces of the row; and the address of the row's
# int64 count of placed pieces.
PIECE_START, ROW_ELEMENTS, ROW_PIECES, ROW_PLACED, N_PIECE_COLUMNS = range(5)

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

# Kinds of steps of transforms; those from CENTRED on depend on the columns of values.
NORMALIZED, LOG1P, NORMALIZED_LOG1P, BINARIZED, CENTRED, SCALED = range(6)

N_STEP_COLUMNS = 2  # of a table of steps: kind, and the number of its moments

# Columns of a table of groups of rows to transform.
FIRST_ROW, VALUES, ROW_LENGTH, COLUMNS, POINTERS, INDEX_ITEMSIZE = range(6)
N_GROUP_COLUMNS = 6

# In tiles of TileDB: the maximum number of rows of a band, and of elements of a run; and columns of
# a table of pieces: number among the requested rows; first element; number of elements; and number
# of elements of the row before them.
MOST_ROWS = (1 << 16) - 1
ROW, FIRST, N_ELEMENTS, BEFORE, N_ROW_PIECE_COLUMNS = range(5)

# Rows and chunks that a thread takes at a time, and the bytes that it reads at once.
ROWS_OF_A_TASK = 16
CHUNKS_OF_A_TASK = 8
LARGEST_READ = 1 << 20

# Settings of a tokenizer, integers and numbers, and what `tokenize` of cellfeed.tokenizers reports.
(
    TOKENIZER,
    LONGEST,
    N_KNOWN,
    HAS_TIES,
    TOP,
    CLS,
    EOS,
    FUNCTION,
    MASKING,
    MASK_TOKEN,
    N_SETTINGS,
) = range(11)
MASK_FRACTION, MASK_RANDOM, MASK_KEPT, MASK_VALUE, N_NUMBERS = range(5)
N_TOKENS, N_UNKNOWN, FAILED_ROW, FAILED_WHY, N_TOKEN_REPORTS = range(5)
RANKED, BINNED, CALLED = range(3)
UNMASKED, MASKED_TOKENS, MASKED_VALUES = range(3)
NOT_COUNTS, WRONG_LENGTH = range(1, 3)
NO_LABEL = -100  # which cross entropy in torch leaves out

# Columns of a table of pages of a Parquet file.
(
    BEGIN,  # where its bytes begin, after its header
    STORED,  # number of its bytes
    PAGE_SIZE,  # the same, decompressed
    KIND,
    N_ENTRIES,  # values, and lists without any
    N_PAGE_ROWS,  # rows that begin in it, or values of a dictionary; -1 if unknown
    IS_INDEXED,  # whether values are indices into the dictionary
    REPETITIONS,  # bytes of repetition and definition levels, if they are not compressed
    DEFINITIONS,
    IS_COMPRESSED,
    CHECKSUM,  # -1 if there is none
    VALUES_BEGIN,  # where its values lie in the memory of all pages, and how many there are;
    VALUES_END,  # `open_lists` writes these three
    N_VALUES,
    N_PAGE_COLUMNS,
) = range(15)
DATA_PAGE, INDEX_PAGE, DICTIONARY_PAGE, DATA_2_PAGE = range(4)  # KIND
PADDING = 64  # bytes that the memory of pages has beyond the last one

# Columns of a table of pieces of lists, those of tiles and the page: values of one row in one page.
IN_PAGE, N_LIST_PIECE_COLUMNS = 3, 4

# What describes a column of lists in a row group: definition levels of a value and of an empty
# list; bytes of a value in pages, 4 or 8; the numbers of rows and of values in the dictionary; the
# address of the codec's function, 0 if there is none.
MOST, EMPTY, LIST_ITEMSIZE, N_ROWS, N_DISTINCT, LIST_DECOMPRESS, N_LIST_FIELDS = range(7)

# What a footer of a Parquet file says of a column in a row group; -1 where it says nothing.
(
    CHUNK_CODEC,  # a number of the format
    ENCODINGS,  # a bit for each, the last one for those that are not known
    N_CHUNK_ENTRIES,  # values, and lists without any
    CHUNK_BYTES,  # of its pages, decompressed
    STORED_BYTES,
    DATA_OFFSET,
    DICTIONARY_OFFSET,
    N_NULLS,
    MAX_BEGIN,  # where in the footer its largest value is, and its bytes
    MAX_SIZE,
    MAX_IS_SIGNED,  # whether it is of the former field, in which integers were compared as signed
    N_CHUNK_FIELDS,
) = range(12)
MOST_ENCODINGS = 10
