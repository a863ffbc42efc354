"""The pictures of the notebooks, drawn from tables that were made by hand."""

from io import BytesIO
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.text import Annotation
from notebooks import figures
from notebooks.figures import published_grid, published_macro_f1, published_workers
from notebooks.figures._machines import STRATEGIES


def test_expansions_are_drawn_beside_what_is_exact():
    blocks = pd.DataFrame(
        {
            "block_size": [16, 1],
            "lower_bound": [1.4, 3.6],
            "expected": [1.8, 3.6],
            "replayed": [1.7, 3.5],
            "low": [1.6, 3.4],
            "high": [1.9, 3.7],
            "published": [np.nan, 3.6],
        }
    )
    batches = pd.DataFrame(
        {
            "n_labels": [2, 2, 14, 14],
            "batch_size": [32, 16, 16, 32],
            "expansion": [0.1, 0.2, 0.3, 0.4],
            "exact": [0.01, 0.02, 0.03, 0.04],
        }
    )
    left, right = figures.expansions_figure(blocks, batches, caption="made up").axes
    drawn = [np.asarray(line.get_xydata()).tolist() for line in left.lines]
    assert [[1, 3.6], [16, 1.4]] in drawn
    assert [[1, 3.6], [16, 1.8]] in drawn
    drawn = [np.asarray(line.get_xydata()).tolist() for line in right.lines]
    assert [[16, 0.02], [32, 0.01]] in drawn


class TestLoaders:
    ROWS = pd.DataFrame(
        [
            ("csr", "ours", "cellfeed", 900.0, 800.0, 1_000.0, "", "memory"),
            ("csr", "theirs", "other", 90.0, 80.0, 95.0, "", "memory"),
            ("dense", "broken", "other", np.nan, np.nan, np.nan, "out of memory", None),
            ("limits", "memory", "machine", 2_000.0, 1_900.0, 2_100.0, "", None),
        ],
        columns=[
            "section", "name", "peer", "cells_per_s", "cells_per_s_low", "cells_per_s_high",
            "failed", "limit",
        ],
    )  # fmt: skip

    def test_each_has_its_place_in_its_section(self):
        csr, dense = figures.loaders_figure(self.ROWS, caption="made up").axes
        assert [label.get_text() for label in csr.get_yticklabels()] == ["theirs", "ours"]
        assert [axes.get_title(loc="left") for axes in (csr, dense)] == ["Csr", "Dense"]
        drawn = [np.asarray(line.get_xydata()).tolist() for line in csr.lines]
        assert [[90, 0]] in drawn
        assert [[900, 1]] in drawn
        assert drawn.count([[2_000, 0]]) == drawn.count([[2_000, 1]]) == 1
        assert any("out of memory" in text.get_text() for text in dense.texts)

    def test_without_any_throughput_there_is_no_picture(self):
        failed = self.ROWS[self.ROWS["name"].isin(["broken", "memory"])]
        with pytest.raises(ValueError, match="no loader has a throughput"):
            figures.loaders_figure(failed, caption="made up")


def as_if_here(table, *, times):
    """The published values as of a machine that is faster, measured several times."""
    speed = times * table["cells_per_second"]
    here = table.assign(cells_per_second=speed, low=0.9 * speed, high=1.1 * speed)
    return here.replace({"loader": {"scDataset": "cellfeed"}})


def curves(axes):
    """Points of each curve with its intervals."""
    return [each.lines[0].get_xydata() for each in axes.containers]


@pytest.mark.slow
def test_the_same_height_is_the_same_multiple_on_both_machines():
    published = published_grid()
    figure = figures.streaming_figure(
        published, as_if_here(published, times=50), caption="a $ in a caption"
    )
    figure.savefig(BytesIO())
    left, right = figure.axes
    assert np.array(right.get_ylim()) == pytest.approx(50 * np.array(left.get_ylim()))
    for one, other in zip(curves(left), curves(right), strict=True):
        assert other == pytest.approx(one * [1, 50])
    for axes in (left, right):
        (multiples,) = axes.child_axes
        assert multiples.get_ylim() == pytest.approx(left.child_axes[0].get_ylim())


def test_each_machine_fills_its_panel():
    published = published_grid()
    here = as_if_here(published.query("fetch_factor <= 16 or loader == 'AnnLoader'"), times=50)
    for axes in figures.throughput_figure(published, here, caption="").axes:
        speeds = np.concatenate([each[:, 1] for each in curves(axes)])
        low, high = np.log(axes.get_ylim())
        assert np.log(speeds.max()) - low > 0.9 * (high - low)


def test_a_storage_has_its_grid_and_the_levels_of_others():
    table = published_grid().query("strategy != 'BlockWeightedSampling'")
    table = table.assign(low=table["cells_per_second"], high=table["cells_per_second"])
    table = table.replace({"loader": {"AnnLoader": "DataLoader", "scDataset": "cellfeed"}})
    native = pd.Series(
        {"loader": "cellfeed", "text": "plates", "cells_per_second": 9.0, "low": 8.0, "high": 10.0}
    )
    figure = figures.storage_figure(table, storage="arrow", native=native, caption="a $ in it")
    figure.savefig(BytesIO())
    (axes,) = figure.axes
    assert [len(each) for each in curves(axes)] == [6] * 7
    levels = {text.get_text(): text.xy[1] for text in axes.texts if isinstance(text, Annotation)}
    assert levels == {
        "DataLoader, random access": 19.76, "DataLoader, streaming": 344.75, "plates": 9.0
    }  # fmt: skip
    (multiples,) = axes.child_axes
    assert multiples.get_ylim() == pytest.approx(np.array(axes.get_ylim()) / 19.76)


def test_throughput_has_a_curve_for_each_block_size_and_one_for_streaming():
    published = published_grid()
    figure = figures.throughput_figure(published, as_if_here(published, times=2), caption="")
    left, _ = figure.axes
    *blocks, streaming = curves(left)
    assert len(blocks) == 6
    assert blocks[0][0] == pytest.approx([1, 19.70])
    assert blocks[-1][-1] == pytest.approx([1024, 4032.93])
    assert streaming[-1] == pytest.approx([1024, 5262.69])
    levels = {text.get_text(): text.xy[1] for text in left.texts if isinstance(text, Annotation)}
    assert levels == {"AnnLoader, random access": 19.76, "AnnLoader, streaming": 344.75}


@pytest.mark.slow
def test_workers_are_drawn_over_the_memory_of_all_buffers():
    alone = published_grid().assign(num_workers=0)
    published = pd.concat([alone, published_workers()]).query(
        "strategy == 'BlockShuffling' and 4 <= block_size <= 256"
    )
    sizes = dict.fromkeys(["block_size", "fetch_factor", "num_workers"], int)
    published = published.astype(sizes)
    here = as_if_here(published.query("num_workers <= 8"), times=2)
    figure = figures.workers_figure(published, here, caption="")
    figure.savefig(BytesIO())
    above, below = figure.axes[:4], figure.axes[4:]
    assert [len(curves(axes)) for axes in above] == [5] * 4
    assert [len(curves(axes)) for axes in below] == [3] * 4
    single, four, *_ = curves(above[1])
    assert single[1] == pytest.approx([4, 106.83])
    assert four[0] == pytest.approx([16, 417.20])


def _heights(line):
    return np.asarray(line.get_ydata())


def test_macro_f1_stands_beside_the_published_one_in_the_colour_of_its_strategy():
    published = published_macro_f1()
    ours = pd.concat(
        published[["task", "strategy"]].assign(seed=seed, macro_f1=0.1 * (1 + seed))
        for seed in (0, 1)
    )
    figure = figures.macro_f1_figure(ours, published, caption="made by hand")
    figure.savefig(BytesIO())
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(published["task"].unique())
    for axes, (_, part) in zip(figure.axes, published.groupby("task", sort=False), strict=True):
        patches: Any = axes.patches
        of_paper, of_ours = patches[:4], patches[4:]
        heights = dict(zip(STRATEGIES, (bar.get_height() for bar in of_paper), strict=True))
        assert heights == dict(zip(part["strategy"], part["macro_f1"], strict=True))
        assert [bar.get_height() for bar in of_ours] == pytest.approx([0.15] * 4)
        for bars in (of_paper, of_ours):
            colours = [to_hex(bar.get_facecolor()) for bar in bars]
            assert colours == list(STRATEGIES.values())
        seeds = [each for each in map(_heights, axes.lines) if len(each) == 2]
        assert np.array(seeds) == pytest.approx(np.array([[0.1, 0.2]] * 4))


def test_what_entropy_is_worth_is_drawn_with_its_intervals():
    rows = [
        ("drug", score, block_size, deficit, -deficit, -2 * deficit, 0.0)
        for score in ("macro_f1", "loss")
        for block_size, deficit in ((1, 0.0), (16, 0.01), (16, 0.3), (256, 1.0))
    ]
    columns = ["task", "score", "block_size", "deficit", "value", "low", "high"]
    figure = figures.entropy_worth_figure(
        pd.DataFrame(rows, columns=columns), entropy_floor=0.95, caption="made by hand"
    )
    figure.savefig(BytesIO())
    above, below = figure.axes
    assert above.get_title(loc="left") == "drug"
    for axes in (above, below):
        points = {
            tuple(place): (*segment[:, 1],)
            for container in axes.containers
            if isinstance(container, ErrorbarContainer)
            for place, segment in zip(
                np.asarray(container.lines[0].get_xydata()).tolist(),
                container.lines[2][0].get_segments(),
                strict=True,
            )
        }
        assert points == {
            (deficit, value): (low, high) for *_, deficit, value, low, high in rows[:4]
        }
