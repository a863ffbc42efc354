"""``autotune`` in a notebook, and how its result shows itself there."""

from dataclasses import replace
from html.parser import HTMLParser

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from tests.tuner.reports import html_summary
from tests.warm import python as warm

from cellfeed import BlockShuffling, CellDataset, FormatError

MOST_CHARACTERS = 3_000


COUNT = "with open({ran!r}, 'a') as file: file.write('once ')"
TUNE = """
from cellfeed import CellDataset, open_collection
from cellfeed_tuner import autotune

collection = open_collection({folder!r}, obs=["plate"])
result = autotune(
    collection, label="plate", block_sizes=[4], fetch_factors=[8], workers=[0, 1],
    entropy_floor=0.5, budget=600,
)
result
"""
TRAIN = """
dataset = CellDataset.from_autotune(collection, result, seed=0)
print(sum(len(minibatch) for minibatch in dataset.loader()))
"""


def test_a_notebook_tunes_once_and_trains(small_collection, tmp_path, monkeypatch):
    """The measuring process runs no cell again, though cells have no main guard."""
    monkeypatch.setattr("jupyter_client.launcher.Popen", warm.Popen)
    monkeypatch.setenv(warm.SHORT_REPLICATES, "1")
    ran = tmp_path / "ran"
    sources = COUNT.format(ran=str(ran)), TUNE.format(folder=str(small_collection)), TRAIN
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, sources)))
    NotebookClient(notebook, timeout=300).execute()
    assert ran.read_text() == "once "
    (shown,) = notebook.cells[1].outputs  # nothing on stdout or stderr beside it
    assert "Recommended: block size 4, fetch factor 8" in shown.data["text/html"]
    assert shown.data["text/plain"].startswith("<AutotuneResult: block size 4, fetch factor 8, ")
    (printed,) = notebook.cells[2].outputs
    assert printed.text == "4500\n"


class _Text(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags, self.text = set[str](), ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        assert not attrs  # neither styles nor anything that is loaded
        self.tags.add(tag)

    def handle_data(self, data):
        self.text += data


def test_every_result_shows_itself_shortly(any_result):
    shown = _Text(html_summary(any_result))
    assert shown.tags <= {"div", "p", "span", "strong", "table", "tr", "th", "td", "pre"}
    assert len(shown.text) < MOST_CHARACTERS
    chosen = any_result.recommended
    wrong = any_result.loader_fault is not None
    nothing = "THE LOADER DELIVERS WRONG DATA" if wrong else "No configuration is feasible"
    assert (str(chosen.configuration) if chosen else nothing) in shown.text
    assert len(repr(any_result)) < 120
    assert "\n" not in repr(any_result)


def test_the_figure_and_the_reason_are_there(result_of):
    result = result_of("recommended")
    text = _Text(html_summary(result)).text
    assert (
        "throughput, measured in turns with its 2 closest rivals8,800 [8,500, 9,100] cells/s"
        in text
    )
    assert "3.456 bits, 96.0% of random sampling" in text
    assert result.recommended.reason in text
    assert repr(result) == (
        "<AutotuneResult: block size 64, fetch factor 64, 0 workers; 8,800 [8,500, 9,100] cells/s>"
    )


def test_a_figure_from_few_rounds_is_marked(result_of):
    result = result_of("few rounds")
    assert repr(result).endswith("cells/s, from only 5 rounds>")
    assert (
        "throughput, from only 5 rounds, not compared with others"
        in _Text(html_summary(result)).text
    )


def test_a_wrong_loader_is_named(result_of):
    assert "THE LOADER DELIVERS WRONG DATA" in _Text(html_summary(result_of("wrong loader"))).text


def test_what_comes_from_the_user_is_escaped(result_of):
    evil = "<script>alert('1')</script>"
    result = result_of("recommended")
    result = replace(result, dataset=replace(result.dataset, label=evil))
    shown = _Text(html_summary(result))
    assert "script" not in shown.tags
    assert evil in shown.text


def test_a_result_makes_the_dataset_that_it_recommends(result_of):
    rows = np.arange(10_000)
    with pytest.warns(UserWarning, match="the result: was measured with n_cells=28000, but it is "):
        dataset = CellDataset.from_autotune(rows, result_of("recommended"), seed=3)
    by_hand = CellDataset(rows, BlockShuffling(64), 64, 64, seed=3)
    assert [batch.tolist() for batch in dataset] == [batch.tolist() for batch in by_hand]


def test_a_result_without_a_recommendation_makes_none(result_of):
    with pytest.raises(FormatError, match="the result: recommends nothing"):
        CellDataset.from_autotune(range(10_000), result_of("nothing feasible"))
