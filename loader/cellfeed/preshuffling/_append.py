"""Appending cells to a finished store: what has to agree, and which parts they are mixed with."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.collection import Collection, Genes, JoinVars
from cellfeed.extending import MismatchError, ParameterError, require_not_negative
from cellfeed.preshuffling._inputs import open_matrices, open_parts
from cellfeed.preshuffling._job import (
    Contents,
    InputFile,
    Job,
    Matrix,
    OutputFolder,
    describe_job,
)
from cellfeed.sampling import derive_key, random_words

Extension = tuple[Collection, NDArray[np.int64], Job]
"""The collection of parts of the store and of files, its rows to write, and the job."""


def contents_of_store(first: Job) -> Contents:
    """Return what is written of files that are appended, unless it is stated: the same again."""
    return Contents(
        matrices=first.elements,
        frames=first.frames,
        uns=first.uns,
        paths={each.name: each.path for each in first.matrices},
    )


def describe_extension(
    folder: OutputFolder,
    paths: Any,
    contents: Contents,
    selected: Callable[[Collection], NDArray[np.int64] | None],
    *,
    join_vars: JoinVars,
    mix: int,
    seed: int,
    begun: Job | None,
    **settings: Any,
) -> Extension:
    """Describe how files extend a finished store.

    The first source of the collection is the newest part of the store, whose genes, dtypes and
    categories those of the files are fitted to.

    Parameters
    ----------
    folder, paths, contents
        The store, the files, and what is written of them.
    selected
        Returns the rows of the files to write; None for all.
    join_vars
        Which genes the files may have; see `Genes`, ``of_first``.
    mix
        Number of parts of the store with which each new part is merged.
    seed
        Seed of the choice of these parts.
    begun
        The job, if it has been begun.
    **settings
        See `describe_job`.

    Raises
    ------
    ParameterError
        A file is in the store already, or other elements would be written than the store has.
    MismatchError
        The files have other genes or a wider dtype.
    """
    require_not_negative("mix", mix)
    jobs, numbers = folder.finished(), folder.numbers()
    new = open_matrices(paths, contents.matrices, Genes("outer"), folder.by_row)
    there = {path for job in jobs for path in job.paths[job.n_stored :]}
    for location in new.locations:
        if InputFile.of(location).path in there:
            msg = f"{location}: is in {folder.path} already; give files that are not"
            raise ParameterError(msg)
    stored = _stored_matrices(folder, jobs[0], contents)
    rows = selected(new)
    rows = np.arange(len(new)) if rows is None else rows
    newest, first_part = numbers[-1], 1 + folder.numbers_on_disk()[-1]

    def described(merged: list[int]) -> Extension:
        parts = [newest, *(number for number in merged if number != newest)]
        sources = open_parts([folder.part(number) for number in parts], stored)
        genes = Genes(join_vars, of_first=True)
        collection = Collection([*sources, *new.sources], genes=genes)
        bounds = np.cumsum([0, *(each.n_rows for each in sources)])
        old = np.arange(0 if newest in merged else bounds[1], bounds[-1])
        written = np.concatenate([old, bounds[-1] + rows])
        job = describe_job(
            collection,
            contents,
            rows=written,
            join_vars=join_vars,
            seed=seed,
            n_stored=len(parts),
            merged=tuple(merged),
            n_replaced=old.size,
            first_part=first_part if begun is None else begun.first_part,
            **settings,
        )
        return collection, written, replace(job, matrices=_fitted(job, stored, collection))

    extension = described([])
    if not mix:
        return extension
    *_, job = extension
    order = np.argsort(random_words(derive_key(job.seed, len(jobs)), np.arange(len(numbers))))
    return described(sorted(numbers[k] for k in order[: mix * job.n_parts]))


def _stored_matrices(folder: OutputFolder, first: Job, contents: Contents) -> list[Matrix]:
    """Return the matrices of a store by the names that they have in the files."""
    of_path = {each.path: each for each in first.matrices}
    names = {contents.paths.get(name, name): name for name in contents.matrices}
    has = {*of_path, *first.frames}
    given = {*names, *contents.frames}
    if given != has:
        msg = f"{folder.path}: has the elements {_listed(has)}, but {_listed(given)} would be added"
        raise ParameterError(f"{msg}; give the same `elements`, or leave them out")
    return [replace(of_path[path], name=name) for path, name in names.items()]


def _fitted(job: Job, stored: list[Matrix], collection: Collection) -> tuple[Matrix, ...]:
    """Return the matrices of a job with the dtypes of the store."""
    fitted = list[Matrix]()
    for each, before in zip(job.matrices, stored, strict=True):
        if each.is_sparse != before.is_sparse:
            kinds = [("sparse" if matrix.is_sparse else "dense") for matrix in (each, before)]
            msg = f"`{each.name}` is {kinds[0]}, but {kinds[1]} in the store; write it like that"
            raise MismatchError(msg)
        for source in collection.sources:
            dtype = source.elements[each.name].dtype
            if not np.can_cast(dtype, before.dtype, "safe"):
                msg = (
                    f"{source.location}: `{each.name}` is {dtype}, which {before.dtype}, the dtype "
                    "in the store, cannot hold; write it with that dtype"
                )
                raise MismatchError(msg)
        fitted.append(replace(each, dtype=before.dtype))
    return tuple(fitted)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
