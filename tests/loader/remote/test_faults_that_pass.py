"""What goes wrong once is asked for again, and the rows are right."""

import pytest
from tests.loader.remote.faulty import KINDS, WAYS, quick, read
from tests.servers.faults import Close, ContentRange, Hang, Reset, Short, Status

FAULTS = {
    "408": Status(408),
    "429": Status(429, {"Retry-After": "1"}),
    "500": Status(500),
    "503": Status(503, {"Retry-After": "1"}),
    "reset": Reset(),
    "reset in the middle": Reset(7),
    "closed": Close(),
    "cut": Short(7),
}
RANGED = {
    "short": Short(7, announced=True),
    "no Content-Range": ContentRange(None),
    "senseless Content-Range": ContentRange("bytes and more"),
}


def first_fails(fault, *, gets_only=False):
    def answer(request):
        if gets_only and request.method != "GET":
            return None
        return fault if request.asked == 1 else None

    return answer


def most_asked(server):
    return max(request.asked for request in server.requests)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_asked_again(server, kind, way, fault):
    read(server, kind, way, first_fails(fault), quick())
    assert most_asked(server) >= 2


@pytest.mark.parametrize("fault", RANGED.values(), ids=RANGED)
@pytest.mark.parametrize("way", ["rows", "iteration"])
def test_ranges_asked_again(server, way, fault):
    read(server, "p.h5ad", way, first_fails(fault, gets_only=True), quick())
    assert most_asked(server) >= 2


@pytest.mark.parametrize("after", [None, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_asked_again_where_nothing_comes(server, kind, after):
    read(server, kind, "rows", first_fails(Hang(after)), quick(20, seconds=1.0))
    assert most_asked(server) >= 2


@pytest.mark.parametrize("n_retries", [0, 1, 3])
def test_as_often_as_the_user_says(server, n_retries):
    with pytest.raises(OSError, match="500 Internal Server Error"):
        read(server, "p.h5ad", "opening", lambda _: Status(500), quick(n_retries))
    assert len(server.requests) == 1 + n_retries
