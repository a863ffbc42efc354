"""The S3 server of the tests gives bytes to those who have its credentials, and to nobody else."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from obstore import get_range, head
from obstore import list as list_of
from obstore.exceptions import BaseError
from obstore.store import S3Store
from tests.servers.proxy import DelayingProxy

CONTENT = np.random.default_rng(16).bytes(12_000_000)


@pytest.fixture(scope="module")
def key(s3_server, tmp_path_factory):
    path = tmp_path_factory.mktemp("s3") / "file.bin"
    path.write_bytes(CONTENT)
    key = "test_s3/a b/file.bin"
    assert s3_server.put(path, key) == f"s3://{s3_server.bucket}/{key}"
    return key


def test_ranges_head_and_list(s3_server, key):
    store = S3Store(s3_server.bucket, **s3_server.options)
    assert bytes(get_range(store, key, start=5, end=11_000_000)) == CONTENT[5:11_000_000]
    found = head(store, key)
    assert (found["size"], bool(found["e_tag"])) == (len(CONTENT), True)
    assert [entry["path"] for batch in list_of(store, "test_s3") for entry in batch] == [key]


def test_signed_requests_pass_the_proxy(s3_server, key):
    with DelayingProxy(s3_server.url, 0.01) as proxy:
        store = S3Store(s3_server.bucket, **s3_server.options | {"endpoint": proxy.url})
        assert bytes(get_range(store, key, start=5, end=500_000)) == CONTENT[5:500_000]


@pytest.mark.parametrize(
    "wrong",
    [{"secret_access_key": "other"}, {"access_key_id": "nobody"}, {"skip_signature": True}],
    ids=["secret", "name", "unsigned"],
)
def test_nobody_else_reads(s3_server, key, wrong):
    store = S3Store(s3_server.bucket, **s3_server.options | wrong)
    with pytest.raises(BaseError, match=r"403|Forbidden|denied"):
        get_range(store, key, start=0, end=5)


KILLED = """
import os, sys
from pathlib import Path
from tests.servers.s3 import S3Server
server = S3Server(Path(sys.argv[1])).__enter__()
print(server.url, flush=True)
os._exit(0)
"""


def test_server_ends_with_tests_that_are_killed(s3_server, tmp_path):
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path],
        env=os.environ | {"PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    place = ("127.0.0.1", urlsplit(done.stdout.strip()).port)
    end = time.monotonic() + 300
    while True:
        with socket.socket() as client:
            if client.connect_ex(place):
                return
        assert time.monotonic() < end
        time.sleep(0.01)
