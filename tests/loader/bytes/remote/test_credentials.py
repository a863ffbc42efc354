"""Credentials are shown nowhere, and carried to no other host than the user named."""

import logging
import pickle
from urllib.parse import urlsplit

import numpy as np
import pytest
from tests.loader.bytes.remote.faulty import VALUES, quick
from tests.servers.faults import Status, redirect
from tests.servers.web import WebServer

from cellfeed import BlockShuffling, CellDataset, PathError, RemoteError, open_collection

SECRET = "hunter2"
HEADERS = {"Authorization": f"Bearer {SECRET}", "Cookie": f"session={SECRET}"}


def with_headers():
    options = quick()
    options["client_options"] |= {"default_headers": HEADERS}
    return options


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_redirected_to_another_path(server, code):
    moved = redirect("/p.h5ad", code)
    server.answer = lambda request: moved if request.path == "old.h5ad" else None
    there = open_collection(f"{server.url}/old.h5ad", storage_options=with_headers())
    np.testing.assert_array_equal(there[[7]].X.toarray(), VALUES[[7]])
    assert all(request.headers.get("authorization") for request in server.requests)


def test_redirected_to_another_host(folder, server):
    with WebServer(folder) as second:
        other = f"http://localhost:{urlsplit(second.url).port}"
        server.answer = lambda request: redirect(f"{other}/{request.path}")
        there = open_collection(f"{server.url}/p.h5ad", storage_options=with_headers())
        np.testing.assert_array_equal(there[[7]].X.toarray(), VALUES[[7]])
        assert second.requests
        assert all(request.headers.get("authorization") for request in server.requests)
        for request in second.requests:
            assert SECRET not in str(dict(request.headers))


@pytest.mark.parametrize("fault", [Status(401, {}, SECRET.encode()), Status(500)])
def test_shown_nowhere(server, fault, caplog):
    caplog.set_level(logging.DEBUG)
    there = open_collection(f"{server.url}/p.h5ad", storage_options=with_headers())
    dataset = CellDataset(there, BlockShuffling(4), batch_size=64, as_torch=False)
    next(iter(dataset))
    shown = [f"{each!r} {each}" for each in (there, dataset, there.sources, there.locations)]
    shown.append(repr(pickle.dumps(dataset.state_dict())))
    server.answer = lambda _: fault
    with pytest.raises(RemoteError) as raised:
        there[[599]]
    trace: BaseException | None = raised.value
    while trace is not None:
        shown.append(repr(trace) + str(trace))
        trace = trace.__cause__ or trace.__context__
    shown.append(caplog.text)
    assert not [each for each in shown if SECRET in each]


def test_not_in_the_error_of_options(server):
    with pytest.raises(ValueError, match="storage_options") as raised:
        open_collection(f"{server.url}/p.h5ad", storage_options={"token": SECRET})
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("url", ["{0}:{1}@{2}/p.h5ad", "{2}/p.h5ad?signature={1}"])
def test_not_taken_in_a_url(server, url):
    url = "http://" + url.format("user", SECRET, urlsplit(server.url).netloc)
    with pytest.raises(PathError) as raised:
        open_collection(url)
    assert SECRET not in str(raised.value)
    assert not server.requests


@pytest.mark.parametrize(
    "url",
    [
        "az://account/container/p.h5ad?sv=2024&sig={0}",
        "abfs://container/p.h5ad?sig={0}",
        "s3://bucket/p.h5ad?X-Amz-Signature={0}",
        "s3://key:{0}@bucket/p.h5ad",
        "s3a://key:{0}@bucket/p.h5ad",
        "ftp://user:{0}@host/p.h5ad?token={0}",
    ],
)
def test_not_shown_of_a_url_that_is_refused(url):
    with pytest.raises(PathError) as raised:
        open_collection(url.format(SECRET))
    assert SECRET not in str(raised.value)


@pytest.mark.server
def test_refused_by_an_object_store(folder, s3_server):
    url = s3_server.put(folder / "p.h5ad", "credentials/p.h5ad")
    options = s3_server.options | {"secret_access_key": SECRET}
    with pytest.raises(RemoteError, match=r"refuses it.*valid credentials") as raised:
        open_collection(url, storage_options=options)
    assert SECRET not in str(raised.value)
