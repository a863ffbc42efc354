"""Ranks find each other, receive the same message, and do not wait for a dead one."""

import re
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import repeat

import pytest
from tests.warm import python as warm
from torch import distributed
from torch.distributed import HashStore

from cellfeed import ParameterError
from cellfeed_tuner import Ranks, _together
from cellfeed_tuner._measuring._process import MeasuringError
from cellfeed_tuner._ranks import World
from cellfeed_tuner._together import message_from_first, message_to_all

PORT = 29_871
VARIABLES = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{PORT}",
}  # fmt: skip


def world(rank, world_size=3):
    return World(
        rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size,
        host="localhost", port=PORT,
    )  # fmt: skip


@contextmanager
def others(*worlds, seconds=300.0, **settings):
    """What other ranks receive, in threads."""
    with ThreadPoolExecutor(len(worlds)) as pool:
        yield [
            pool.submit(
                message_from_first, each, join_seconds=seconds, limit_seconds=seconds, **settings
            )
            for each in worlds
        ]


class EndingStore(distributed.PrefixStore):
    """A store that can be lost, as with the process that it is in."""

    has_ended = False

    def check(self, keys):
        if EndingStore.has_ended:
            raise distributed.DistError("lost")
        return super().check(keys)

    def get(self, key):
        if EndingStore.has_ended:
            raise distributed.DistError("lost")
        return super().get(key)


def failing():
    raise ParameterError("no such label")


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
    @pytest.fixture(autouse=True)
    def store(self, monkeypatch):
        """What all ranks share, here in one process."""
        store = HashStore()
        monkeypatch.setattr(_together, "_store", lambda _: store)
        monkeypatch.setattr(_together, "_numbers", repeat(0))
        monkeypatch.setattr(_together, "ANSWER_SECONDS", 0.5)
        return store

    def test_all_receive_the_same(self):
        with others(world(1), world(2)) as received:
            assert message_to_all(world(0), lambda: {"result": [1]}) == {"result": [1]}
            assert [each.result() for each in received] == [{"result": [1]}] * 2

    @pytest.mark.parametrize("fails", [False, True])
    def test_the_first_may_end_immediately_afterwards(self, monkeypatch, fails):
        """Its store ends with it; nothing is lost."""
        monkeypatch.setattr(distributed, "PrefixStore", EndingStore)
        monkeypatch.setattr(EndingStore, "has_ended", False)
        with others(world(1), world(2)) as received:
            with pytest.raises(ParameterError) if fails else nullcontext():
                message_to_all(world(0), failing if fails else dict)
            EndingStore.has_ended = True
            assert [each.result().get("error") for each in received] == [
                "ParameterError" if fails else None
            ] * 2

    def test_a_missing_rank_is_named_to_all(self):
        with others(world(1)) as received:
            with pytest.raises(MeasuringError, match=r"rank 2 of 3 did not call `autotune` wi"):
                message_to_all(world(0), dict, join_seconds=0.5)
            assert received[0].result()["error"] == "MeasuringError"
            assert received[0].result()["message"].startswith("rank 2 of 3 did not call")

    def test_an_error_of_the_first_is_one_of_all(self):
        with others(world(1), world(2)) as received:
            with pytest.raises(ParameterError, match="no such label"):
                message_to_all(world(0), failing)
            for each in received:
                assert each.result() == {"error": "ParameterError", "message": "no such label"}

    def test_nobody_waits_for_a_first_one_that_does_not_come(self):
        with pytest.raises(MeasuringError, match=r"rank 0 did not call `autotune` within 0\.2 s"):
            message_from_first(world(1), join_seconds=0.2, limit_seconds=1.0)

    def test_nobody_waits_for_a_first_one_that_sends_nothing(self):
        waited = threading.Event()

        def measured():
            waited.wait(300.0)
            return {}

        with ThreadPoolExecutor(1) as pool, others(world(1, 2), seconds=0.5) as received:
            first = pool.submit(message_to_all, world(0, 2), measured)
            with pytest.raises(MeasuringError, match="rank 0, which measures for all, sent noth"):
                received[0].result()
            waited.set()
            with pytest.raises(MeasuringError, match="rank 1 ended while rank 0 measured for all"):
                first.result()

    @pytest.mark.parametrize(
        ("other", "digest", "said"),
        [
            ((1, 3), "", "rank 1 has WORLD_SIZE=3, but rank 0 has 2"),
            ((1, 2), "donor", "rank 1 called `autotune` with another coll"),
        ],
    )
    def test_what_does_not_go_together_is_refused_by_all(self, other, digest, said):
        with others(world(*other)) as received:
            with pytest.raises(ParameterError, match=said):
                message_to_all(world(0, 2), dict, digest=digest)
            assert received[0].result()["error"] == "ParameterError"
            assert re.match(said, received[0].result()["message"])

    def test_two_with_one_rank_are_refused(self, store):
        with others(world(1, 2), world(1, 2)) as received:
            message_to_all(world(0, 2), dict)
            errors = [each.exception() for each in received]
        (error,) = filter(None, errors)
        assert "two processes have RANK=1" in str(error)
        with pytest.raises(ParameterError, match="two processes have RANK=0"):
            message_to_all(world(0, 2), dict)


@pytest.mark.process
def test_an_address_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        script = (
            "from cellfeed_tuner._ranks import World\n"
            "from cellfeed_tuner._together import message_to_all\n"
            "message_to_all(World(rank=0, world_size=2, local_rank=0, local_world_size=2, "
            f"host='127.0.0.1', port={taken.getsockname()[1]}), dict)"
        )
        ran = warm.run([sys.executable, "-c", script])
    assert "a free MASTER_PORT" in ran.stderr.splitlines()[-1]
