import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp

from cellfeed import FormatError, open_collection
from cellfeed._progress import ProgressLine


class Terminal(io.StringIO):
    """Where stderr goes, and what a person sees there."""

    def __init__(self, *, is_terminal=True):
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self):
        return self._is_terminal

    def seen(self):
        return self.getvalue().rpartition("\r\x1b[K")[2]


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


def test_progress_is_shown_after_two_seconds_and_wiped_at_the_end(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)  # not in a fixture, after which pytest sets it
    with ProgressLine(lambda: clock.now) as line:
        clock.now += 1
        line.show("1 of 3")
        assert terminal.getvalue() == ""
        clock.now += 1
        for text in ("1 of 3", "2 of 3"):
            line.show(text)
            assert terminal.seen() == text
    assert terminal.seen() == ""


def test_how_much_is_done_and_how_long_the_rest_takes(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with ProgressLine(lambda: clock.now) as line:
        for seconds, done, expected in (
            (10.0, 0, "Cells: 0 of 9,000 (0%)"),
            (20.0, 3_000, "Cells: 3,000 of 9,000 (33%, 1 min left)"),
            (0.05, 4_000, "Cells: 3,000 of 9,000 (33%, 1 min left)"),  # too soon
            (29.95, 4_500, "Cells: 4,500 of 9,000 (50%, 1 min left)"),
            (0.0, 9_000, "Cells: 9,000 of 9,000 (100%, 0 s left)"),
        ):
            clock.now += seconds
            line.show_share("Cells", done, 9_000)
            assert terminal.seen() == expected


@pytest.mark.parametrize("stderr", [Terminal(is_terminal=False), None], ids=["a file", "closed"])
def test_progress_is_shown_to_people_only(monkeypatch, clock, stderr):
    monkeypatch.setattr(sys, "stderr", stderr)
    with ProgressLine(lambda: clock.now) as line:
        clock.now += 3
        line.show("1 of 3")
    assert stderr is None or stderr.getvalue() == ""


@pytest.mark.parametrize("at", [0, 1, 11])
def test_damaged_row_pointers_show_when_tables_are_loaded(write_h5ad, replace, at):
    def damage(file):
        pointer = file["X/indptr"][:]
        pointer[2] = pointer[3] + 1
        replace(file, "X/indptr", pointer)

    matrix = sp.csr_matrix(np.eye(5, dtype=np.float32))
    paths = [write_h5ad(matrix, edit=damage if k == at else None) for k in range(12)]
    collection = open_collection(paths)
    with pytest.raises(FormatError, match=rf"{paths[at].name}.*row pointers do not ascend"):
        collection.load_tables()


def test_a_file_that_changed_is_noticed_when_tables_are_loaded(write_h5ad):
    path = write_h5ad(sp.csr_matrix(np.eye(5, dtype=np.float32)))
    collection = open_collection(path)
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(FormatError, match="was replaced or written to"):
        collection.load_tables()
