"""Numbers that decide what a search proposes and races, and where each comes from."""

__all__ = [
    "ALONE",
    "ANY_SCALE",
    "BY_OTHERS",
    "BY_SIZE",
    "CLOSE",
    "DEPARTURE",
    "DOUBTED_GAIN",
    "ENOUGH_WORLDS",
    "FIRST_LOOKS",
    "HALVINGS",
    "JITTER",
    "KNOWN",
    "LEAST_CHANCE",
    "MOST_DRAWN",
    "MOST_REPLAYED",
    "NOISES",
    "NOISE_WIDTH",
    "NOT_AHEAD",
    "NO_WEIGHT",
    "N_DRAWS",
    "N_WORLDS",
    "OF_SIZES",
    "OPTIMISM",
    "PRICES",
    "REACH",
    "SERIAL",
    "SLACK_SECONDS",
    "SURVEY_UNTIL",
    "USUAL_NOISE",
]  # fmt: skip

# What a configuration costs before it is measured

PRICES = {
    "fetch": (0.5, 3.0),
    "block": (-1.0, 1.7),
    "file": (0.0, 2.5),
    "chunk": (-1.0, 1.5),  # of one row's share
    "transfer": (-1.0, 1.0),  # from a worker's process, per cell
    "worker": (-2.0, 0.0),  # what each worker adds to each cell, by standing in the others' way
}
"""Decades within which a price lies, in prices of a cell: what reading and placing one takes once
its chunk is there. Chosen: generous beside all recorded grids, none of which it was fitted to."""
SERIAL = (-2.0, 0.0)
"""Decades of the share of all reading that workers do not divide. Chosen: from hardly any to
all."""
NOT_AHEAD = 0.5
"""What is added to the logarithm of a cost at most, divided by the fetches of an epoch, since the
first fetch is not read ahead. Chosen."""
BY_SIZE = 0.1
"""Standard deviation by which a cost departs from the sum with each doubling of the fetch. Chosen:
buffers outgrow caches, and memory is slow to get."""
DEPARTURE, ALONE, OF_SIZES, REACH, CLOSE = 0.15, 0.25, 0.5, 3.0, 0.5
"""Standard deviation by which a cost departs otherwise; shares of its variance that neighbours do
not have in common, and that do not depend on workers; and doublings over which the rest, and the
part of one alone, fade. Chosen."""
BY_OTHERS = 0.5
"""Standard deviation by which a cost departs with each combination of other settings. Chosen: the
sum says nothing of them."""
ANY_SCALE = 3.0
"""Standard deviation of the unit of time, as a logarithm. Chosen: nothing is known of it."""
N_WORLDS, ENOUGH_WORLDS, HALVINGS, NO_WEIGHT = 4000, 200, 8, 1e-6
"""Draws of the prices; how many equally likely ones are enough, how exactly that is met, and what
share of the likeliest one's weight is none. Chosen: with one normal distribution in their place,
choices among recorded grids are as good, but worse in ranges of settings."""
NOISES = (0.01, 0.4, 8)
"""The least and the largest relative spread that looks may have, and how many between are tried.
Chosen: from a quiet machine to one that is hardly of use."""
USUAL_NOISE, NOISE_WIDTH = 0.08, 0.6
"""What it usually is, and the standard deviation of its logarithm. Measured: half of the grids of
`bench/grids` were recorded with spreads of 5 to 20 %."""
JITTER = 1e-9
"""A variance that is added to each look's. Chosen: so that matrices can be inverted."""

# What is looked at, and for how long something races

N_DRAWS, MOST_DRAWN = 512, 128
"""Draws of all costs that chances are counted in, and of how many configurations, the most
promising ones, they are drawn. Chosen: a chance of 5 % is then known to 1 %."""
LEAST_CHANCE = 0.05
"""Probability of being the best below which something is out of the race. Chosen."""
OPTIMISM = 0.84
"""Quantile of the difference to the leader that chooses what is held against it. Chosen: that of
one standard deviation."""
KNOWN = 0.7
"""Share of another's error below which the leader's own needs no look beside the other. Chosen."""
DOUBTED_GAIN = 0.05
"""Gain over the best that must have been expected of what a single look puts out of the race, for a
second look. Chosen: what is as close as that is as good."""
FIRST_LOOKS = 4
"""Configurations that are looked at before any is compared, one of them with workers and one
without. Measured: with three, choices among recorded grids are as good, and in ranges of settings
they are worse."""
MOST_REPLAYED = 6
"""Pairs of sizes of a large space that are replayed where nothing known mixes well enough.
Chosen."""
SURVEY_UNTIL = 0.8
"""Share of the budget until which what comes nearest to being feasible is measured, where nothing
is. Chosen."""
SLACK_SECONDS = 5.0
"""Seconds beyond what should suffice for a loop with a training step, before it is stopped.
Chosen."""
