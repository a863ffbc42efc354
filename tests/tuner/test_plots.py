"""The pictures, drawn from results that were made by hand; `test_reports` draws all kinds."""

from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.container import ErrorbarContainer
from matplotlib.text import Text

from cellfeed_tuner import Configuration, Estimate, plots
from cellfeed_tuner.plots import NOT_TIMED, block_colours


@pytest.fixture(scope="module")
def recommended(result_of):
    return result_of("recommended")


@pytest.fixture
def trade_off(result_of):
    """The axes of the trade-off of a kind, its Pareto front and the names in its legend."""

    def trade_off(kind="recommended"):
        (axes,) = plots.trade_off_figure(result_of(kind)).axes
        (front,) = (line for line in axes.lines if line.get_label() == "Pareto front")
        legend = axes.get_legend()
        assert legend is not None
        return axes, front, [text.get_text() for text in legend.get_texts()]

    return trade_off


@pytest.mark.parametrize("draw", [plots.autotune_figure, plots.bounds_figure])
def test_a_label_with_dollars_is_no_formula(recommended, draw):
    label = r"a $\nonsense{$ b"
    figure = draw(replace(recommended, dataset=replace(recommended.dataset, label=label)))
    file = BytesIO()
    figure.savefig(file, dpi=20)  # a formula is read only now
    assert file.getvalue().startswith(b"\x89PNG")
    is_named = any(label in text.get_text().replace(r"\$", "$") for text in figure.findobj(Text))
    assert is_named == (draw is plots.autotune_figure)


def test_on_the_front_lies_what_nothing_beats_in_both_respects(trade_off):
    _, front, _ = trade_off()
    places = [[1.0, 1_500.0], [0.97, 3_000.0], [0.96, 8_800.0], [0.2, 12_000.0]]
    assert front.get_xydata() == pytest.approx(np.array(places))
    assert front.get_drawstyle() == "steps-post"
    _, front, _ = trade_off("several labels")  # by the label that is mixed least
    shares = np.asarray(front.get_xydata())[:, 0]
    assert shares == pytest.approx(0.99 * np.array([1.0, 0.97, 0.96, 0.2]))


def test_shares_near_random_sampling_can_be_told_apart(trade_off):
    axes, _, _ = trade_off()
    shares = np.array([0.2, 0.9, 0.98, 0.99, 1.0, 1.01])
    points = np.column_stack([shares, np.full(shares.size, 1_000)])
    scaled = axes.transScale.transform(points)
    assert (np.diff(axes.transLimits.transform(scaled)[:, 0]) > 0.05).all()
    assert axes.transScale.inverted().transform(scaled)[:, 0] == pytest.approx(shares)


def test_the_chosen_point_is_marked_with_the_figure_that_is_published(trade_off):
    axes, _, _ = trade_off()
    chosen = axes.containers[-1]
    assert isinstance(chosen, ErrorbarContainer)
    (marker,) = (line for line in axes.lines if line.get_label() == "recommended")
    assert marker.get_markeredgecolor() == chosen.lines[0].get_markeredgecolor()
    assert np.asarray(chosen.lines[0].get_ydata()).tolist() == [8_800.0]


def test_what_rests_on_few_rounds_is_marked(trade_off, result_of):
    speeds, _ = plots.heat_map_figure(result_of("few rounds")).axes
    assert {"9.0k*\n0 workers", "3.0k\n1 worker"} <= {text.get_text() for text in speeds.texts}
    assert "; * few rounds" in speeds.get_title(loc="left")
    axes, _, names = trade_off("few rounds")
    hollow = [
        np.asarray(each.lines[0].get_ydata()).item()
        for each in axes.containers
        if isinstance(each, ErrorbarContainer)
        and str(each.lines[0].get_markerfacecolor()) == "white"
    ]
    assert sorted(hollow) == [8_000.0, 9_000.0]
    assert "few rounds" in names
    assert "few rounds" not in trade_off()[2]


def test_squares_of_the_grid(recommended):
    speeds, entropies = plots.heat_map_figure(recommended).axes
    # What mixes too little is hatched.
    below = [each for each in recommended.configurations if each.status == "below entropy floor"]
    places = {(each.configuration.block_size, each.configuration.fetch_factor) for each in below}
    assert sum(patch.get_hatch() is not None for patch in speeds.patches) == len(places) > 0
    assert speeds.get_title(loc="left").endswith("; hatched: mixes too little")
    assert not any(patch.get_hatch() for patch in entropies.patches)
    # What has no throughput says why in its place, or what is predicted.
    texts = [text.get_text() for text in speeds.texts]
    assert {"3.0k\n1 worker", "too few\ncells"} <= set(texts)
    assert "; ~ predicted" in speeds.get_title(loc="left")
    (predicted,) = (text for text in texts if text.startswith("~"))
    assert predicted.endswith("k")
    greys = [patch.get_facecolor() == to_rgba(NOT_TIMED) for patch in entropies.patches[:-1]]
    shares = [text.get_text() for text in entropies.texts]
    assert [float(share[:-1]) < 95 for share in shares] == greys
    # Black text can be read on every square; what is recommended has a frame.
    for axes in (speeds, entropies):
        grounds = [
            to_rgba(patch.get_facecolor()) for patch in axes.patches[:-1] if patch.get_fill()
        ]
        assert min(sum(ground[:3]) for ground in grounds) > 1.5
        assert {text.get_color() for text in axes.texts} <= {"black", plots.BOUND}
        bold = [text for text in axes.texts if text.get_fontweight() == "bold"]
        assert len(bold) == 1


def test_a_place_shows_the_best_of_all_other_settings(recommended):
    """Of what differs in workers or in alignment, the fastest, and what is best mixed."""
    aligned = tuple(
        replace(
            each,
            configuration=each.configuration.changed(align="chunks"),
            entropy_bits=replace(each.entropy_bits, expected=Estimate(0.5, 0.5, 0.5)),
            cells_per_second=each.cells_per_second and Estimate(1.0, 0.9, 1.1),
        )
        for each in recommended.configurations
    )
    both = replace(recommended, configurations=(*recommended.configurations, *aligned))
    one, other = (
        [
            text.get_text()
            for axes in plots.heat_map_figure(result).axes
            for text in axes.texts
            if not text.get_text().startswith("~")  # predicted from all that was measured
        ]
        for result in (recommended, both)
    )
    assert one == other


def test_verdicts_are_told_apart(result_of):
    figure = plots.bounds_figure(result_of("wrong loader"))
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    kinds = ("inside", "outside", "assumptions", "loader")
    assert names[-4:] == [f"measured, verdict: {kind}" for kind in kinds]


def test_many_block_sizes_take_several_rows(recommended):
    one = recommended.configurations[0]
    grid = [
        replace(one, configuration=Configuration(block_size=b, fetch_factor=f))
        for b in range(1, 9)
        for f in (1, 4)
    ]
    figure = plots.bounds_figure(replace(recommended, configurations=tuple(grid), recommended=None))
    titled = [axes.get_title(loc="left") for axes in figure.axes if axes.axison]
    assert titled == ["1 cell per block", *(f"{n} cells per block" for n in range(2, 9))]
    numbered = [axes.get_xlabel() != "" for axes in figure.axes if axes.axison]
    assert numbered == [False, False, True, True, True, True, True, True]


def test_a_block_size_has_one_colour_in_all_pictures():
    few, many = block_colours([16, 256]), block_colours([1, 4, 16, 64, 256, 1024, 4096])
    assert few[16] == pytest.approx(many[16])
    assert few[256] == pytest.approx(many[256])
    assert len({tuple(each) for each in many.values()}) == len(many)
