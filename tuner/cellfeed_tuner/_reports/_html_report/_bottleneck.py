"""Where the time of a cell goes, and what other files would change."""

from cellfeed_tuner._explain._bottleneck import Bottleneck
from cellfeed_tuner._reports._html_report._elements import Html, element
from cellfeed_tuner._reports._html_report._svg import inline_svg
from cellfeed_tuner._reports._wording import explained_in_words, why_no_bottleneck
from cellfeed_tuner._results._autotune_result import AutotuneResult
from cellfeed_tuner.plots import stages_figure

__all__ = ["bottleneck"]


def bottleneck(result: AutotuneResult) -> list[Html]:
    """Return the sentence, a picture of the stages, and advice where there is any."""
    found = result.bottleneck
    if found is None:
        return [element("p", why_no_bottleneck())]
    svg = inline_svg(
        stages_figure(found),
        name="stages",
        description="Microseconds for each cell that threads are busy with every stage",
    )
    caption = element("figcaption", _caption(found))
    said = [element("p", line) for line in explained_in_words(result)]
    return [said[0], element("figure", svg, caption), *said[1:]]


def _caption(found: Bottleneck) -> str:
    said = (
        f"Counted over {found.n_rounds} rounds of the recommended configuration, with 95 % "
        "intervals: how long all threads together are busy with a stage. While one fetch is made "
        "into minibatches, the next is read and the one after that is planned, so bars do not add "
        f"up to the measured time; side by side, they explain {found.accounted:.0%} of it."
    )
    if found.read_amplification is None:
        return said
    return f"{said} {found.read_amplification:.2f} bytes are decompressed for each that is used."
