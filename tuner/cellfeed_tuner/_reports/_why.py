"""Why one configuration was chosen, and another was not, from a saved result."""

from collections.abc import Sequence
from dataclasses import dataclass

from cellfeed import ParameterError
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import Estimate, interval
from cellfeed_tuner._planning._recommend import choose
from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results._configuration_result import STATUS_WORDS, ConfigurationResult
from cellfeed_tuner._results._recommended import SAME_SPEED_SHARE

__all__ = ["Asked", "Why", "why"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Which configurations a question is about; None stands for any."""

    block_size: int | None = None
    fetch_factor: int | None = None
    num_workers: int | None = None

    def matches(self, configuration: Configuration) -> bool:
        """Return whether a configuration is one of those."""
        return all(
            wanted is None or wanted == given
            for wanted, given in (
                (self.block_size, configuration.block_size),
                (self.fetch_factor, configuration.fetch_factor),
                (self.num_workers, configuration.num_workers),
            )
        )

    def __str__(self) -> str:
        named = (
            ("block size", self.block_size),
            ("fetch factor", self.fetch_factor),
            ("workers", self.num_workers),
        )
        return ", ".join(f"{name} {value}" for name, value in named if value is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """What is known of the configurations that a question is about.

    Parameters
    ----------
    asked
        The question.
    n_matching
        How many configurations it is about.
    about
        The best of them.
    is_chosen
        Whether that is the recommended one.
    speed_ratio
        Its throughput as a share of the chosen one's, both as searched; None without both.
    reasons
        What speaks against it, or for it if it is the chosen one, the weightiest first.
    """

    asked: Asked
    n_matching: int
    about: ConfigurationResult
    is_chosen: bool
    speed_ratio: float | None
    reasons: tuple[str, ...]


def why(result: AutotuneResult, asked: Asked) -> Why:
    """Say why something was not chosen, or was.

    Raises
    ------
    ParameterError
        The question is about nothing that the result knows of.
    """
    matching = [each for each in result.configurations if asked.matches(each.configuration)]
    if not matching:
        msg = (
            f"{asked}: not among the {len(result.configurations)} configurations of this result; "
            "run autotune with --block-sizes, --fetch-factors and --workers that have it"
        )
        raise ParameterError(msg)
    about, chosen = _best(matching, result), result.chosen
    is_chosen = chosen is not None and about.configuration == chosen.configuration
    return Why(
        asked=asked,
        n_matching=len(matching),
        about=about,
        is_chosen=is_chosen,
        speed_ratio=_ratio(about, chosen),
        reasons=_reasons_for(result) if is_chosen else tuple(_reasons_against(about, result)),
    )


def _best(matching: Sequence[ConfigurationResult], result: AutotuneResult) -> ConfigurationResult:
    """Return what would be chosen of these; if nothing would, what comes nearest to that."""
    choice = choose(matching, result.constraints)
    if choice is not None:
        return choice.result

    def rank(each: ConfigurationResult) -> tuple[bool, float, float]:
        speed = each.cells_per_second.value if each.cells_per_second else 0.0
        share = each.least_mixed.share_of_random
        mixes = result.constraints.mixes(share)
        return mixes, speed if mixes else share, speed

    return max(matching, key=rank)


def _ratio(each: ConfigurationResult, chosen: ConfigurationResult | None) -> float | None:
    if chosen is None or chosen.cells_per_second is None or each.cells_per_second is None:
        return None
    return each.cells_per_second.value / chosen.cells_per_second.value


def _reasons_for(result: AutotuneResult) -> tuple[str, ...]:
    return (result.recommended.reason,) if result.recommended else ()


def _reasons_against(each: ConfigurationResult, result: AutotuneResult) -> list[str]:
    return [
        *([each.verdict.sentence] if each.verdict and each.verdict.kind == "loader" else []),
        *_mixing(each, result),
        *_memory(each, result),
        *_status(each),
        *_speed(each, result),
    ]


def _mixing(each: ConfigurationResult, result: AutotuneResult) -> list[str]:
    entropy, floor = each.least_mixed, result.constraints.entropy_floor
    if result.constraints.mixes(entropy.share_of_random):
        return []
    share = f"{entropy.share_of_random:.1%} of random sampling's {entropy.random_alike:.3f}"
    bits = f"{entropy.expected.value:.3f} bits"
    return [f"It mixes too little: {bits} are {share}, below the floor of {floor:.0%}."]


def _memory(each: ConfigurationResult, result: AutotuneResult) -> list[str]:
    peak, limit = each.peak_memory_bytes, result.constraints.memory_bytes
    if peak is None or peak <= limit:
        return []
    return [f"It takes {peak / 1e6:,.0f} MB, of {limit / 1e6:,.0f} MB given."]


def _status(each: ConfigurationResult) -> list[str]:
    if each.has_few_rounds:
        return [f"Its throughput comes from {each.n_rounds} rounds only: not enough samples."]
    said = STATUS_WORDS[each.status].sentence
    if not said:
        return []
    is_said = each.status == "too slow" or not each.note
    return [f"{said}." if is_said else f"{said}: {each.note}."]


def _speed(each: ConfigurationResult, result: AutotuneResult) -> list[str]:
    own = each.cells_per_second
    need = result.constraints.need_cells_per_second
    if own is None:
        return []
    if need is not None and own.low < need:
        return [f"It gives {interval(own)} cells/s, which may be below the {need:,.0f} needed."]
    chosen = result.chosen
    if chosen is None:
        return []
    return [_mixes_less(each, chosen) if need is not None else _slower(each, own, chosen)]


def _slower(each: ConfigurationResult, own: Estimate, chosen: ConfigurationResult) -> str:
    theirs = chosen.cells_per_second
    assert theirs is not None  # noqa: S101 - nothing is recommended without
    ratio = own.value / theirs.value
    said = f"{interval(own)} cells/s are {ratio:.2f} times the {interval(theirs)} of the chosen one"
    if ratio >= 1 or (own.overlaps(theirs) and ratio >= 1 - SAME_SPEED_SHARE):
        return f"It is as fast, but {_dearer(each, chosen)}: {said}."
    if own.overlaps(theirs):
        return f"It may be as fast, but was slower when measured: {said}."
    return f"It is slower: {said}."


def _mixes_less(each: ConfigurationResult, chosen: ConfigurationResult) -> str:
    own, theirs = (one.entropy_bits.share_of_random for one in (each, chosen))
    if own >= theirs:
        return f"It is fast enough and mixes as well, but {_dearer(each, chosen)}."
    return (
        f"It is fast enough, but mixes less: {own:.1%} of random sampling's entropy, where the "
        f"chosen one has {theirs:.1%}."
    )


def _dearer(each: ConfigurationResult, chosen: ConfigurationResult) -> str:
    own, theirs = each.peak_memory_bytes or 0, chosen.peak_memory_bytes or 0
    workers = each.configuration.num_workers
    if own > theirs or workers == chosen.configuration.num_workers:
        return f"not cheaper in memory ({own / 1e6:,.0f} MB, the chosen one {theirs / 1e6:,.0f} MB)"
    return f"not cheaper: it takes {workers} worker processes"
