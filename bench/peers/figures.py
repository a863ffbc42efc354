"""From rounds to figures: speeds, ratios of the same rounds, shares of what is possible."""

from collections.abc import Iterable, Mapping

from intervals import Estimate, median_with_interval
from rounds import Result

Results = Mapping[str, Result]


def speed(result: Result) -> Estimate | None:
    """Return cells per second."""
    return median_with_interval(list(result.speeds().values()))


def first_minibatch_seconds(result: Result) -> Estimate | None:
    """Return the seconds from asking for an epoch to its first minibatch."""
    values = (each.get("first_minibatch_seconds") for each in result.rounds.values())
    return median_with_interval([value for value in values if value is not None])


def gigabytes_per_second(result: Result) -> Estimate | None:
    """Return how much a limit moved, None for a loader."""
    rounds = result.rounds.values()
    return median_with_interval([r["bytes"] / r["seconds"] / 1e9 for r in rounds if "bytes" in r])


def ratio(ours: Result, theirs: Result) -> Estimate | None:
    """Return how many times as fast the one is as the other, from rounds that both have."""
    our, their = ours.speeds(), theirs.speeds()
    return median_with_interval([our[number] / their[number] for number in our if number in their])


def versus_cellfeed(result: Result, results: Results) -> Estimate | None:
    """Return how many times as fast cellfeed is that does the same work."""
    ours = results.get(result.entry.versus or "")
    return None if ours is None else ratio(ours, result)


def lowest_limit(result: Result, results: Results) -> Result | None:
    """Return the limit that bounds an entry the most, of those that were measured."""
    limits = [results[name] for name in result.entry.limits if name in results]
    measured = [limit for limit in limits if limit.rounds]
    return min(measured, key=lambda limit: speed(limit).value, default=None)


def fastest(names: Iterable[str], results: Results) -> Result | None:
    """Return the fastest of some entries, of those that were measured."""
    measured = [results[name] for name in names if name in results and results[name].rounds]
    return max(measured, key=lambda result: speed(result).value, default=None)
