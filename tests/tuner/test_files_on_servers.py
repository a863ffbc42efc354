"""`autotune` on URLs, of real servers on loopback; credentials are in no output."""

import html
import json
import os
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests import commands
from tests.servers.faults import Status
from tests.servers.web import WebServer

from cellfeed import CellDataset, ParameterError, open_collection
from cellfeed_tuner import AutotuneResult, Configuration, autotune, measure
from cellfeed_tuner._fingerprints import data_fingerprint
from cellfeed_tuner._subject import label_codes

pytestmark = pytest.mark.usefixtures("short_replicates")

N_CELLS = 2000
TOKEN = "token-that-nobody-sees"
GRID = ["--block-sizes", "4", "--fetch-factors", "2", "--workers", "0", "--entropy-floor", "0.5"]
SMALL: dict[str, Any] = {
    "block_sizes": [4],
    "fetch_factors": [2],
    "workers": [0],
    "entropy_floor": 0.5,
    "budget": 15.0,
}


def write(path, seed=0):
    rng = np.random.default_rng(seed)
    matrix = sp.csr_matrix(rng.poisson(0.3, (N_CELLS, 30)).astype(np.float32))
    plates = pd.Categorical(np.repeat(list("abcd"), N_CELLS // 4))
    names = [f"{path.stem}-{cell}" for cell in range(N_CELLS)]
    obs = pd.DataFrame({"plate": plates}, index=names)
    ad.AnnData(matrix, obs=obs).write_h5ad(path, compression="gzip")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    write(folder / "p1.h5ad")
    write(folder / "p2.h5ad", seed=1)
    return folder


def only_with_the_token(request):
    return None if request.headers.get("authorization") == f"Bearer {TOKEN}" else Status(403)


@pytest.fixture
def server(folder):
    with WebServer(folder, only_with_the_token) as server:
        yield server


OPTIONS: dict[str, Any] = {
    "client_options": {"default_headers": {"authorization": f"Bearer {TOKEN}"}}
}


def everything(folder):
    return b"".join(each.read_bytes() for each in folder.rglob("*") if each.is_file())


@pytest.fixture(scope="module")
def tuned(short_replicates, folder, tmp_path_factory):
    """What the command printed, wrote and kept, and where."""
    output, cache = tmp_path_factory.mktemp("tuned"), tmp_path_factory.mktemp("kept")
    options = tmp_path_factory.mktemp("secret") / "options.json"
    options.write_text(json.dumps(OPTIONS))
    with pytest.MonkeyPatch.context() as patch, WebServer(folder, only_with_the_token) as server:
        patch.setenv("CELLFEED_CACHE_DIR", str(cache))
        url = f"{server.url}/p1.h5ad"
        settings = ["--label", "plate", "--budget", "600", "--storage-options", options]
        printed = commands.autotune(url, *settings, *GRID, "--output", output, "--json")
        assert printed.exit_code == 0, printed.output
        collection = open_collection(url, obs=["plate"], storage_options=OPTIONS)
        made = CellDataset.from_autotune(collection, output / "autotune.json", seed=0)
        rows = np.concatenate([minibatch.rows.numpy() for minibatch in made])
        assert np.array_equal(np.sort(rows), np.arange(N_CELLS))
        shown = (
            commands.autotune("show"),
            commands.autotune("show", "--json"),
            commands.autotune("explain", output / "autotune.json"),
        )
    return printed, output, cache, url, made, shown


@pytest.mark.slow
@pytest.mark.process
def test_it_names_the_server_and_what_it_cannot_know(tuned):
    printed, output, _, url, made, shown = tuned
    saved = json.loads((output / "autotune.json").read_text())
    assert saved["cache"] == "remote"
    assert saved["dataset"]["paths"] == [url]
    assert saved["dataset"]["bytes_on_disk"] > 0
    assert saved["machine"]["storage"] == []
    assert {"reading", "decompressing"} <= {each["name"] for each in saved["bottleneck"]["stages"]}
    assert saved["recommended"]["configuration"]["num_workers"] == 0
    assert {each["bytes_read_per_cell"] for each in saved["configurations"]} == {None}
    said = " ".join(printed.stderr.split())
    page = html.unescape((output / "autotune.html").read_text(encoding="utf-8"))
    assert "read from a server, whose caches cannot be controlled" in page
    for text in (said, page):
        assert url in text
        assert "storage_options=..." in text
    assert "rounds of the recommended configuration" in page

    # How much to read ahead is measured and taken over.
    result = AutotuneResult.load(output / "autotune.json")
    depths = [each.prefetch for each in result.prefetch_results]
    assert depths == [1, 2, 4, 8, 16][: len(depths)]
    assert result.recommended is not None
    assert made.read_options.prefetch == result.recommended.prefetch
    if result.recommended.prefetch is not None:
        assert result.recommended.prefetch in depths
        assert f"prefetch {result.recommended.prefetch}" in result.recommended.settings
    assert json.loads(json.dumps(result.to_json())) == saved

    # Earlier runs are shown by their URL.
    assert [each.exit_code for each in shown] == [0, 0, 0]
    table, as_json, explained = (each.output for each in shown)
    assert "remote" in table
    (known,) = json.loads(as_json)["runs"]
    assert known["path"] == url
    assert known["settings"]["cache"] == "remote"
    assert "running side by side, the stages explain" in " ".join(explained.split())


@pytest.mark.slow
@pytest.mark.process
def test_what_was_reached_with_credentials_says_nothing_of_them(tuned):
    printed, output, cache, _, _, shown = tuned
    assert json.loads((output / "autotune.json").read_text())["dataset"]["has_storage_options"]
    texts = [printed.output, *(each.output for each in shown)]
    written = everything(output) + everything(cache) + "".join(texts).encode()
    assert written.count(b"plate") > 10
    for secret in (TOKEN, "authorization", "default_headers"):
        assert secret.encode() not in written


def test_a_url_is_known_again_until_another_file_is_there(server, folder):
    def fingerprint(name):
        collection = open_collection(f"{server.url}/{name}", obs=["plate"], storage_options=OPTIONS)
        return data_fingerprint(collection, label_codes(collection, "plate")).digest

    write(folder / "p3.h5ad")
    first = fingerprint("p3.h5ad")
    assert fingerprint("p3.h5ad") == first
    assert fingerprint("p2.h5ad") != first
    server.replace("p3.h5ad", (folder / "p3.h5ad").read_bytes())
    assert fingerprint("p3.h5ad") != first


def stored_bytes(path):
    with h5py.File(path) as file:
        arrays = [file[f"X/{name}"] for name in ("indptr", "indices", "data")]
        return sum(each.id.get_storage_size() for each in arrays)


@pytest.mark.slow
@pytest.mark.process
def test_of_python_too_and_of_several_files(server, folder):
    urls = [f"{server.url}/{name}.h5ad" for name in ("p1", "p2")]
    collection = open_collection(urls, obs=["plate"], storage_options=OPTIONS)
    result = autotune(collection, label="plate", **SMALL)
    assert result.loader_fault is None
    assert result.recommended is not None
    assert (result.cache, result.dataset.paths) == ("remote", tuple(urls))
    sizes = [stored_bytes(folder / f"{name}.h5ad") for name in ("p1", "p2")]
    assert [int(each.file_bytes()) for each in collection.sources] == sizes
    assert result.dataset.bytes_on_disk == sum(sizes)
    assert TOKEN not in repr(result) + str(result) + repr(collection)
    # Worker processes are measured if they are asked for.
    configuration = Configuration(block_size=4, fetch_factor=2, num_workers=1)
    found = measure(collection, configuration, label="plate", seconds=0.2)
    assert (found.failure, found.delivery_fault, found.cache) == ("", "", "remote")
    assert found.round_seconds


def test_states_of_caches_are_for_files_here_and_remote_for_those_on_servers(server, folder):
    url = f"{server.url}/p1.h5ad"
    collection = open_collection(url, obs=["plate"], storage_options=OPTIONS)
    for state in ("cold", "warm"):
        with pytest.raises(ParameterError) as caught:
            autotune(collection, label="plate", cache=state, **SMALL)
        assert str(caught.value) == (
            f"cache={state!r} is for files of this machine, but {url} is read from a server, "
            "whose caches are not under control; leave `cache` out"
        )
    collection = open_collection(folder / "p1.h5ad", obs=["plate"])
    with pytest.raises(ParameterError, match="cache='remote' is for files on servers"):
        autotune(collection, label="plate", cache="remote", **SMALL)


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("nothing.h5ad", json.dumps(OPTIONS), "nothing.h5ad"),
        ("p1.h5ad", json.dumps(OPTIONS).replace(TOKEN, "x-y-z"), "p1.h5ad"),
        ("p1.h5ad", '{"no_such_option": "x-y-z"}', "no_such_option"),
        ("p1.h5ad", "", "options.json: not a JSON object; "),
        ("p1.h5ad", "[1]", "options.json: not a JSON object; "),
        ("p1.h5ad", '{"secret_access_key": "x-y-z"', "options.json: not a JSON object; "),
        ("p1.h5ad", "\xff", "options.json: not a JSON object; "),
        ("p1.h5ad", None, "options.json: cannot be read"),
    ],
)
def test_what_cannot_be_opened_is_one_line_without_credentials(
    server, tmp_path, name, options, words
):
    path = tmp_path / "options.json"
    if options is not None:
        path.write_bytes(options.encode("latin-1"))
    settings = ["--storage-options", path, "--output", tmp_path, *GRID]
    said = commands.autotune(f"{server.url}/{name}", "--label", "plate", *settings)
    assert said.exit_code == 2
    (line,) = said.stderr.splitlines()
    assert line.startswith("Error: ")
    assert words in line
    assert "x-y-z" not in said.output
    assert TOKEN not in said.output


@pytest.mark.slow
@pytest.mark.process
def test_a_server_that_refuses_amid_measuring_is_one_line(folder, tmp_path):
    with WebServer(folder) as server:
        url = f"{server.url}/p1.h5ad"
        open_collection(url, obs=["plate"])
        n_for_opening = len(server.requests)
        server.answer = lambda _: Status(403) if len(server.requests) > 2 * n_for_opening else None
        settings = ["--label", "plate", "--budget", "600", *GRID, "--output", tmp_path]
        said = commands.autotune(url, *settings)
    assert said.exit_code == 2
    assert said.stderr.splitlines()[-1].startswith(f"Error: {url}")
    assert not (tmp_path / "autotune.json").exists()


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.process
def test_a_pattern_in_a_bucket(s3_server, folder, tmp_path):
    for name in ("p1", "p2"):
        s3_server.put(Path(folder / f"{name}.h5ad"), f"tuned/{name}.h5ad")
    options = tmp_path / "secret.json"
    options.write_text(json.dumps(s3_server.options))
    output = tmp_path / "output"
    url = f"s3://{s3_server.bucket}/tuned/*.h5ad"
    settings = ["--storage-options", options, "--output", output, "--budget", "600", *GRID]
    said = commands.autotune(url, "--label", "plate", *settings)
    assert said.exit_code == 0, said.output
    result = AutotuneResult.load(output / "autotune.json")
    assert result.dataset.paths == tuple(f"s3://cells/tuned/p{n}.h5ad" for n in (1, 2))
    assert result.recommended is not None
    written = everything(output) + everything(Path(os.environ["CELLFEED_CACHE_DIR"]))
    for name in ("access_key_id", "secret_access_key"):
        for secret in (name, s3_server.options[name]):
            assert secret.encode() not in written + said.output.encode()
