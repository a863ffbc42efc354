"""An epoch that is timed begins when all of the one before it has ended."""

import threading
import time

import pytest
from tests.tuner.other_loaders import Opened

from cellfeed import BlockShuffling, CellDataset, open_collection
from cellfeed.fetch import Reader
from cellfeed_tuner import Configuration
from cellfeed_tuner._measuring._timing import Round, TimingRequest

BATCH_SIZE = 32
# An epoch has one whole fetch, and most of another.
CONFIGURATION = Configuration(block_size=16, fetch_factor=90)
UNDER_WAY = list[list[str]]()
OF_OTHER_TESTS = set[threading.Thread]()


class Watched(CellDataset):
    """Notes what still goes on when an epoch begins."""

    def loader(self, num_workers=None, **options):
        note()
        return super().loader(num_workers, **options)


class WatchedLoader:
    """The same, for a loader of any kind."""

    def __init__(self, dataset):
        self._loader = dataset.loader(0)

    def __len__(self):
        return len(self._loader)

    def __iter__(self):
        note()
        return iter(self._loader)


def note():
    threads = [each.name for each in threading.enumerate() if each not in OF_OTHER_TESTS]
    UNDER_WAY.append([name for name in threads if name.startswith("cellfeed-")])


@pytest.fixture
def slowly_read(small_collection, monkeypatch):
    read_planned = Reader.read_planned

    def slowly(self, planned, **options):
        time.sleep(0.2)
        return read_planned(self, planned, **options)

    monkeypatch.setattr(Reader, "read_planned", slowly)
    UNDER_WAY.clear()
    OF_OTHER_TESTS.update(threading.enumerate())
    return open_collection(small_collection, obs=["plate"])


def dataset_of(collection):
    strategy = BlockShuffling(block_size=CONFIGURATION.block_size)
    return CellDataset(collection, strategy, BATCH_SIZE, CONFIGURATION.fetch_factor, seed=0)


def rounds_of(request, subject):
    events = list[object]()
    request.run(subject, events.append)
    return [each for each in events if isinstance(each, Round)]


def test_cellfeeds_own(slowly_read):
    request = TimingRequest(
        configuration=CONFIGURATION, batch_size=BATCH_SIZE, labels=["plate"], cache="warm", seed=0,
        least_rounds=2, most_rounds=2, seconds=0, make_dataset=Watched,
    )  # fmt: skip
    assert CONFIGURATION.rounds_per_epoch(dataset_of(slowly_read).plan(epoch=0)) == 1
    assert len(rounds_of(request, slowly_read)) == 3
    assert UNDER_WAY == [[], [], []]


def test_a_loader_of_any_kind(slowly_read):
    request = TimingRequest(
        configuration=CONFIGURATION, batch_size=BATCH_SIZE, labels=(), cache="warm", seed=0,
        least_rounds=2, most_rounds=2, seconds=0,
    )  # fmt: skip
    subject = Opened(lambda: WatchedLoader(dataset_of(slowly_read)), batch_size=BATCH_SIZE)
    assert len(rounds_of(request, subject)) > 2
    assert not any(UNDER_WAY)
