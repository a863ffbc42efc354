"""A throughput with its interval, as it is written."""

from cellfeed_tuner._interval import Estimate

__all__ = ["interval"]

# Below which number, by what it is divided, how many decimals are shown, and the unit.
_SHORT_FORMS = (
    (99_999.5, 1, 0, ""),
    (999_950, 10**3, 1, "k"),
    (9_999_500, 10**3, 0, "k"),
)


def interval(speed: Estimate, *, shorten: bool = False) -> str:
    """Return a throughput with its interval; each number in six characters, if it is to be short.

    Examples
    --------
    >>> interval(Estimate(43_932.4, 41_612.0, 46_525.0))
    '43,932 [41,612, 46,525]'
    >>> interval(Estimate(1_234_567.0, 99_999.0, 11_300_000.0), shorten=True)
    '1,235k [99,999, 11.30M]'
    """
    numbers = [speed.value, speed.low, speed.high]
    value, low, high = (_six_characters(n) if shorten else f"{n:,.0f}" for n in numbers)
    return f"{value} [{low}, {high}]"


def _six_characters(number: float) -> str:
    for limit, divisor, decimals, unit in _SHORT_FORMS:
        if number < limit:
            return f"{number / divisor:,.{decimals}f}{unit}"
    return f"{number / 10**6:.2f}M"
