"""Sentences and HTML about a result, from the templates beside this module."""

from collections import Counter
from typing import Any

import jinja2

from cellfeed.console import format_bytes
from cellfeed_tuner._bottleneck import microseconds
from cellfeed_tuner._constants import (
    FEWEST_ROUNDS,
    LEAST_ROUNDS,
    LEAST_SUSTAINED_SECONDS,
    MUCH_SPREAD,
    MUCH_START,
    REMOTE_PREFETCH,
)
from cellfeed_tuner._interval import interval, times
from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results import SAME_SPEED_SHARE, STATUS_WORDS


def in_words(what: str, *about: object) -> list[str]:
    """Return the sentences of a macro in ``words.jinja``; there may be none."""
    macro = getattr(_TEMPLATES.get_template("words.jinja").module, what)
    return [line for line in str(macro(*about)).splitlines() if line]


def rendered(template: str, result: AutotuneResult, **values: Any) -> str:
    """Return the escaped HTML of a template."""
    made = _TEMPLATES.get_template(template).render(
        result=result, key_figures=_key_figures(result), **values
    )
    return made.encode("utf-8", "replace").decode()  # file names need not be UTF-8


def html_summary(result: AutotuneResult) -> str:
    """Return what a notebook shows: an element that needs no style."""
    return rendered("notebook.html.jinja", result)


def megabytes(n_bytes: int) -> str:
    """Return the memory of processes, written the same everywhere."""
    return f"{n_bytes / 1e6:,.0f} MB"


def _key_figures(result: AutotuneResult) -> dict[str, str]:
    chosen, known = result.recommended, result.chosen
    if chosen is None or known is None:
        return {}
    (how,), (mixed,) = in_words("how_measured", result), in_words("share", known.entropy_bits)
    speed, memory = chosen.cells_per_second, chosen.peak_memory_bytes
    return {
        f"throughput, {how}": "unknown" if speed is None else f"{interval(speed)} cells/s",
        f"entropy of {result.dataset.label}": mixed,
        "peak memory": "not measured" if memory is None else megabytes(memory),
    }


_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader(__package__),
    autoescape=jinja2.select_autoescape(["html.jinja"]),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)


_TEMPLATES.globals.update(
    FEWEST_ROUNDS=FEWEST_ROUNDS,
    LEAST_ROUNDS=LEAST_ROUNDS,
    LEAST_SUSTAINED_SECONDS=LEAST_SUSTAINED_SECONDS,
    MUCH_SPREAD=MUCH_SPREAD,
    MUCH_START=MUCH_START,
    REMOTE_PREFETCH=REMOTE_PREFETCH,
    SAME_SPEED_SHARE=SAME_SPEED_SHARE,
    STATUS_WORDS=STATUS_WORDS,
    bytes=format_bytes,
    in_words=in_words,
    interval=interval,
    megabytes=megabytes,
    microseconds=microseconds,
    times=times,
)

_TEMPLATES.filters.update(
    counted=lambda statuses: Counter(
        STATUS_WORDS[status].listed for status in statuses
    ).most_common(),
    ended=lambda text: text if text.endswith((".", "!", "?")) else f"{text}.",
    reason=lambda each: each.note or STATUS_WORDS[each.status].listed,
)
