"""Ranks find each other, receive the same message, and do not wait for a dead one."""

import errno
import os
import re
import signal
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from torch import distributed

from cellfeed import ParameterError
from cellfeed_tuner import Ranks, _together
from cellfeed_tuner._measuring._process import MeasuringError
from cellfeed_tuner._ranks import World
from cellfeed_tuner._together import Meeting, message_from_first

PORT = 29_871
HOSTS = ["127.0.0.1", "localhost", *(["::1"] if socket.has_dualstack_ipv6() else [])]
VARIABLES = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{PORT}",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """Where they meet; the path of a socket must be short."""
    with tempfile.TemporaryDirectory(prefix="ranks", dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        yield Path(name)


def world(rank, world_size=3, **changes):
    local = {"local_rank": rank, "local_world_size": world_size} | changes
    return World(rank=rank, world_size=world_size, host="localhost", port=PORT, **local)


@contextmanager
def others(*worlds, seconds=300.0, function=message_from_first, **settings):
    """What other ranks receive, in threads."""
    with ThreadPoolExecutor(len(worlds)) as pool:
        yield [
            pool.submit(function, each, join_seconds=seconds, limit_seconds=seconds, **settings)
            for each in worlds
        ]


class Store(dict[str, str]):
    """What ranks of several machines share, here in one process."""

    set = dict.__setitem__

    def check(self, keys):
        return all(key in self for key in keys)


class TestWorld:
    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch):
        for name, value in VARIABLES.items():
            monkeypatch.setenv(name, value)
        return monkeypatch

    def test_is_what_torchrun_says(self):
        found = World.here()
        assert found == World(
            rank=1, world_size=4, local_rank=1, local_world_size=4, host="127.0.0.1", port=PORT
        )
        assert Ranks.of(None) == Ranks(n_local=4, n_total=4)

    @pytest.mark.parametrize("size", [None, "1"])
    def test_of_one_process_is_none(self, environment, size):
        environment.delenv("WORLD_SIZE")
        if size:
            environment.setenv("WORLD_SIZE", size)
        assert World.here() is None
        assert Ranks.of(None) == Ranks()

    def test_what_is_asked_for_comes_first(self):
        assert Ranks.of(2) == Ranks(n_local=2, n_total=2)
        with pytest.raises(ParameterError, match="`ranks >= 1` must hold, but got ranks=0"):
            Ranks.of(0)

    @pytest.mark.parametrize(
        ("name", "value", "said"),
        [
            *((n, "", f"WORLD_SIZE=4, but {n} is not set; start") for n in [*VARIABLES][2:]),
            ("RANK", None, "WORLD_SIZE=4, but RANK is not set; start"),
            ("WORLD_SIZE", "four", "^WORLD_SIZE='four' is not a valid number"),
            ("WORLD_SIZE", "0", "^WORLD_SIZE='0' is not a valid number"),
            ("RANK", "-1", "^RANK='-1' is not a valid number"),
            ("MASTER_PORT", "1e3", "^MASTER_PORT='1e3' is not a valid number"),
            ("RANK", "4", "RANK=4.* contradict each other"),
            ("LOCAL_RANK", "2", "LOCAL_RANK=2.* contradict each other"),
            ("LOCAL_WORLD_SIZE", "5", "LOCAL_WORLD_SIZE=5.* contradict each other"),
            ("LOCAL_WORLD_SIZE", "1", "LOCAL_WORLD_SIZE=1.* contradict each other"),
        ],
    )
    def test_what_is_missing_or_cannot_be_is_named(self, environment, name, value, said):
        if value is None:
            environment.delenv(name)
        else:
            environment.setenv(name, value)
        with pytest.raises(ParameterError, match=said):
            World.here()

    @pytest.mark.parametrize("value", [None, "", "1"])
    def test_a_group_that_no_variable_knows_of_is_refused(self, environment, value):
        """Each rank would tune for itself."""
        if value is None:
            environment.delenv("WORLD_SIZE")
        else:
            environment.setenv("WORLD_SIZE", value)
        assert World.here() is None
        environment.setattr(distributed, "is_initialized", lambda: True)
        environment.setattr(distributed, "get_world_size", lambda: 4)
        with pytest.raises(ParameterError, match=r"torch\.distributed has 4 ranks, but WORLD_SIZE"):
            World.here()

    @pytest.mark.parametrize(
        ("ranks", "said"),
        [
            (Ranks(), "1 rank"),
            (Ranks(n_local=4, n_total=4), "4 ranks"),
            (Ranks(n_local=4, n_total=8), "4 of 8 ranks"),
        ],
    )
    def test_in_words(self, ranks, said):
        assert str(ranks) == said


class TestMeeting:
    def test_all_receive_the_same_and_meet_again(self, folder):
        for number in range(2):
            with others(world(1), world(2)) as received:
                with Meeting(world(0), join_seconds=300.0) as meeting:
                    meeting.check()
                    assert not list(folder.rglob("*.socket"))  # nobody comes later
                    meeting.send({"result": [number]})
                assert [each.result() for each in received] == [{"result": [number]}] * 2

    def test_what_a_killed_one_left_is_no_obstacle(self):
        path = _together._socket_path(world(0))
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
        with others(world(1, 2)) as received:
            with Meeting(world(0, 2), join_seconds=300.0) as meeting:
                meeting.send({})
            assert received[0].result() == {}

    @pytest.mark.process
    def test_what_another_training_left_is_removed_and_what_one_waits_at_is_not(self, folder):
        killed, waiting = (replace(world(0, 2), port=PORT + n) for n in (1, 2))
        pid = os.fork()
        if pid == 0:
            try:
                Meeting(killed, join_seconds=300.0).__enter__()
            finally:
                os._exit(0)
        path = _together._socket_path(killed)
        while not path.exists():
            assert os.waitpid(pid, os.WNOHANG) == (0, 0)
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with _together._listening(waiting), others(world(1, 2)) as received:
            with Meeting(world(0, 2), join_seconds=300.0) as meeting:
                left = [each.name for each in folder.rglob("*") if each.is_socket()]
                assert left == [_together._socket_path(waiting).name]
                meeting.send({})
            assert received[0].result() == {}
        assert not any(each.is_socket() for each in folder.rglob("*"))

    @pytest.mark.parametrize("host", HOSTS)
    def test_ranks_of_several_machines_meet_wherever_the_address_leads(self, monkeypatch, host):
        store = Store()
        monkeypatch.setattr(_together, "_store", lambda _: store)
        alone = {"local_rank": 0, "local_world_size": 1}
        first, other = (replace(world(rank, 2, **alone), host=host) for rank in (0, 1))
        with others(other) as received:
            with Meeting(first, join_seconds=300.0) as meeting:
                meeting.send({"result": 1})
            assert received[0].result() == {"result": 1}

    def test_where_a_protocol_is_switched_off_the_other_is_used(self, monkeypatch):
        def switched_off(address, *, family=socket.AF_INET, **_):
            if family == socket.AF_INET6:
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
            return create_server(address)

        create_server = socket.create_server
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: True)
        monkeypatch.setattr(socket, "create_server", switched_off)
        with _together._open_port() as port:
            assert port.family == socket.AF_INET

    def test_a_first_one_that_ends_before_it_is_greeted_is_reported(self):
        with others(world(1, 2)) as received:
            with _together._listening(world(0, 2)) as (listener, _):
                listener.settimeout(300.0)
                accepted, _ = listener.accept()
                accepted.close()
            with pytest.raises(MeasuringError, match="rank 0 ended while it measured for all"):
                received[0].result()

    def test_a_missing_rank_is_named_to_all(self):
        with others(world(1)) as received:
            with pytest.raises(MeasuringError, match=r"rank 2 of 3 did not call `autotune` wi"):
                Meeting(world(0), join_seconds=1.0).__enter__()
            assert received[0].result()["error"] == "MeasuringError"
            assert received[0].result()["message"].startswith("rank 2 of 3 did not call")

    def test_nobody_waits_for_a_first_one_that_does_not_come(self):
        with pytest.raises(MeasuringError, match=r"rank 0 did not call `autotune` within 0\.2 s"):
            message_from_first(world(1), join_seconds=0.2, limit_seconds=1.0)

    def test_nobody_waits_for_a_first_one_that_sends_nothing(self):
        waiting = threading.Event()
        with others(world(1, 2), seconds=2.0) as received, Meeting(world(0, 2)) as meeting:
            with pytest.raises(MeasuringError, match="rank 0, which measures for all, sent noth"):
                received[0].result()
            waiting.set()
            meeting.send({})  # to nobody

    def test_a_first_one_that_ends_is_reported(self):
        with others(world(1, 2)) as received:
            Meeting(world(0, 2), join_seconds=300.0).__enter__().close()
            with pytest.raises(MeasuringError, match="rank 0 ended while it measured for all"):
                received[0].result()

    @pytest.mark.process
    def test_one_that_is_killed_is_reported(self):
        pid = os.fork()
        if pid == 0:
            try:
                message_from_first(world(1, 2), join_seconds=300.0, limit_seconds=300.0)
            finally:
                os._exit(0)
        with Meeting(world(0, 2), join_seconds=300.0) as meeting:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            with pytest.raises(MeasuringError, match="rank 1 ended while rank 0 measured for all"):
                meeting.check()

    @pytest.mark.parametrize(
        ("n", "others_are", "digest", "said"),
        [
            (2, [(1, 3)], "", "rank 1 has WORLD_SIZE=3, but rank 0 has 2"),
            (3, [(1, 3), (1, 3)], "", "two processes have RANK=1"),
            (2, [(1, 2)], "donor", "rank 1 called `autotune` with another coll"),
        ],
    )
    def test_what_does_not_go_together_is_refused_by_all(self, n, others_are, digest, said):
        with others(*(world(*each) for each in others_are)) as received:
            with pytest.raises(ParameterError, match=said):
                Meeting(world(0, n), digest=digest, join_seconds=300.0).__enter__()
            for each in received:
                assert each.result()["error"] == "ParameterError"
                assert re.match(said, each.result()["message"])

    def test_two_first_ones_are_refused(self):
        with (
            _together._listening(world(0)),
            pytest.raises(ParameterError, match="two processes have RANK=0"),
        ):
            Meeting(world(0), join_seconds=1.0).__enter__()

    @pytest.mark.parametrize(
        "said", [b"\0\0\0\2{}", b"\0", b"\0\0\3\xe3" + b"[" * 995], ids=["no rank", "part", "deep"]
    )
    def test_a_stranger_is_no_rank(self, monkeypatch, said):
        monkeypatch.setattr(_together, "_HELLO_SECONDS", 1)
        path = _together._socket_path(world(0))

        def stranger(*_, **__):
            while True:
                with socket.socket(socket.AF_UNIX) as came:
                    try:
                        came.connect(str(path))
                    except OSError:
                        continue
                    came.sendall(said)
                    return message_from_first(world(1, 2), join_seconds=300.0, limit_seconds=300.0)

        with others(world(1, 2), function=stranger) as received:
            with Meeting(world(0, 2), join_seconds=300.0) as meeting:
                meeting.send({"result": 1})
            assert received[0].result() == {"result": 1}

    def test_a_folder_of_others_is_not_used(self, folder):
        (folder / f"cellfeed-{os.getuid()}").mkdir(mode=0o777)
        (folder / f"cellfeed-{os.getuid()}").chmod(0o777)
        with pytest.raises(ParameterError, match="others may write to it; remove it"):
            Meeting(world(0), join_seconds=1.0).__enter__()

    def test_ranks_of_several_machines_need_a_store(self, monkeypatch):
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(ParameterError, match="1 of 2 ranks are on this machine, and torch"):
            Meeting(world(0, 2, local_world_size=1), join_seconds=1.0).__enter__()
