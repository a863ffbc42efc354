"""The pictures, drawn from results that were made by hand; `test_reports` draws all kinds."""

from collections import Counter
from dataclasses import replace
from functools import cache
from io import BytesIO
from itertools import combinations, pairwise

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.container import ErrorbarContainer
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from tests.tuner.conftest import RESULTS

from cellfeed_tuner import EntropyBits, Estimate, LabelResult, plots
from cellfeed_tuner.plots import block_colours


@pytest.fixture(scope="module")
def recommended(result_of):
    return result_of("recommended")


@pytest.fixture
def trade_off(result_of):
    """The axes of the trade-off of a kind, and its Pareto front."""

    def trade_off(kind="recommended"):
        (axes,) = plots.trade_off_figure(result_of(kind)).axes
        (front,) = (line for line in axes.lines if line.get_label() == "Pareto front")
        return axes, front

    return trade_off


SITUATIONS = [
    "several labels", "two configurations", "long names", "ranges", "need", "ranks",
    "zero entropy", "interrupted", "warm", "whole grid",
]  # fmt: skip
SITUATIONS_IN_TIME = [
    pytest.param(kind, marks=[pytest.mark.slow] * (kind in {"ranges", "whole grid"}))
    for kind in SITUATIONS
]
FIGURES = [plots.autotune_figure, plots.trade_off_figure, plots.throughput_figure]


@cache
def drawn(draw, kind):
    """A figure that was drawn, and the texts that were drawn in it, with their boxes in pixels."""
    figure = draw(RESULTS[kind])
    texts = list[Text]()
    canvas = FigureCanvasAgg(figure)
    with pytest.MonkeyPatch.context() as patch:
        original = Text.draw

        def noting(self, *args, **options):
            if self.get_visible() and self.get_text().strip():
                texts.append(self)
            original(self, *args, **options)

        patch.setattr(Text, "draw", noting)
        canvas.draw()
    return figure, [(each.get_text(), each.get_window_extent()) for each in texts]


def points(axes):
    """The points with error bars in axes, as (x, y)."""
    bars = [each for each in axes.containers if isinstance(each, ErrorbarContainer)]
    return [tuple(point) for bar in bars for point in np.asarray(bar.lines[0].get_xydata())]


def heat_maps_of(result):
    """The axes of throughput and of entropy."""
    speeds, entropies, _ = plots.autotune_figure(result).axes
    return speeds, entropies


def panels_of_speed(figure):
    return [axes for axes in figure.axes if axes.containers and axes.get_yscale() == "log"]


@pytest.mark.parametrize("kind", SITUATIONS_IN_TIME)
@pytest.mark.parametrize("draw", FIGURES)
def test_no_text_covers_another_or_is_cut(kind, draw):
    figure, texts = drawn(draw, kind)
    for text, box in texts:
        assert box.x0 >= 0 <= box.y0, text
        assert box.x1 <= figure.bbox.x1, text
        assert box.y1 <= figure.bbox.y1, text
    for (text, box), (other, other_box) in combinations(texts, 2):
        overlap = Bbox.intersection(box, other_box)
        assert overlap is None or min(overlap.width, overlap.height) < 1, (text, other)
    for axes in figure.axes:
        for square in axes.patches:
            inside = square.get_window_extent()
            for text in axes.texts:
                box = text.get_window_extent()
                is_in = inside.contains(*((box.p0 + box.p1) / 2))
                assert not is_in or (inside.x0 <= box.x0 and box.x1 <= inside.x1), text.get_text()


@pytest.mark.parametrize("kind", SITUATIONS_IN_TIME)
@pytest.mark.parametrize("draw", FIGURES)
def test_all_that_was_timed_is_in_sight_and_so_is_what_is_needed(kind, draw):
    result = RESULTS[kind]
    figure, _ = drawn(draw, kind)
    panels = panels_of_speed(figure)
    is_trade_off = draw is not plots.throughput_figure
    for each in result.configurations:
        if each.cells_per_second is None:
            continue
        settings = each.configuration
        missing = 100 * (1 - each.share_of_random)
        place = missing if is_trade_off else settings.fetch_factor
        wanted = [each.cells_per_second.value]
        if each is result.chosen:
            wanted.append(result.recommended.cells_per_second.value)
        axes = panels[0] if is_trade_off else panel_of(panels, settings.num_workers)
        for speed in wanted:
            assert any(point == pytest.approx((place, speed)) for point in points(axes)), each
            assert axes.bbox.contains(*axes.transData.transform((place, speed))), each
    need = result.constraints.need_cells_per_second
    for axes in panels if need else []:
        assert any(np.all(np.equal(line.get_ydata(), need)) for line in axes.lines)
        assert axes.get_ylim()[0] < need < axes.get_ylim()[1]


def panel_of(panels, num_workers):
    titles = [axes.get_title(loc="left") for axes in panels]
    return panels[titles.index("1 worker" if num_workers == 1 else f"{num_workers} workers")]


@pytest.mark.slow
def test_a_marker_has_one_meaning(result_of):
    """In all situations and pictures, a number of workers has a marker of its own."""
    meanings = set()
    for kind in SITUATIONS:
        result = result_of(kind)
        (axes,) = panels_of_speed(plots.trade_off_figure(result))
        hovers = {
            plots.hover(each): each.configuration.num_workers for each in result.configurations
        }
        for bar in axes.containers:
            assert isinstance(bar, ErrorbarContainer)
            line = bar.lines[0]
            if str(line.get_gid()) in hovers:
                meanings.add((hovers[str(line.get_gid())], line.get_marker()))
    numbers, markers = zip(*sorted(meanings, key=str), strict=True)
    assert len(set(numbers)) == len(meanings) == len(set(markers)) == 6  # 0, 1, 2, 3, 4, 11


def squares_of(axes):
    """The text of each square of a heat map, and its colour; None if it has none."""
    (mesh,) = axes.collections
    shades = np.ma.filled(np.ma.asarray(mesh.get_array()), np.nan)
    cells = {tuple(map(int, text.get_position())): text.get_text() for text in axes.texts}
    return [
        (text, None if np.isnan(shades[row, column]) else mesh.cmap(shades[row, column]))
        for (column, row), text in cells.items()
    ]


@pytest.mark.parametrize("kind", SITUATIONS)
def test_a_faster_square_is_darker(result_of, kind):
    result = result_of(kind)
    if result.ranges:
        return
    axes, _ = heat_maps_of(result)
    found = list[tuple[float, float]]()
    for text, colour in squares_of(axes):
        speed = text.splitlines()[0]
        if colour is not None:
            assert text.endswith(("workers", "worker"))
            value = float(speed.rstrip("k")) * (1000 if speed.endswith("k") else 1)
            found.append((value, sum(colour[:3])))
    assert len(found) >= 2
    for (speed, ground), (faster, darker) in pairwise(sorted(found)):
        assert darker < ground or (darker == ground and faster < 1.1 * speed)


@pytest.mark.slow
def test_what_mixes_too_little_is_hollow(result_of):
    result = result_of("whole grid")
    for figure in (plots.trade_off_figure(result), plots.throughput_figure(result)):
        hollow = [
            bar.lines[0].get_gid()
            for axes in figure.axes
            for bar in axes.containers
            if isinstance(bar, ErrorbarContainer)
            and str(bar.lines[0].get_markerfacecolor()) == "white"
        ]
        assert Counter(hollow) == Counter(
            plots.hover(each) for each in result.configurations if each.share_of_random < 0.949
        )


def test_a_caption_explains_only_what_is_drawn(result_of):
    for kind in ("recommended", "whole grid", "two configurations"):
        caption = plots.autotune_figure(result_of(kind)).get_supxlabel()
        assert ("~: predicted." in caption) == (kind == "recommended")
        assert ("not in the grid" in caption) == (kind == "two configurations")


@pytest.mark.slow
def test_a_legend_names_what_is_drawn(result_of):
    for kind in SITUATIONS:
        result = result_of(kind)
        figure = plots.trade_off_figure(result)
        (legend,) = figure.legends
        names = {text.get_text() for text in legend.get_texts()}
        assert ("Pareto front" in names) == (len(result.pareto_front()) > 1)
        assert ("hollow: mixes too little" in names) == any(
            not result.constraints.mixes(each.share_of_random)
            for each in result.configurations
            if each.cells_per_second is not None
        )
        assert any(name.startswith("needed") for name in names) == (kind == "need")


def test_a_label_with_dollars_is_no_formula(recommended):
    label = r"a $\nonsense{$ b"
    figure = plots.autotune_figure(
        replace(
            recommended,
            dataset=replace(
                recommended.dataset, labels={label: recommended.dataset.labels["plate"]}
            ),
        )
    )
    file = BytesIO()
    figure.savefig(file, dpi=20)  # a formula is read only now
    assert file.getvalue().startswith(b"\x89PNG")
    texts = [" ".join(text.get_text().split()) for text in figure.findobj(Text)]
    assert any(label in text.replace(r"\$", "$") for text in texts)


def test_on_the_front_lies_what_nothing_beats_in_both_respects(trade_off):
    _, front = trade_off()
    places = [[0.0, 1_500.0], [3.0, 3_000.0], [4.0, 8_800.0], [80.0, 12_000.0]]
    assert front.get_xydata() == pytest.approx(np.array(places))
    assert front.get_drawstyle() == "steps-post"
    _, front = trade_off("several labels")  # by the label that is mixed least
    missing = np.asarray(front.get_xydata())[:, 0]
    assert missing == pytest.approx(100 - 99 * np.array([1.0, 0.97, 0.96, 0.2]))


def test_shares_near_random_sampling_can_be_told_apart(trade_off):
    axes, _ = trade_off()
    missing = np.array([80, 10, 2, 1, 0, -1])
    points = np.column_stack([missing, np.full(missing.size, 1_000)])
    scaled = axes.transScale.transform(points)
    assert (np.diff(axes.transLimits.transform(scaled)[:, 0]) > 0.05).all()
    axes.figure.draw_without_rendering()
    ticks = [tick.get_text() for tick in axes.get_xticklabels()]
    assert ticks == ["100", "99.5", "99", "95", "90", "50", "0"]


def test_the_chosen_point_is_marked_with_the_figure_that_is_published(trade_off):
    axes, _ = trade_off()
    chosen = axes.containers[-1]
    assert isinstance(chosen, ErrorbarContainer)
    assert chosen.lines[0].get_markeredgecolor() == plots.CHOSEN
    assert np.asarray(chosen.lines[0].get_ydata()).tolist() == [8_800.0]


def test_squares_of_the_grid(recommended, result_of):
    speeds, entropies = heat_maps_of(recommended)
    # What mixes too little is hatched.
    below = [each for each in recommended.configurations if each.share_of_random < 0.95]
    places = {(each.configuration.block_size, each.configuration.fetch_factor) for each in below}
    for axes in (speeds, entropies):
        assert sum(patch.get_hatch() is not None for patch in axes.patches) == len(places) > 0
    # What has no throughput says why in its place, or what is predicted.
    texts = [text.get_text() for text in speeds.texts]
    assert "3.0k\n1 worker" in texts
    unpredicted, _ = heat_maps_of(result_of("nothing feasible"))
    assert {"failed", "too slow"} <= {text.get_text() for text in unpredicted.texts}
    assert {text for text in texts if text.startswith("~")} == {"~7.0k"}
    for text, colour in squares_of(entropies):
        assert (float(text[:-1]) < 95) == (colour is None)
    # Black text can be read on every square; what is recommended has a frame.
    for axes in (speeds, entropies):
        assert min(sum(colour[:3]) for _, colour in squares_of(axes) if colour) > 1.5
        assert {text.get_color() for text in axes.texts} <= {"black", plots.BOUND}
        edges = [patch.get_edgecolor() for patch in axes.patches]
        assert edges.count(to_rgba(plots.CHOSEN)) == 1
        bold = [text for text in axes.texts if text.get_fontweight() == "bold"]
        assert len(bold) == 1


def test_a_place_shows_the_best_of_all_other_settings(recommended):
    """Of what differs in workers or in alignment, the fastest, and what is best mixed."""
    bits = EntropyBits(expected=Estimate(0.5, 0.5, 0.5), random=3.6)
    aligned = tuple(
        replace(
            each,
            configuration=each.configuration.changed(align="chunks"),
            labels={"plate": LabelResult(entropy_bits=bits)},
            cells_per_second=each.cells_per_second and Estimate(1.0, 0.9, 1.1),
        )
        for each in recommended.configurations
    )
    both = replace(recommended, configurations=(*recommended.configurations, *aligned))
    one, other = (
        [
            text.get_text()
            for axes in heat_maps_of(result)
            for text in axes.texts
            if not text.get_text().startswith("~")  # predicted from all that was measured
        ]
        for result in (recommended, both)
    )
    assert one == other


def test_a_block_size_has_one_colour_in_all_pictures():
    few, many = block_colours([16, 256]), block_colours([1, 4, 16, 64, 256, 1024, 4096])
    assert few[16] == pytest.approx(many[16])
    assert few[256] == pytest.approx(many[256])
    assert len({tuple(each) for each in many.values()}) == len(many)
