"""The job as a value, which determines every byte of the output."""

import errno
import fcntl
import json
import math
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import Location, digest_of, digest_of_array, identity
from cellfeed.collection import Collection, JoinVars, located
from cellfeed.extending import (
    FormatError,
    MismatchError,
    ParameterError,
    PathError,
    os_errors,
    require_one_of,
    require_positive,
    require_seed,
)
from cellfeed.sampling import BlockShuffling, EpochPlan, Streaming
from cellfeed.sources.anndata import DATASETS

# The inputs: checks that they have not changed, and their short names.


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """An input file, with its size and modification time.

    Parameters
    ----------
    path
        Absolute path, or a URL.
    n_bytes
        Size in bytes; for a folder (a zarr store), the size of its metadata.
    modified_ns
        Modification time in nanoseconds; for a folder, that of its metadata.
    """

    path: str
    n_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, location: Location) -> "InputFile":
        """Describe the current state of an input; for a remote one, only its URL.

        Raises
        ------
        PathError
            There is no such file.
        """
        if location.path is None:
            return cls(path=str(location), n_bytes=0, modified_ns=0)
        stamped = absolute = location.path.absolute()
        for name in ("zarr.json", ".zgroup"):  # which change with the store
            if (absolute / name).is_file():
                stamped = absolute / name
                break
        try:
            n_bytes, modified_ns = identity(stamped.stat())
        except OSError as error:
            raise PathError(f"{location}: no such file") from error
        return cls(path=str(absolute), n_bytes=n_bytes, modified_ns=modified_ns)

    def check(self) -> None:
        """Check that the file has not changed.

        Raises
        ------
        PathError
            There is no such file.
        MismatchError
            The file has changed.
        """
        if InputFile.of(Location(self.path)) != self:
            msg = (
                f"{self.path}: has changed since shuffling began; remove the output, or give "
                "another, and start over"
            )
            raise MismatchError(msg)


def file_labels(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return short names of files, without the folder if these are unique.

    Examples
    --------
    >>> file_labels(("/data/a.h5ad", "/data/b.h5ad"))
    ('a.h5ad', 'b.h5ad')
    >>> file_labels(("/data/1/a.h5ad", "/data/2/a.h5ad"))
    ('/data/1/a.h5ad', '/data/2/a.h5ad')
    """
    names = tuple(Location(path).name for path in paths)
    return names if len(set(names)) == len(names) else paths


# To be raised whenever the same job gives other content.
FORMAT = "cellfeed preshuffle 7"

CODECS = "delta", "annbatch"

# Of the memory, three quarters hold a part. The rest is for a piece that is being read, of which
# there may be three copies, or for a shard that is being encoded, of which there may be as many.
_SHARE_OF_PART = 3 / 4
_SHARE_OF_PIECE = 1 / 16
# Larger ones are no faster: memory that the system hands out anew costs more than it saves.
_LARGEST_PIECE = 32 * 2**20
# A larger one takes more memory and is no faster; a billion cells are some 100,000 files.
_LARGEST_SHARD = 128 * 2**20
# obs: a barcode or another text takes about as much as a Python string, a code or number less.
_OBS_BYTES_PER_CELL = 400
# A block is so much longer than a chunk of the files that reading parts of chunks costs an
# eighth more at most, and so much shorter than a part that each part holds many of them.
_CHUNKS_PER_BLOCK = 8
_LEAST_BLOCK = 64
_LEAST_BLOCKS_PER_PART = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A matrix to write.

    Parameters
    ----------
    name
        Name of the element.
    row_shape
        Shape of a row: the number of columns, or several numbers.
    dtype
        Dtype of the values.
    row_length
        Mean number of stored elements of a cell; None if rows are dense.
    table
        Path of the table of its columns in the files, such as ``var``; None if they have no names.
    """

    name: str
    row_shape: tuple[int, ...]
    dtype: str
    row_length: float | None
    table: str | None

    @property
    def is_sparse(self) -> bool:
        """Whether rows are sparse."""
        return self.row_length is not None

    @property
    def n_columns(self) -> int:
        """Number of columns, or of the values in a dense row."""
        return math.prod(self.row_shape)

    @property
    def index_dtype(self) -> np.dtype[np.unsignedinteger]:
        """The smallest dtype that can hold column indices, as annbatch writes them."""
        return np.dtype(np.min_scalar_type(max(self.n_columns - 1, 0)))

    @property
    def elements_per_cell(self) -> float:
        """Mean number of elements of a cell in a buffer."""
        return self.n_columns if self.row_length is None else self.row_length

    def bytes_per_cell(self, index_dtype: "np.dtype[Any]") -> float:
        """Return the mean size of a cell in memory, with column indices of the given dtype."""
        index_size = index_dtype.itemsize if self.is_sparse else 0
        return self.elements_per_cell * (np.dtype(self.dtype).itemsize + index_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A copy of a collection, divided into parts that can be written independently.

    Parameters
    ----------
    inputs
        The files, in the order of their cells.
    matrices
        The matrices to write, at least one.
    join_vars
        See `open_collection`.
    genes, rows
        Digests of the chosen genes and of the chosen rows; empty if they are not chosen.
    in_order
        Whether cells keep their order.
    group_by
        Names of obs columns; the cells of each part are sorted by them, and shuffled within groups.
    seed, block_size
        Seed and block size of the plan.
    memory
        Bytes for the buffers, which determine the sizes of parts and shards.
    codec, cells_per_chunk
        Encoding of sparse rows, and number of cells in a chunk, a mean if they are sparse.
    n_cells
        Number of cells to write.
    linked
        Other files to which the inputs refer.
    n_stored
        Number of the first inputs that are parts of the store to which cells are appended.
    merged
        Numbers of the parts of that store that are replaced.
    n_replaced
        Number of cells in these parts, which are among the cells to write.
    first_part
        Number of the first part in the store.
    request
        Digest of all parameters of the call; empty if nothing is appended.
    """

    inputs: tuple[InputFile, ...]
    matrices: tuple[Matrix, ...]
    join_vars: JoinVars = "same"
    genes: str = ""
    rows: str = ""
    in_order: bool = False
    group_by: tuple[str, ...] = ()
    seed: int
    block_size: int
    memory: int
    codec: str
    cells_per_chunk: int
    n_cells: int
    linked: tuple[InputFile, ...] = ()
    n_stored: int = 0
    merged: tuple[int, ...] = ()
    n_replaced: int = 0
    first_part: int = 0
    request: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the files."""
        return tuple(file.path for file in self.inputs)

    @property
    def elements(self) -> tuple[str, ...]:
        """Names of the matrices in the files."""
        return tuple(each.name for each in self.matrices)

    def elements_per_chunk(self, matrix: Matrix) -> int:
        """Return the number of elements in a chunk of sparse rows."""
        return max(1, round(self.cells_per_chunk * matrix.elements_per_cell))

    @property
    def cells_per_part(self) -> int:
        """Number of cells in every part except the last, which may have fewer."""
        sizes = (each.bytes_per_cell(each.index_dtype) for each in self.matrices)
        bytes_per_cell = sum(sizes) + _OBS_BYTES_PER_CELL
        most = max(1, int(self.memory * _SHARE_OF_PART / bytes_per_cell))
        return -(-self.n_cells // -(-self.n_cells // most))

    @property
    def cells_per_piece(self) -> int:
        """Number of cells that are read together."""
        as_read = np.dtype(np.int32)
        bytes_per_cell = max(1.0, sum(each.bytes_per_cell(as_read) for each in self.matrices))
        return max(1, int(min(self.memory * _SHARE_OF_PIECE, _LARGEST_PIECE) / bytes_per_cell))

    def chunks_per_shard(self, matrix: Matrix, dtype: "np.dtype[Any]") -> int:
        """Return the number of chunks of an array in a shard."""
        shard = min(self.memory * _SHARE_OF_PIECE, _LARGEST_SHARD)
        return max(1, int(shard // (self.elements_per_chunk(matrix) * dtype.itemsize)))

    @property
    def plan(self) -> EpochPlan:
        """The plan, which assigns cells to parts and orders them."""
        return EpochPlan(
            strategy=Streaming() if self.in_order else BlockShuffling(block_size=self.block_size),
            n_rows=self.n_cells,
            batch_size=self.cells_per_part,
            fetch_factor=1,
            seed=self.seed,
        )

    @property
    def n_parts(self) -> int:
        """Number of parts."""
        return self.plan.n_fetches

    def part_size(self, number: int) -> int:
        """Return the number of cells of a part."""
        return min(self.cells_per_part, self.n_cells - number * self.cells_per_part)

    def to_json(self) -> str:
        """Return the job as text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the job from its text.

        Raises
        ------
        FormatError
            The text is damaged, or of another version of cellfeed.
        """
        try:
            values = json.loads(text, object_hook=_with_tuples)
            found = values.pop("format")
            if found == FORMAT:
                for name in ("inputs", "linked"):
                    values[name] = tuple(InputFile(**each) for each in values[name])
                values["matrices"] = tuple(Matrix(**each) for each in values["matrices"])
                return cls(**values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            msg = "the record of the job is damaged; remove the output and start over"
            raise FormatError(msg) from error
        msg = (
            f"it was begun by another version of cellfeed ({found}, here {FORMAT}); remove it "
            "and start over, or use that version"
        )
        raise FormatError(msg)

    def difference(self, begun: "Job") -> str | None:
        """Return as text how this job differs from one that was begun; None if it does not."""
        if len(self.paths) != len(begun.paths):
            return f"of other files: {len(begun.paths)} then, {len(self.paths)} now"
        for path, before in zip(self.paths, begun.paths, strict=True):
            if path != before:
                return f"of other files: `{before}`, not `{path}`"
        now = dict.fromkeys((*self.inputs, *self.linked))
        for file in (*begun.inputs, *begun.linked):
            if file not in now:
                return f"before `{file.path}` was changed"
        for name in _STATED:
            then, now = getattr(begun, name), getattr(self, name)
            if then != now:
                return f"with {name}={then!r}, not with {name}={now!r}"
        for each in fields(self):
            if getattr(begun, each.name) != getattr(self, each.name):
                return f"with other {each.name}"
        return None


_STATED = (
    "elements", "seed", "in_order", "group_by", "merged", "join_vars", "memory", "block_size",
    "codec", "cells_per_chunk",
)  # fmt: skip


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """Return values of JSON with tuples in place of lists."""
    return {k: tuple(each) if isinstance(each, list) else each for k, each in values.items()}


def describe_job(
    collection: Collection,
    *,
    rows: NDArray[np.int64] | None,
    block_size: int | None,
    **settings: Any,
) -> Job:
    """Return the job for a collection.

    Parameters
    ----------
    collection
        The collection, whose elements are the matrices to write.
    rows
        Rows to write, ascending; None for all.
    block_size
        Block size; None for the default.
    **settings
        Other fields of `Job`.

    Raises
    ------
    ParameterError
        ``memory``, ``block_size`` or ``cells_per_chunk`` is below 1, ``seed`` is not an integer,
        there is no such codec, or an element is not a matrix of numbers.
    """
    require_one_of("codec", settings["codec"], CODECS)
    linked = {file for source in collection.sources for file in source.linked_files()}
    job = Job(
        inputs=tuple(map(InputFile.of, collection.locations)),
        matrices=tuple(_matrix(collection, name) for name in collection.elements),
        rows=digest_of_array(rows),
        block_size=1,
        n_cells=len(collection) if rows is None else rows.size,
        linked=tuple(InputFile.of(Location.of(file)) for file in sorted(linked)),
        **settings
        | {
            "seed": require_seed(settings["seed"]),
            "memory": require_positive("memory", settings["memory"]),
            "cells_per_chunk": require_positive("cells_per_chunk", settings["cells_per_chunk"]),
        },
    )
    if block_size is None:
        return replace(job, block_size=_default_block_size(job, collection.rows_per_chunk))
    return replace(job, block_size=require_positive("block_size", block_size))


def _matrix(collection: Collection, name: str) -> Matrix:
    element, stored = collection.elements[name], collection.sources[0].elements[name]
    if name.startswith("mod/"):
        msg = f"{collection.locations[0]}: is MuData, which is not written, but `{name}` is named"
        raise ParameterError(f"{msg}; write its modality as AnnData, others in its obsm")
    if element.layout == "ragged" or element.dtype.names is not None:
        msg = (
            f"`elements` must be matrices of numbers, but {name!r} has rows of any length "
            "or values with fields; read it without preshuffling"
        )
        raise ParameterError(msg)
    if len(element.row_shape) > 1 and "obsm/" not in name:  # anndata no longer reads these
        msg = (
            f"`elements` must have two dimensions, cells x genes, but {name!r} has "
            f"{1 + len(element.row_shape)}; read it without preshuffling"
        )
        raise ParameterError(msg)
    if element.n_columns == 0 and name == "X":
        msg = f"{collection.locations[0]}: has no genes; give files that have some"
        raise ParameterError(msg)
    return Matrix(
        name=name,
        row_shape=element.row_shape,
        dtype=element.dtype.name,
        row_length=float(collection.mean_row_lengths[name]) if element.layout == "csr" else None,
        table=stored.var,
    )


def describe_request(paths: Any, asked: Any, rows: Any, settings: Mapping[str, Any]) -> str:
    """Return a digest of a call: its files as they are now, and its parameters."""
    files = [asdict(InputFile.of(each.location)) for each in located(paths)]
    of_rows = digest_of_array(None if rows is None else np.ascontiguousarray(rows))
    return digest_of(json.dumps([files, asked, of_rows, settings]))


def _default_block_size(job: Job, rows_per_chunk: float) -> int:
    reads_well = 1 << max(0, int(np.ceil(np.log2(_CHUNKS_PER_BLOCK * rows_per_chunk))))
    mixes_well = max(1, job.cells_per_part // _LEAST_BLOCKS_PER_PART)
    return min(max(reads_well, _LEAST_BLOCK), mixes_well)


# The output folder: its job, its finished parts, and leftovers of a run that was killed.
#
# While it is being written, ``.cellfeed/job.json`` describes the job. A part is written in
# ``.cellfeed`` and renamed to ``dataset_<number>`` when it is complete, so folders with that name
# are always complete. At the end, the description moves into the attributes of the group, which
# mark the store as finished, and ``.cellfeed`` is removed.
#
# Cells that are appended are written in the same way. The parts of the store are those that its
# attributes list, and these are replaced in one step at the end: until then the store is as before.

_WORK = ".cellfeed"
_RECORD = "job.json"
_ROOT = "zarr.json"
_ATTRIBUTES = {"encoding-type": "annbatch-preshuffled", "encoding-version": "0.1.0"}
_OWN_ATTRIBUTE, _APPENDED = "cellfeed", "cellfeed-appended"


class OutputFolder:
    """A folder that a copy is written to.

    Parameters
    ----------
    path
        The folder, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._work = path / _WORK

    def begun(self) -> Job | None:
        """Return the job that was begun here, and is not known to be finished; None if none.

        Raises
        ------
        ParameterError
            The folder contains something else.
        FormatError
            The job is of another version of cellfeed.
        """
        record = self._work / _RECORD
        if record.exists():
            return Job.from_json(record.read_text())
        is_mine = not self.path.exists() or bool(self.finished())
        if not is_mine and (not self.path.is_dir() or any(self.path.iterdir())):
            msg = f"{self.path}: contains something else; give an output that does not exist yet"
            raise ParameterError(msg)
        return None

    def finished(self) -> list[Job]:
        """Return the jobs that are complete and were checked: the first, and those appended."""
        attributes = self._root().get("attributes", {})
        if _OWN_ATTRIBUTE not in attributes:
            return []
        return [
            Job.from_json(text)
            for text in (attributes[_OWN_ATTRIBUTE], *attributes.get(_APPENDED, ()))
        ]

    def begin(self, job: Job) -> None:
        """Record the job."""
        self._work.mkdir(parents=True, exist_ok=True)
        _write_whole(self._work / _RECORD, job.to_json())

    def part(self, number: int) -> Path:
        """Return the path of a complete part."""
        return self.path / f"dataset_{number}"

    @contextmanager
    def new_part(self, number: int) -> Iterator[Path]:
        """Provide a path for writing a part, which becomes the part if nothing fails."""
        place = self._work / f"part-{number}-{uuid.uuid4().hex}"
        try:
            yield place
            try:
                place.rename(self.part(number))
            except OSError as error:
                # Another worker, when this one was taken for dead, has completed the same part.
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise
        finally:
            shutil.rmtree(place, ignore_errors=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the output against other runs.

        Raises
        ------
        ParameterError
            Another run is writing to it.
        """
        with (self._work / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                msg = f"{self.path}: another run is writing it; wait for it to end, or stop it"
                raise ParameterError(msg) from error
            except OSError as error:  # a file system without locks
                if error.errno not in {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}:
                    raise
            yield

    def numbers(self) -> list[int]:
        """Return the numbers of the parts of the finished store, ascending."""
        return list(self._root()["attributes"][DATASETS])

    def numbers_on_disk(self) -> list[int]:
        """Return the numbers of all complete parts, ascending."""
        return sorted(int(each.name[len("dataset_") :]) for each in self.path.glob("dataset_*"))

    def remove_others(self, job: Job) -> None:
        """Remove parts that are neither of the finished store nor of a job."""
        kept = {*self.numbers(), *range(job.first_part, job.first_part + job.n_parts)}
        for number in self.numbers_on_disk():
            if number not in kept:
                shutil.rmtree(self.part(number), ignore_errors=True)

    def finish(self, job: Job) -> None:
        """Mark the store as finished, or as extended by a job, in one step."""
        own = range(job.first_part, job.first_part + job.n_parts)
        before, members = self._root(), dict[str, Any]()
        if job.n_stored:
            numbers = [*(each for each in self.numbers() if each not in job.merged), *own]
            appended = [*before["attributes"].get(_APPENDED, ()), job.to_json()]
            attributes = before["attributes"] | {DATASETS: numbers, _APPENDED: appended}
            kept = {self.part(number).name for number in numbers}
            for path, member in before["consolidated_metadata"]["metadata"].items():
                if path.split("/")[0] in kept:
                    members[path] = member
        else:
            attributes = _ATTRIBUTES | {_OWN_ATTRIBUTE: job.to_json(), DATASETS: [*own]}
        for number in own:
            for file in sorted(self.part(number).rglob(_ROOT)):
                member = json.loads(file.read_text())
                if member["node_type"] == "group":
                    member["consolidated_metadata"] = _members({})
                members[str(file.parent.relative_to(self.path))] = member
        root = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        root["consolidated_metadata"] = _members(members)
        with os_errors(self.path / _ROOT):
            _write_whole(self.path / _ROOT, json.dumps(root, indent=1))

    def clean(self) -> None:
        """Remove the files that were needed only while the store was being written."""
        record, finished = self._work / _RECORD, self.finished()
        if not record.exists() or Job.from_json(record.read_text()) in finished:
            if self._work.exists():
                self.remove_others(finished[-1])
            shutil.rmtree(self._work, ignore_errors=True)

    def n_bytes(self) -> int:
        """Return the size of all files; those that several arrays share count once."""
        found = (file.stat() for file in self.path.rglob("*") if file.is_file())
        return sum({(each.st_dev, each.st_ino): each.st_size for each in found}.values())

    def _root(self) -> dict[str, Any]:
        try:
            root = json.loads((self.path / _ROOT).read_text())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return {}
        return root if isinstance(root, dict) else {}


def _members(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return metadata of all members of a group, as zarr consolidates them."""
    return {"kind": "inline", "must_understand": False, "metadata": metadata}


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    temporary.write_text(text)
    temporary.replace(path)
