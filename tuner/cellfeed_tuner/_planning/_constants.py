"""Numbers that decide what a search proposes, races and chooses, and where each comes from."""

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
"""Standard deviation by which a cost deviates from the sum with each doubling of the fetch. Chosen:
buffers outgrow caches, and memory is slow to get."""
DEVIATION, ALONE, OF_SIZES, REACH, CLOSE = 0.15, 0.25, 0.5, 3.0, 0.5
"""Standard deviation by which a cost deviates otherwise; shares of its variance that neighbours do
not have in common, and that do not depend on workers; and doublings over which the rest, and the
part of one alone, fade. Chosen."""
BY_OTHERS = 0.5
"""Standard deviation by which a cost deviates with each combination of other settings. Chosen: the
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
FIRST_TRIALS = 4
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

# What there is to choose from

MOST_LISTED = 2000
"""Configurations of a space that are listed; of more, only a coarse grid and what is around the
best. Chosen: each pair of sizes takes some 50 ms to replay, and the cost model's covariance grows
with their square."""
SIZE_STEP, WORKER_STEP = 4, 2
"""Factors between neighbours in the coarse grid: of sizes, and of processes and threads. Chosen:
these have less far to go."""
SIGNIFICANT_BITS = 4
"""Proposals are rounded to so many significant bits. Chosen: neither speed nor entropy changes
measurably within steps of 6 % to 12 %."""
AROUND_STEP = 2**0.5
"""Factor between a size and its neighbours around a configuration. Chosen."""
AROUND = ((-2, -2), (-1, -1), (1, 1), (2, 2), (-1, 0), (1, 0), (0, -1), (0, 1))
"""How many of these steps are taken in block and fetch. Chosen: what has as many blocks in a fetch
mixes as well, and what has more mixes better."""
RANDOM_TRIALS = 4
"""What others than the cost model draw at random, before they go by what was measured. Chosen."""

# Turns

LEAST_TURNS = 4
"""Turns without which nothing is said to be decided. Chosen."""
TURN_ROUNDS = 2
"""Counted rounds of a replicate in a turn, at least. Chosen: the least turns make a throughput."""
TURN_VARIANCES = (0.0, 0.3, 1.0, 3.0, 10.0, 100.0, 1e3, 1e4, 1e6)
"""How much turns may differ: the variance of what a moment does to a whole turn, by that of looks
within one. Chosen."""
NOTHING, NEXT_TO_NOTHING = 1e-15, 1e-10
"""A sum of squares below which nothing differs, and what is rounding beside the largest. Chosen."""
FINALIST_SHARE = 0.5
"""Share of the most turns of any with fewer than which a configuration has left the race.
Chosen."""
FEWEST_PRODUCTS = 4
"""Pairs of neighbouring looks without which nothing is said of what looks of a time have in common.
Chosen."""

# Time

PROPOSE_UNTIL, TURNS_UNTIL_WITH_STEP = 0.6, 0.75
"""Shares of the budget until which something is looked at for the first time, and until which there
are turns where a training step is to be measured afterwards. Chosen."""
LIMIT_SHARE, LEAST_REPLICATE_LIMIT_SECONDS = 0.25, 5.0
"""A look is stopped after this share of the budget, and not before so many seconds. Chosen."""
FIRST_LIMIT_SHARE, LEAST_FIRST_LIMIT_SECONDS = 0.125, 3.0
"""The same of first looks, as long as none has come so far. Chosen: it is not known then how slow
the disk is, and the process takes a part of it to start."""
UNKNOWN_CELLS_PER_SECOND = 5000.0
"""What a configuration is expected to give before anything is measured. Chosen: what a slow disk
gives to large fetches, so that none is begun with that would take too long there."""
# What is chosen

NEED_MARGIN = 1.05
"""What is looked for is faster than needed by this factor. Chosen: the lower end of its interval
has to be as fast."""
SHARE_PER_DOUBLING = 2e-5
"""What twice the memory is worth, as a share of random sampling's entropy. Chosen: of what mixes
alike, the smaller is proposed."""
SAME_MEMORY_SHARE = 0.05
"""Memories that differ by less are the same. Chosen: one configuration takes that much more or
less from run to run."""
DEPTH_ROUNDS, FEWEST_DEPTH_TURNS, MOST_DEPTH_TURNS = 2, 2, 16
"""Rounds of a look at a depth of reading ahead; turns without which depths are not compared, and
after which they are no longer. Chosen."""
MOST_BYTES_AHEAD = 256 << 20
"""What is on its way from a server at most. Source: `cellfeed.CellDataset`."""
