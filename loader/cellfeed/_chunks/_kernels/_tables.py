"""Columns and values of the tables that compiled functions work on.

Tables are int64 arrays of one row for each item; the names of their columns are below.
"""

# Columns of a table of arrays.
(
    CODEC,
    SHUFFLED,
    ITEMSIZE,
    OUT_ITEMSIZE,
    DECODED_BYTES,
    CAST,
    INDEX_LIMIT,
    LOST_IS_ZERO,  # whether chunks that are not there are taken to be zero
    STREAMED,  # whether elements go past the cache, since there are more than it holds
    PLACING,  # how elements go to their destinations; below
    COLUMN_MAP,  # address of an int32 for each column: what it becomes, -1 if it is left out
    IS_KEPT,  # address of a byte for each column of what is SELECTED: 1 if it is kept, else 0
    STEPS,  # address of an int64 for each step of what is TRANSFORMED: its kind
    NUMBERS,  # address of a float64 for each step: its number
    N_STEPS,
    CHECKED,  # address of a bit for each chunk: whether it was decompressed whole; or see below
    NOT_PLACED,  # whether it ends with decompression
    DELTA,  # whether each element of a chunk is stored as what is added to the one before it
    N_ARRAY_COLUMNS,
) = range(19)

# In place of CHECKED: each chunk is decompressed whole every time, or only as far as it is wanted.
EVERY_TIME, NEVER = 0, -1

# How the elements of a segment go to their destination.
(
    COPIED,  # one after the other, as they are
    RENUMBERED,  # column indices, each as COLUMN_MAP says; none is left out
    SELECTED,  # column indices; those that are kept are listed, see `_selecting`
    SCATTERED,  # values of the elements that were kept, each to its slot
    SPREAD,  # a dense row, each element to the column that COLUMN_MAP says
    TRANSFORMED,  # values of sparse rows, which go through STEPS
) = range(6)

# Columns of a table of chunks. FD: a descriptor, or minus the address of a path, of a file that
# is opened to read the chunk. FLAGS: what was left out when this chunk was written. Its
# segments are those from FIRST_SEGMENT up to END_SEGMENT. NUMBER: which chunk of its array it is.
FD, OFFSET, SIZE, FLAGS, ARRAY, FIRST_SEGMENT, END_SEGMENT, NUMBER, N_CHUNK_COLUMNS = range(9)
UNCOMPRESSED, UNSHUFFLED, ABSENT = 1, 2, 4  # ABSENT: there is no such chunk; its elements are 0
WHOLE_FILE, LOST = 8, 16  # the chunk is all of its file, of at most SIZE bytes; it is not there
OWN_FILE = 32  # the file has to be as large as a chunk that is not compressed
IN_MEMORY = 64  # the bytes are in memory, OFFSET is their address, and FD says nothing

# Columns of a table of segments: elements of a chunk that go to one destination. WITHIN: which
# element of its row or range the first is; of what is SCATTERED, the address of its entries; of
# what is TRANSFORMED, WHOLE_ROW if it is one, else the address of a row of the table below.
FROM, COUNT, TO, WITHIN, N_SEGMENT_COLUMNS = range(5)
WHOLE_ROW = -1

# Columns of a table of the pieces of rows that lie in several chunks: which element of its row the
# first of a piece is; elements and pieces of the row; and the address of an int64 for the row:
# how many of them were placed.
PIECE_START, ROW_ELEMENTS, ROW_PIECES, ROW_PLACED, N_PIECE_COLUMNS = range(5)

# What `decode` reports: a failure (0 if none), the chunk where it was, and whether the columns of
# each row ascend as far as they lie in one chunk. KEPT: address of the list of what is SELECTED,
# and N_KEPT how long it is. DECOMPRESSED: bytes that came out of decompression. What is left are
# nanoseconds, of all threads together: of reading bytes, of decompressing, of placing elements.
(
    FAILURE,
    FAILED_CHUNK,
    NEXT_TASK,
    ASCENDING,
    KEPT,
    N_KEPT,
    DECOMPRESSED,
    READING,
    DECOMPRESSING,
    PLACING_ELEMENTS,
    N_REPORTS,
) = range(11)
UNREADABLE, TRUNCATED, UNDECODABLE, WRONG_SIZE, BAD_INDEX, MISSING, STOPPED, TOO_LARGE = range(1, 9)
