"""Edits metadata and chunks of zarr stores over and over; run in a process that may crash.

``python -m tests.loader.sources.zarr_metadata_fuzzing N [FIRST]`` puts odd and hostile numbers,
names and lists into stores of both formats. Each case gives the rows that zarr itself reads, or an
error of cellfeed's; see `hdf5_metadata_fuzzing`.
"""

import copy
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs
import numpy as np
import pandas as pd
import zarr
from tests.loader.sources.hdf5_metadata_fuzzing import (
    CSR,
    MATRIX,
    N_ROWS,
    N_VARS,
    POINTERS,
    Rows,
    dense_rows,
    outcome,
    say,
    small,
    try_cases,
)
from tests.loader.sources.zarr_cells import write_cells
from tests.loader.zarr_stores import in_this_thread

SIZES: list[Any] = [
    *(0, -1, 1, 2, 3, 7, 8, 16, 4, N_VARS, N_VARS + 1, N_ROWS - 1, N_ROWS, N_ROWS + 1, 240, 1000),
    *(1 << 15, 1 << 16, 1 << 20, 1 << 28, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 32) + N_ROWS),
    *(1 << 33, 1 << 40, 1 << 60, 1 << 61, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64),
    *((1 << 64) + N_ROWS, (1 << 64) - 1, 10**30, 1.5, 1e300, "8", None, True, [4], {}),
]
SHAPES: list[Any] = [
    *([1 << 32, 1 << 32], [1 << 62, 4], [1 << 62, 1 << 62], [4, 1 << 62], [1 << 31, 1 << 33]),
    *([1 << 61, 2], [(1 << 63) - 1, 1], [1 << 16, 1 << 16], [1 << 20, 1 << 8], [1 << 14, 1 << 14]),
    *([N_ROWS, N_VARS], [N_VARS, N_ROWS], [8, 12], [16, 24], [5, 5], [1, 1], [0, 0], [N_ROWS, 0]),
    *([1 << 62], [1 << 61], [1 << 32], [1 << 28], [1 << 24], [16], [1], [0], [], [8, 12, 1]),
]
_DTYPES = """
float32 float64 float16 int32 uint32 int64 uint64 int8 uint8 bool complex64 complex128 float128
longdouble r32 string bytes <f4 >f4 <f8 <f2 <i4 >i4 <u4 <i8 <u8 |i1 |b1 <f16 |S4 <M8[s] <U2 |V4 |O
<c8 float
"""
DTYPES: list[Any] = [*_DTYPES.split(), "", None, 7, [["a", "<i4"]], {"name": "float32"}]
FILLS: list[Any] = [
    *(0, 0.0, -0.0, 1, -1, 2.5, "NaN", "Infinity", "-Infinity", "0x7fc00000", "0x00000000", None),
    *(1 << 31, 1 << 63, 1 << 64, -(1 << 63), 10**400, 1e300, True, False, "", "abc", "AAAAAA=="),
    *([], [0, 0], {}, "0", "1e400"),
]


def codec(name: str, **configuration: Any) -> dict[str, Any]:
    return {"name": name, "configuration": configuration} if configuration else {"name": name}


def sharding(chunk_shape: list[int], index_codecs: list[Any], location: str) -> dict[str, Any]:
    return codec(
        "sharding_indexed",
        chunk_shape=chunk_shape,
        codecs=[BYTES],
        index_codecs=index_codecs,
        index_location=location,
    )


BYTES = codec("bytes", endian="little")
BLOSC = {"cname": "lz4", "clevel": 5, "shuffle": "bitshuffle", "blocksize": 0, "typesize": 4}
CODECS: list[Any] = [
    *(BYTES, codec("bytes", endian="big"), codec("bytes"), codec("zstd"), codec("nonsense")),
    *(codec("zstd", level=0, checksum=True), codec("gzip", level=5), codec("gzip", level=99)),
    *(codec("crc32c"), codec("numcodecs.lz4", acceleration=1), codec("numcodecs.zlib", level=1)),
    *(codec("blosc", **BLOSC), codec("blosc", **{**BLOSC, "typesize": 1 << 40})),
    *(codec("transpose", order=[1, 0]), codec("transpose", order=[0])),
    *(sharding([8], [BYTES], "end"), sharding([4, 12], [BYTES, codec("crc32c")], "start")),
]
COMPRESSORS: list[Any] = [
    *(None, {"id": "zstd", "level": 1}, {"id": "zlib", "level": 1}, {"id": "gzip", "level": 1}),
    *({"id": name} for name in ("lz4", "blosc", "nonsense", "bz2", "lzma")),
    *({}, "zstd"),
]
_NAMES = """
regular default v2 start end middle little big C F . / array group csr_matrix csc_matrix dataframe
.. 0.1.0
"""
NAMES: list[Any] = [*_NAMES.split(), "", "x" * 300, None]
OFFSETS = [0, 1, 16, (1 << 64) - 1, 1 << 63, (1 << 63) - 1, 1 << 62, 1 << 40, 1 << 20, 64, 300]


class ZarrCases:
    """Stores of every kind, one of which is edited, read and mended for each case."""

    def __init__(self, folder: Path) -> None:
        self._stores = [folder / f"{k:02}.zarr" for k in range(len(STORES))]
        # Numbers, since text is stored with codecs of its own, which are not what is tried here.
        tables: dict[str, Any] = {
            name: pd.DataFrame(index=np.arange(n)) for name, n in (("obs", N_ROWS), ("var", N_VARS))
        }
        for path, (matrix, zarr_format, options) in zip(self._stores, STORES, strict=True):
            arrays: dict[str, Any] = dict.fromkeys(("X", "indices", "data"), options)
            arrays["indptr"] = {"chunks": (16,)}
            write_cells(path, matrix, zarr_format=zarr_format, **tables, **arrays)
            assert outcome(path, lambda path=path: read_zarr(path)) == "same", path  # type: ignore[misc]

    def __call__(self, number: int) -> str:
        rng = np.random.default_rng([0, number])
        path = self._stores[rng.integers(len(self._stores))]
        kept = dict[Path, bytes | None]()
        try:
            edits = [edit_store(path, rng, kept) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
            say(number, f"{path.name}, {'; '.join(edits)}")
            return outcome(path, lambda: read_zarr(path))
        finally:
            for file, content in kept.items():
                if content is None:
                    file.unlink(missing_ok=True)
                else:
                    file.write_bytes(content)


def sharded(chunk: tuple[int, ...], shard: tuple[int, ...], **options: Any) -> dict[str, Any]:
    """Return options of an array whose shards have no checksum of their index."""
    codecs = [zarr.codecs.BytesCodec(), *options.pop("codecs", ZSTD)]
    index_codecs = [zarr.codecs.BytesCodec()]
    serializer = zarr.codecs.ShardingCodec(
        chunk_shape=chunk, codecs=codecs, index_codecs=index_codecs, **options
    )
    return {"chunks": shard, "serializer": serializer, "compressors": []}


ZSTD = [zarr.codecs.ZstdCodec()]
DENSE, SHARD = (8, N_VARS), (16, N_VARS)
AT_START = {"shape": SHARD, "index_location": "start"}
STORES: list[tuple[Any, Any, dict[str, Any]]] = [
    (MATRIX, 3, {"chunks": DENSE, "shards": SHARD}),
    (MATRIX, 3, {"chunks": DENSE, "shards": AT_START}),
    (MATRIX, 3, sharded(DENSE, SHARD)),
    (MATRIX, 3, sharded(DENSE, SHARD, codecs=[])),
    (MATRIX, 3, sharded((8, 4), (16, 16))),
    (MATRIX, 3, {"chunks": DENSE, "compressors": []}),
    (MATRIX, 3, {"chunks": (8, 5), "compressors": [zarr.codecs.GzipCodec()]}),
    (MATRIX, 3, {"chunks": (8, 5), "compressors": [zarr.codecs.BloscCodec()]}),
    (MATRIX, 2, {"chunks": DENSE, "compressors": numcodecs.Zstd()}),
    (MATRIX, 2, {"chunks": (8, 5), "compressors": numcodecs.LZ4()}),
    (MATRIX, 2, {"chunks": (8, 5), "compressors": None}),
    (CSR, 3, {"chunks": (16,), "compressors": ZSTD}),
    (CSR, 3, {"chunks": (16,), "shards": (48,)}),
    (CSR, 3, sharded((16,), (48,), index_location="start")),
    (CSR, 3, {"chunks": (16,), "compressors": []}),
    (CSR, 2, {"chunks": (16,), "compressors": numcodecs.Blosc()}),
    (CSR, 2, {"chunks": (16,), "compressors": numcodecs.Zlib()}),
]


def edit_store(path: Path, rng: np.random.Generator, kept: dict[Path, bytes | None]) -> str:
    """Edit one file of a store; return what was done."""
    kind = rng.random()
    if kind < 0.12:
        return edit_pointers(path, rng, kept)
    if kind < 0.24:
        return edit_chunk(path, rng, kept)
    files = [file for file in sorted(path.glob("X/**/*")) if file.name in _METADATA_FILES]
    files += [file for file in [path / "X/zarr.json", path / "X/.zattrs"] if file.exists()]
    if rng.random() < 0.05:
        files = [file for file in sorted(path.glob("**/*")) if file.name in _METADATA_FILES]
    file = files[rng.integers(len(files))]
    metadata = json.loads(file.read_text())
    names = [file.relative_to(path).as_posix()]
    # The same in all arrays of a sparse matrix, which then agree with each other.
    others = [other for other in files if other.parent.parent == path / "X"]
    together = file in others and rng.random() < 0.3
    what = edit_metadata(metadata, rng)
    for each in others if together else [file]:
        keep(each, kept)
        if each != file:
            edited = json.loads(each.read_text())
            for key in ("shape", "chunks", "chunk_grid", "codecs"):
                if key in metadata and key in edited:
                    edited[key] = copy.deepcopy(metadata[key])
            each.write_text(json.dumps(edited))
            names.append(each.relative_to(path).as_posix())
        else:
            each.write_text(json.dumps(metadata))
    return f"{' and '.join(names)}: {what}"


_METADATA_FILES = {"zarr.json", ".zarray", ".zattrs", ".zgroup"}


def keep(file: Path, kept: dict[Path, bytes | None]) -> None:
    """Remember a file as it was."""
    kept.setdefault(file, file.read_bytes() if file.exists() else None)


def edit_metadata(metadata: Any, rng: np.random.Generator) -> str:
    """Change one place, knowingly or anywhere; return what it was changed to."""
    if not isinstance(metadata, dict) or not metadata:
        return "nothing"
    known = [place for place in places_of(metadata) if place and kind_of(place) is not None]
    if known and rng.random() < 0.8:
        place = known[rng.integers(len(known))]
        pool = kind_of(place)
        assert pool is not None
        value = pool[rng.integers(len(pool))]
        if place[-1] in ("codecs", "index_codecs") and rng.random() < 0.8:
            value = edited_list(get(metadata, place), rng)
    else:
        places = [place for place in places_of(metadata) if place]
        place = places[rng.integers(len(places))]
        if rng.random() < 0.2:
            del get(metadata, place[:-1])[place[-1]]
            return f"without {place}"
        pool = [SIZES, NAMES, FILLS, SHAPES, DTYPES][rng.integers(5)]
        value = pool[rng.integers(len(pool))]
    get(metadata, place[:-1])[place[-1]] = copy.deepcopy(value)
    return f"{place} = {value!r}"


def kind_of(place: tuple[Any, ...]) -> list[Any] | None:
    """Return what may be put into a place of metadata; None if it is nothing special."""
    last = place[-1]
    pools: dict[Any, list[Any]] = {
        "shape": SHAPES,
        "chunks": SHAPES,
        "chunk_shape": SHAPES,
        "fill_value": FILLS,
        "data_type": DTYPES,
        "dtype": DTYPES,
        "codecs": [[codec] for codec in CODECS],
        "index_codecs": [[codec] for codec in CODECS],
        "compressor": COMPRESSORS,
        "filters": [[], None, [{"id": "delta", "dtype": "<f4"}], [{"id": "shuffle"}], [{}], {}],
        "index_location": ["start", "end", "middle", None, 0],
        "order": ["C", "F", "K", None],
        "endian": ["little", "big", None, "native"],
        "separator": [".", "/", "", "-", None, "\0"],
        "dimension_separator": [".", "/", "", None],
        "zarr_format": [2, 3, 1, 4, "3", None, 2.0],
    }
    if last in pools:
        return pools[last]
    if len(place) > 1 and place[-2] in ("shape", "chunks", "chunk_shape"):
        return SIZES
    return None


def edited_list(codecs: Any, rng: np.random.Generator) -> Any:
    """Return a list of codecs with one more, one less, or one of them another."""
    codecs = list(codecs) if isinstance(codecs, list) else []
    where, codec = int(rng.integers(len(codecs) + 1)), CODECS[rng.integers(len(CODECS))]
    kind = rng.integers(4)
    if kind == 0:
        codecs.insert(where, codec)
    elif kind == 1 and codecs:
        del codecs[where - 1]
    elif kind == 2 and codecs:
        codecs[where - 1] = codec
    else:
        codecs.reverse()
    return codecs


def places_of(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the keys that lead to each value within."""
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = [each for key in value for each in places_of(value[key], (*place, key))]
    elif isinstance(value, list):
        inner = [each for k in range(len(value)) for each in places_of(value[k], (*place, k))]
    return [place, *inner]


def get(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


def edit_pointers(path: Path, rng: np.random.Generator, kept: dict[Path, bytes | None]) -> str:
    """Change numbers that say where rows, or chunks of a shard, are."""
    is_dense = not (path / "X/data").exists()
    shards = [file for file in sorted(path.glob("X/**/c/**/*")) if is_shard(file)]
    if shards and (is_dense or rng.random() < 0.6):
        file = shards[rng.integers(len(shards))]
        keep(file, kept)
        return edit_index(file, path, rng)
    if is_dense:
        return edit_chunk(path, rng, kept)
    for file in files_in(path / "X/indptr"):
        keep(file, kept)
        file.unlink()
    values = CSR.indptr.astype(np.int64).copy()
    where, number = int(rng.integers(values.size)), POINTERS[rng.integers(len(POINTERS))]
    values[where] = number
    if rng.random() < 0.2:
        values = values[::-1].copy()
    dtype = ["<i8", "<i4", "<u8", "<f8"][rng.integers(4)]
    zarr.create_array(
        path / "X/indptr",
        data=values.astype(dtype),
        chunks=(64,),
        zarr_format=3 if (path / "zarr.json").exists() else 2,
    )
    for file in files_in(path / "X/indptr"):
        kept.setdefault(file, None)
    return f"indptr[{where}] = {number} as {dtype}"


def files_in(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.glob("**/*")) if file.is_file()]


def is_shard(file: Path) -> bool:
    return file.is_file() and "sharding_indexed" in metadata_of(file)


def metadata_of(file: Path) -> str:
    """Return the metadata of the array that a chunk is in; of format 3."""
    for folder in file.parents:
        if folder.name == "c" and (folder.parent / "zarr.json").exists():
            return (folder.parent / "zarr.json").read_text()
    return ""


def edit_index(file: Path, path: Path, rng: np.random.Generator) -> str:
    """Change where a chunk of a shard is; where there is a checksum, it is made to fit."""
    metadata = metadata_of(file)
    content = bytearray(file.read_bytes())
    n_chunks = int(rng.choice([2, 3, 8]))  # as the shards of all stores have
    n_checksum = 4 * ('"crc32c"' in metadata)
    at_start = re.search(r'"index_location": *"start"', metadata) is not None
    first = 0 if at_start else max(0, len(content) - n_checksum - 16 * n_chunks)
    number = int(OFFSETS[rng.integers(len(OFFSETS))])
    where = first + 8 * int(rng.integers(2 * n_chunks))
    content[where : where + 8] = number.to_bytes(8, "little")
    stop = first + 16 * n_chunks
    if n_checksum:
        checksum = google_crc32c.value(bytes(content[first:stop]))
        content[stop : stop + 4] = checksum.to_bytes(4, "little")
    file.write_bytes(bytes(content))
    return f"{file.relative_to(path)}: index, byte {where} = {number}"


def edit_chunk(path: Path, rng: np.random.Generator, kept: dict[Path, bytes | None]) -> str:
    """Replace a chunk by one that holds less or more, or remove it."""
    files = [file for file in files_in(path / "X") if file.name not in _METADATA_FILES]
    file = files[rng.integers(len(files))]
    keep(file, kept)
    n_bytes = int(rng.choice([0, 1, 4, 64, 384, 385, 1 << 16]))
    values = np.zeros(n_bytes, np.uint8)
    contents: dict[str, Callable[[], Any]] = {
        "zstd": lambda: numcodecs.Zstd().encode(values),
        "zlib": lambda: numcodecs.Zlib().encode(values),
        "gzip": lambda: numcodecs.GZip().encode(values),
        "lz4": lambda: numcodecs.LZ4().encode(values if n_bytes else np.zeros(1, np.uint8)),
        "blosc": lambda: numcodecs.Blosc().encode(values if n_bytes else np.zeros(1, np.uint8)),
        "bytes": values.tobytes,
    }
    name = list(contents)[rng.integers(len(contents) + 1) - 1]
    if rng.random() < 0.2:
        file.unlink()
        return f"without {file.relative_to(path)}"
    file.write_bytes(bytes(contents[name]()))
    return f"{file.relative_to(path)}: {n_bytes} bytes as {name}"


@in_this_thread()
def read_zarr(path: Path) -> Rows:
    """Return all rows as zarr itself reads them."""
    root: Any = zarr.open_group(path, mode="r")
    shape = root["obs/_index"].shape[0], root["var/_index"].shape[0]
    X = root["X"]
    if hasattr(X, "dtype"):
        assert X.shape == shape, X.shape
        return small(X)
    assert tuple(X.attrs["shape"]) == shape, X.attrs["shape"]
    data, indices, indptr = (small(root[f"X/{name}"]) for name in ("data", "indices", "indptr"))
    return dense_rows(data, indices, indptr, shape)


if __name__ == "__main__":
    try_cases(ZarrCases, *sys.argv[1:])
