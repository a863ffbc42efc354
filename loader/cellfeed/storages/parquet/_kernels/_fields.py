"""Columns and values of the tables that compiled code for Parquet works on."""

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

# Columns of a table of pieces of lists, values of one row in one page: number among the requested
# rows; first value; number of values; and page.
ROW, FIRST, N_ELEMENTS, IN_PAGE, N_LIST_PIECE_COLUMNS = range(5)

# What describes a column of lists in a row group: definition levels of a value and of an empty
# list; bytes of a value in pages, 4 or 8; the numbers of rows and of values in the dictionary; the
# address of the codec's function, 0 if there is none.
MOST, EMPTY, LIST_ITEMSIZE, N_ROWS, N_DISTINCT, LIST_DECOMPRESS, N_LIST_FIELDS = range(7)

# What a footer of a Parquet file says of a column in a row group; -1 where it says nothing. If the
# column is decoded here, `describe_lists` adds the last three.
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
    CHUNK_ITEMSIZE,  # bytes of a value in pages; -1 if only pyarrow can decode the column
    CHUNK_MOST,  # definition levels of a value and of an empty list
    CHUNK_EMPTY,
    N_CHUNK_FIELDS,
) = range(15)
MOST_ENCODINGS = 10
