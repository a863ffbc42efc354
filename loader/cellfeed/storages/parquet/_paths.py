"""Which Parquet files a path or URL stands for."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from cellfeed.bytes import Location, expand_url, has_suffix
from cellfeed.extending import PathError, RemoteError
from cellfeed.sources import first_line, suffixes

SUFFIX = ".parquet"
GENE_TABLE = "gene_metadata.parquet"  # its name in Tahoe-100M


def is_parquet(path: Path) -> bool:
    """Return whether a path is a Parquet file, or a folder of them and of no other cells."""
    return bool(_in_folder(path)) if path.is_dir() else has_suffix(path.name, SUFFIX)


def _in_folder(folder: Path) -> list[Path]:
    """Return the Parquet files of cells in a folder, by name; none if it has other cells."""
    if not (folder / GENE_TABLE).is_file() and (folder / "metadata" / GENE_TABLE).is_file():
        folder /= "data"  # of a whole repository of the hub
    every = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    if any(has_suffix(each, *suffixes()) and not each.startswith(".") for each in every):
        return []
    partitions = folder.glob(f"*=*/**/*{SUFFIX}")
    paths = [str(each.relative_to(folder)) for each in partitions]
    return [folder / each for each in _of_cells(str(folder), [*every, *paths])]


def _of_cells(folder: str, paths: Iterable[str]) -> list[str]:
    """Return the files of cells in a folder, by name, of paths in it.

    Raises
    ------
    PathError
        There are partition folders.
    """
    found = sorted(each for each in paths if _is_of_cells(each))
    for each in found:
        if re.search("=[^/]*/", each):
            msg = f"{folder}: {each} is in a partition folder, whose name would be lost; write the"
            raise PathError(f"{msg} cells to one folder, with its columns in the files")
    return [each for each in found if "/" not in each and not each.startswith(".")]


def _is_of_cells(path: str) -> bool:
    return has_suffix(path, SUFFIX) and not path.endswith(GENE_TABLE)


def files_at(location: Location) -> list[Location]:
    """Return the files that a path, folder, pattern or URL stands for, in the order of their rows.

    Raises
    ------
    PathError
        There are none, or they are in partition folders.
    RemoteError
        A server cannot be reached, or refuses the request.
    """
    if location.scheme == "hf":
        return _on_hub(location)
    if location.path is None:
        found = expand_url(location, [SUFFIX])
        return [each for each in found if _is_of_cells(each.text)] or found
    path = location.path.expanduser()
    if path.is_dir():
        paths = _in_folder(path)
    elif path.exists():
        return [Location.of(path)]
    else:
        matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - absolute patterns too
        paths = [Path(each) for each in matches if _is_of_cells(each)]
    if not paths:
        raise PathError(f"{location}: no Parquet file of cells is there; check the path")
    return [Location.of(each) for each in paths]


# Datasets on the HuggingFace hub.

_ON_HUB = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?")
_SECONDS = 30
_NEXT = re.compile(r'<([^>]+)>;\s*rel="next"')
_WILD = re.compile(r"[*?\[]")


def _on_hub(location: Location) -> list[Location]:
    """Return the URLs of files on the hub, or on the server that ``HF_ENDPOINT`` names."""
    parts = _ON_HUB.fullmatch(location.text)
    if parts is None:
        msg = f"{location}: must be of the form hf://datasets/OWNER/NAME/path"
        raise PathError(f"{msg}, perhaps with NAME@REVISION; write it so")
    name, revision, path = parts[1], parts[2] or "main", (parts[3] or "data").strip("/")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    token, options = os.environ.get("HF_TOKEN"), location.options
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if headers:
        client = dict(options.values.get("client_options") or {})
        client["default_headers"] = {**headers, **(client.get("default_headers") or {})}
        options = replace(options, values={**options.values, "client_options": client})
    paths = [path]
    wild = _WILD.search(path)
    if wild or not has_suffix(path, SUFFIX):
        folder = path[: wild.start()].rpartition("/")[0] if wild else path
        url = f"{endpoint}/api/datasets/{name}/tree/{revision}/{quote(folder)}?recursive=true"
        listed = _listed_by_hub(location, url, headers)
        if wild:
            matching = (each for each in listed if PurePosixPath(f"/{each}").match(f"/{path}"))
            paths = sorted(filter(_is_of_cells, matching))
        else:
            inner = [each.removeprefix(f"{path}/") for each in listed]
            paths = [f"{path}/{each}" for each in _of_cells(location.shown, inner)]
        if not paths:
            raise PathError(f"{location}: matches no Parquet file of the dataset; check the path")
    root = f"{endpoint}/datasets/{name}/resolve/{revision}"
    return [Location(f"{root}/{quote(each)}", options) for each in paths]


def _listed_by_hub(location: Location, url: str, headers: dict[str, str]) -> list[str]:
    """Return the paths of all files in a folder of a dataset."""
    from urllib.error import HTTPError  # noqa: PLC0415 - slow to import
    from urllib.request import Request, urlopen  # noqa: PLC0415

    found = list[str]()
    while url:
        try:
            with urlopen(Request(url, headers=headers), timeout=_SECONDS) as answer:  # noqa: S310 - the endpoint is the user's
                found += [each["path"] for each in json.load(answer) if each["type"] == "file"]
                following = _NEXT.search(answer.headers.get("Link") or "")
                url = following[1] if following else ""
        except HTTPError as error:
            msg = f"{location}: the hub has no such dataset or folder, or does not show it"
            remedy = "check the name; set HF_TOKEN if it needs an account"
            raise PathError(f"{msg} (HTTP {error.code}); {remedy}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            msg = f"{location}: the hub does not list its files ({first_line(error)})"
            raise RemoteError(f"{msg}; try again, or check HF_ENDPOINT") from None
    return found
