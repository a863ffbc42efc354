"""How well labels are mixed in minibatches: as planned or, without a plan, as delivered."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import copysign, inf, isfinite, log, log2, sqrt
from typing import NamedTuple

from scipy.special import stdtrit

from cellfeed_tuner import theory
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import BEYOND_CHANCE
from cellfeed_tuner._entropy import (
    LabelEntropy,
    Statistic,
    random_of_known_statistic,
    statistic_of,
)
from cellfeed_tuner._interval import CONFIDENCE, Estimate, mean_with_interval
from cellfeed_tuner._measuring._measurement import Measurement
from cellfeed_tuner._results import (
    ConfigurationResult,
    EntropyBits,
    LabelResult,
    StorageOrder,
    Verdict,
    least_share,
)
from cellfeed_tuner._subject import Label, Plans, Settings
from cellfeed_tuner._time_budget import Progress

# Rows of a plan for computing its entropy: initially, and at most. The number is quadrupled as
# long as the interval contains the floor. Chosen: configurations near the floor deserve more time.
MIXING_ROWS, MOST_MIXING_ROWS = 1 << 18, 1 << 22
# Rows of a plan of random sets, with which others are compared. Chosen: between the two above.
MIXING_ROWS_OF_SETS = 1 << 20
# Share of random sampling's entropy by which another loader may differ from its plan beyond
# chance. Chosen: it may leave out the end of an epoch, which the plan contains.
WRONG_SHARE = 0.02
# Chance of calling a correct loader wrong, in each comparison. Chosen: a run makes hundreds.
CHANCE_OF_FALSE_ALARM = 1e-6
# Rows of each plan for computing its entropy if time is short. Chosen: intervals are then wider,
# but throughput can be measured.
LATE_MIXING_ROWS = 1 << 15

# Rounding error of sums of many logarithms.
_ROUNDING = 1e-9


def wrong_data(fault: str) -> Verdict:
    """Return the verdict on a loader whose minibatches differ from the plan, row by row."""
    sentence = f"The loader delivered wrong data: {fault}; please report this."
    return Verdict(kind="loader", sentence=sentence)


def standard_error_of(
    measured: Estimate,
    n_rounds: int,
    planned: float | None,
    *,
    fetches_per_round: int = 1,
    fetches_per_epoch: int,
    fetches_per_block: int = 1,
) -> float:
    """Return the standard error of the mean over rounds of whole fetches, the larger of two.

    The spread of the rounds themselves is misleading if they happen to be alike, for example when
    most minibatches hold a single label; the deviation ``planned`` of fetches is not. Fetches of
    one epoch share its rows: what one has in surplus, the others lack. If a fetch's entropy is a
    quadratic function of such surpluses, as it is near the collection's frequencies, those of N
    fetches correlate by 1 / (N - 1)^2, and the variance of their mean is N / (N - 1) times that of
    independent ones. Consecutive fetches within one block count as one.
    """
    n = fetches_per_epoch
    shared = n / (n - 1) if n > 1 else 1.0
    independent = max(1.0, n_rounds * fetches_per_round / fetches_per_block)
    of_plan = (planned or 0.0) * sqrt(shared / independent)
    half = measured.high - measured.value
    if n_rounds < 2 or not isfinite(half):  # noqa: PLR2004 - a spread needs two
        return of_plan
    return max(half / float(stdtrit(n_rounds - 1, (1 + CONFIDENCE) / 2)), of_plan)


def by_chance(standard_error: float, n: int, reach: float) -> float:
    """Return how far a mean of n values deviates in one of a million cases at most.

    Bernstein's inequality, for values that exceed their expectation by at most ``reach``; unlike
    normal quantiles, it holds for few values and skewed ones.
    """
    rarity = -log(CHANCE_OF_FALSE_ALARM)
    return sqrt(2 * rarity) * standard_error + rarity * reach / (3 * n)


def verdict(bits: EntropyBits, *, standard_error: float) -> Verdict | None:
    """Compare the measured entropy of a loader that delivered its plan with the paper's bounds.

    A value within sampling error of a bound counts as inside. All figures are plug-in estimates
    over minibatches of the same size, so their biases cancel. None without a measurement or theory.
    """
    if bits.measured is None or bits.homogeneous is None:
        return None
    value, error = bits.measured.value, BEYOND_CHANCE * standard_error + _ROUNDING
    low, high = bits.bounds
    is_widened = (low, high) != (bits.lower_bound, bits.upper_bound)
    distance = max(low - value, value - high)
    off = copysign(distance, value - low) if distance > error else 0.0
    where = f"{distance:.3f} {'below' if off < 0 else 'above'}" if off else "inside"
    return Verdict(
        kind="outside" if off else "inside",
        bits=off,
        error_bits=error,
        sentence=f"Measured {value:.3f} bits, as planned: {where} the paper's bounds"
        f"{', widened to exact values' if is_widened else ''} ({low:.3f} to {high:.3f}). Blocks of "
        f"one label each, drawn independently, would give {bits.homogeneous:.3f}.",
    )


class _RandomOf(NamedTuple):
    """Names random samples with as many labelled cells as minibatches have."""

    label: str


_Replayed = Mapping[str | _RandomOf, LabelEntropy]
_Estimates = Mapping[str, Estimate]


class Mixing:
    """The entropy of each configuration, from replayed plans or from measurements.

    A plan is replayed on first use: for a whole grid in `replay`, which reports progress, or one by
    one. Without plans, the entropy of unmeasured settings is bounded: larger blocks and smaller
    fetches do not mix better, so settings are assumed to mix as well as the worst of the measured
    ones with smaller blocks and larger fetches, or else as random samples.

    Parameters
    ----------
    labels
        Labels that minibatches should be mixed by. Without any, nothing is expected.
    plans
        Which rows are in which minibatch.
    entropy_floor
        Share of random sampling's entropy that configurations must reach. Plans near it are
        replayed for longer, so that the decision hardly depends on the seed.
    """

    def __init__(self, labels: Sequence[Label], plans: Plans, *, entropy_floor: float) -> None:
        self._labels, self._plans = labels, plans
        self._least_share = least_share(entropy_floor)
        self._statistics: dict[str | _RandomOf, Statistic] = {
            each.name: statistic_of(each.codes) for each in labels
        }
        self._statistics |= {
            _RandomOf(each.name): random_of_known_statistic(each.codes, each.target.counts)
            for each in labels
            if self._depends_on_known(each)
        }
        self._random = self._random_bits()
        self._replayed = cache(self._replayed_until_clear)
        self._planned = cache(self._planned_entropies)
        self._is_late: Callable[[], bool] = lambda: False
        self._measured = dict[Configuration, Measurement]()
        self._delivered = dict[Settings, _Estimates]()

    def __getitem__(self, plan_settings: Settings) -> Mapping[str, EntropyBits]:
        """Return the entropy of each label, in order, at `Configuration.plan_settings`."""
        settings = self._plans.differing(plan_settings)
        return self._planned(settings) or self._bits(
            self._delivered.get(settings) or self._at_most(settings)
        )

    def replay(
        self,
        grid: Iterable[Configuration],
        on_progress: Progress,
        *,
        is_late: Callable[[], bool] = lambda: False,
    ) -> None:
        """Replay the plans of a whole grid, and report progress; fewer rows if it ``is_late``."""
        self._is_late = is_late
        if not self._labels:
            return
        plans = dict.fromkeys(self._plans.differing(each.plan_settings) for each in grid)
        for number, settings in enumerate(plans):
            self._replayed(settings)
            on_progress("entropy", number + 1, len(plans))

    def is_planned(self, configuration: Configuration) -> bool:
        """Return whether entropies are known without measuring, or of no importance."""
        return (
            not self._labels
            or self._replayed(self._plans.differing(configuration.plan_settings)) is not None
        )

    def learn(self, found: Measurement) -> bool:
        """Record measured entropies; return whether there is no plan for them."""
        if self.is_planned(found.configuration):
            return False
        settings = found.configuration.plan_settings
        if all(found.round_entropy_bits.get(name) for name in self._random):
            self._measured[found.configuration] = found
            alike = [e for c, e in self._measured.items() if c.plan_settings == settings]
            self._delivered[settings] = {
                name: _bounded(
                    mean_with_interval(
                        [b for each in alike for b in each.round_entropy_bits[name]]
                    ),
                    most,
                )
                for name, most in self._random.items()
            }
        return True

    def storage_order(self, block_size: int) -> StorageOrder | None:
        """Return the storage order for the first label that is not shuffled, or the first label.

        None if plans do not visit blocks in random order.
        """
        if not self._plans.has_theory:
            return None
        orders = [self._order(each, block_size) for each in self._labels]
        return next((each for each in orders if not each.already_shuffled), orders[0])

    def judged(self, result: ConfigurationResult, fault: str | None) -> ConfigurationResult:
        """Return a result with the entropy of each label and a verdict.

        ``fault`` says where minibatches differed from the plan; None if they did not. Unknown
        entropies range from 0 to random sampling's.
        """
        settings = self._plans.differing(result.configuration.plan_settings)
        found = self[settings]
        if not (self._planned(settings) or settings in self._delivered):
            found = self._bits(
                {name: Estimate(0.0, 0.0, most) for name, most in self._random.items()}
            )
        labels = {**result.labels}
        for each in self._labels:
            bits = replace(found[each.name], measured=labels[each.name].entropy_bits.measured)
            verdict = self._verdict(each, bits, result, fault)
            labels[each.name] = LabelResult(entropy_bits=bits, verdict=verdict)
        return replace(result, labels=labels)

    def fault(self, result: ConfigurationResult) -> str:
        """Return how the delivered labels of another loader contradict its plan or its labels.

        Plans of cellfeed's own loader are compared row by row.
        """
        settings = self._plans.differing(result.configuration.plan_settings)
        replayed = self._replayed(settings)
        found = (
            self._contradiction(
                each, bits, result, None if replayed is None else replayed[each.name]
            )
            for each in self._labels
            if (bits := result.labels[each.name].entropy_bits.measured) is not None
            and bits.high < inf
        )
        return next(filter(None, found), "")

    def _contradiction(
        self,
        label: Label,
        bits: Estimate,
        result: ConfigurationResult,
        replayed: LabelEntropy | None,
    ) -> str:
        random, most = self._random[label.name], log2(self._plans.batch_size)
        most = min(most, log2(max(1, label.target.counts.size)))
        fetches = None if replayed is None else replayed.fetch_deviation
        n, deviation = result.n_rounds + 1, self._standard_error(bits, label, result, fetches)
        said = f"minibatches have {bits.value:.3f} bits of {label.name}, but "
        error = by_chance(deviation, n, most - random) + WRONG_SHARE * random
        if bits.value - random > error:
            return said + (
                f"random samples of `labels` have {random:.3f}: `labels_of` gives other labels, or "
                "rows are not drawn as often as in `labels`"
            )
        if replayed is None or fetches is None:
            return ""
        planned = replayed.bits
        reach = most - planned.value if bits.value > planned.value else planned.value
        error = by_chance(deviation, n, reach) + WRONG_SHARE * random
        error += BEYOND_CHANCE / 2 * (planned.high - planned.value)
        if abs(bits.value - planned.value) > error:
            return said + (
                f"`planned_rows` gives {planned.value:.3f}: the loader does not deliver its plan"
            )
        return ""

    def _depends_on_known(self, label: Label) -> bool:
        """Return whether a label's reference depends on how many cells of a minibatch have it."""
        return bool(label.target.n_missing) and not self._plans.is_of_sets

    def _random_bits(self) -> dict[str, float]:
        """Return the entropy of random sampling, of each label.

        For strategies of sets, random sets come from the plan with blocks of single cells.
        """
        plans = self._plans
        if plans.is_of_sets:
            found = self._replayed_for((1, 1), MIXING_ROWS_OF_SETS) or {}
            return {each.name: found[each.name].bits.value for each in self._labels}
        return {e.name: e.target.random_entropy_bits(plans.batch_size) for e in self._labels}

    def _replayed_until_clear(self, settings: Settings) -> _Replayed | None:
        if self._is_late():
            return self._replayed_for(settings, LATE_MIXING_ROWS)
        n_rows = MIXING_ROWS
        while True:
            found = self._replayed_for(settings, n_rows)
            is_near = found is not None and any(self._is_near(found, each) for each in self._labels)
            if n_rows >= MOST_MIXING_ROWS or not is_near or self._is_late():
                return found
            n_rows *= 4

    def _replayed_for(self, settings: Settings, n_rows: int) -> _Replayed | None:
        found = self._plans.replay(settings, list(self._statistics.values()), n_rows=n_rows)
        if found is None:
            return None
        by_name = zip(self._statistics, found, strict=True)
        return {name: LabelEntropy.of(each, *settings[:2]) for name, each in by_name}

    def _is_near(self, replayed: _Replayed, label: Label) -> bool:
        """Return whether the interval of an entropy contains the floor."""
        bits, random = replayed[label.name].bits, self._random[label.name]
        if self._depends_on_known(label):
            random = replayed[_RandomOf(label.name)].bits.value
        return bits.low <= self._least_share * random <= bits.high

    def _planned_entropies(self, settings: Settings) -> Mapping[str, EntropyBits] | None:
        """Return the planned entropy of each label, with theory if it applies."""
        replayed, plans = self._replayed(settings), self._plans
        if replayed is None:
            return None
        found = self._bits(
            {name: _bounded(replayed[name].bits, most) for name, most in self._random.items()},
            replayed,
        )
        if not plans.has_theory:
            return found
        block_size = plans.block_size(settings)
        for each in self._labels:
            sizes = each.target.counts, plans.batch_size
            found[each.name] = replace(
                found[each.name],
                homogeneous=theory.expected_entropy_bits(*sizes, block_size, settings[1]),
                lower_bound=theory.lower_bound_bits(*sizes, block_size),
                upper_bound=theory.upper_bound_bits(*sizes),
            )
        return found

    def _bits(
        self, expected: _Estimates, replayed: _Replayed | None = None
    ) -> dict[str, EntropyBits]:
        return {
            each.name: EntropyBits(
                expected=expected[each.name],
                random=self._random[each.name],
                random_of_known=self._random_of_known(each, replayed),
            )
            for each in self._labels
        }

    def _random_of_known(self, label: Label, replayed: _Replayed | None) -> float | None:
        if replayed is None or not self._depends_on_known(label):
            return None
        return replayed[_RandomOf(label.name)].bits.value

    def _at_most(self, settings: Settings) -> _Estimates:
        """Return the least known entropy with no larger blocks and no smaller fetches."""
        block_size, fetch_factor, *others = settings
        better = [
            known
            for (block, fetch, *theirs), known in self._delivered.items()
            if block <= block_size and fetch >= fetch_factor and theirs == others
        ]
        most = {
            name: min([random, *(each[name].value for each in better)])
            for name, random in self._random.items()
        }
        return {name: Estimate(bits, 0.0, bits) for name, bits in most.items()}

    def _verdict(
        self, label: Label, bits: EntropyBits, result: ConfigurationResult, fault: str | None
    ) -> Verdict | None:
        """Return the verdict on a measured entropy of a label.

        None if nothing was measured, if there is no theory for the strategy, or if the plan has
        too few whole fetches.
        """
        if fault is not None:
            return wrong_data(fault)
        configuration = result.configuration
        settings = self._plans.differing(configuration.plan_settings)
        replayed = self._replayed(settings) if self._plans.has_theory else None
        if replayed is None or result.cells_per_second is None or bits.measured is None:
            return None
        planned = replayed[label.name].fetch_deviation
        if planned is None:
            return None
        error = self._standard_error(bits.measured, label, result, planned)
        return verdict(bits, standard_error=error)

    def _standard_error(
        self,
        bits: Estimate,
        label: Label,
        result: ConfigurationResult,
        planned: float | None,
    ) -> float:
        """Return the standard error of a measured entropy."""
        configuration = result.configuration
        fetch_size = self._plans.batch_size * configuration.fetch_factor
        return standard_error_of(
            bits,
            result.n_rounds + 1,  # the first round counts here too
            planned,
            fetches_per_round=configuration.fetches_per_round,
            fetches_per_epoch=label.n_per_epoch // fetch_size,
            fetches_per_block=-(-configuration.block_size // fetch_size),
        )

    def _order(self, label: Label, block_size: int) -> StorageOrder:
        in_blocks, single_rows = (self._replayed((size, 1)) or {} for size in (block_size, 1))
        return storage_order(
            in_blocks[label.name],
            single_rows[label.name],
            random_bits=max(
                self._random[label.name], self._random_of_known(label, in_blocks) or 0.0
            ),
            n_distinct=label.n_per_epoch // self._plans.batch_size,
        )


def _bounded(found: Estimate, most: float) -> Estimate:
    """Return a mean, with all possible values as its interval if that was infinite."""
    if found.high < inf:
        return found
    return Estimate(found.value, 0.0, max(most, found.value))


def storage_order(
    in_blocks: LabelEntropy, single_rows: LabelEntropy, *, random_bits: float, n_distinct: int
) -> StorageOrder:
    """Return the entropy that large blocks cost, and whether it is more than chance.

    If rows are stored in random order, the minibatches of one epoch are random samples without
    common rows. The mean of G of them has the deviation of one, taken from a replay of single rows,
    divided by the root of G. Further epochs add no new minibatches, so G is at most the
    ``n_distinct`` of an epoch. Both replays are at fetch factor 1.
    """
    # One minibatch to a fetch, so that fetches are minibatches.
    deviation = single_rows.fetch_deviation or 0.0
    n = min(in_blocks.n_minibatches, max(1, n_distinct))
    return StorageOrder(
        block_size=in_blocks.block_size,
        expected_bits=in_blocks.bits.value,
        random_bits=random_bits,
        tolerance_bits=BEYOND_CHANCE * deviation / n**0.5,
    )
