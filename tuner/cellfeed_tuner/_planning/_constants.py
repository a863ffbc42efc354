"""Numbers that determine what a search proposes, compares and chooses, and their origins."""

# What a configuration costs before it is measured

PRICES = {
    "fetch": (0.5, 3.0),
    "block": (-1.0, 1.7),
    "file": (0.0, 2.5),
    "chunk": (-1.0, 1.5),  # a row's share of it
    "transfer": (-1.0, 1.0),  # from a worker process, per cell
    "worker": (-2.0, 0.0),  # what each worker adds to each cell, by contention
}
"""Ranges of prices, as powers of ten, relative to the price of a cell: reading and placing it once
its chunk is available. Chosen: wide enough for all recorded grids, to none of which it was
fitted."""
SERIAL = (-2.0, 0.0)
"""Range, as powers of ten, of the share of reading that workers do not divide. Chosen: from hardly
any to all."""
NOT_AHEAD = 0.5
"""Largest addition to the logarithm of a cost, divided by the fetches of an epoch, because the
first fetch is not read ahead. Chosen."""
BY_SIZE = 0.1
"""Standard deviation of a cost from the sum for each doubling of the fetch. Chosen: buffers outgrow
caches, and allocating memory is slow."""
DEVIATION, ALONE, OF_SIZES, REACH, CLOSE = 0.15, 0.25, 0.5, 3.0, 0.5
"""Standard deviation of a cost from the sum otherwise; shares of its variance that neighbours do
not share, and that do not depend on workers; and doublings over which the rest, and the unshared
part, decay. Chosen."""
BY_OTHERS = 0.5
"""Standard deviation of a cost for each combination of other settings. Chosen: the sum does not
model them."""
ANY_SCALE = 3.0
"""Standard deviation of the logarithm of the time unit. Chosen: nothing is known about it."""
N_WORLDS, ENOUGH_WORLDS, HALVINGS, NO_WEIGHT = 4000, 200, 8, 1e-6
"""Draws of the prices; how many equally likely draws are enough; the bisection steps to reach that
number; and the share of the likeliest draw's weight that counts as none. Chosen: with a single
normal distribution instead, choices on recorded grids are as good, but worse in ranges of
settings."""
NOISES = (0.01, 0.4, 8)
"""Smallest and largest relative spread of replicates, and how many values in between are tried.
Chosen: from a quiet machine to one that is hardly usable."""
USUAL_NOISE, NOISE_WIDTH = 0.08, 0.6
"""Typical relative spread, and the standard deviation of its logarithm. Measured: half of the grids
in `bench/grids` were recorded with spreads of 5 to 20 %."""
JITTER = 1e-9
"""Variance added to that of each replicate. Chosen: makes matrices invertible."""

# What is measured next, and what leaves the race

N_DRAWS, MOST_DRAWN = 512, 128
"""Draws of all costs for computing probabilities, and the number of most promising configurations
for which they are drawn. Chosen: a probability of 5 % is then known to 1 %."""
LEAST_CHANCE = 0.05
"""Probability of being the best below which a configuration leaves the race. Chosen."""
OPTIMISM = 0.84
"""Quantile of the difference from the leader that selects its challenger. Chosen: one standard
deviation."""
KNOWN = 0.7
"""If the leader's error is below this share of the challenger's, only the challenger is measured.
Chosen."""
PREDICTED_GAIN = 0.05
"""Expected gain over the best measured configuration at which one that there was no time to measure
is recommended. Chosen: as the next."""
DOUBTED_GAIN = 0.05
"""Expected gain over the best that earns a second replicate for a configuration that leaves the
race after one. Chosen: a configuration that close is as good."""
FIRST_TRIALS = 4
"""Configurations measured before any comparison, one of them with workers and one without.
Measured: with three, choices on recorded grids are as good, but worse in ranges of settings."""
MOST_REPLAYED = 6
"""Pairs of sizes replayed from a large space if no known pair mixes well enough. Chosen."""
SURVEY_UNTIL = 0.8
"""Share of the budget until which nearly feasible configurations are measured if none is feasible.
Chosen."""
SLACK_SECONDS = 5.0
"""Seconds beyond the expected time after which a loop with a training step is stopped. Chosen."""

# The space of configurations

MOST_LISTED = 2000
"""Most configurations of a space that are all listed; a larger space gets a coarse grid, then the
surroundings of the best. Chosen: replaying a pair of sizes takes about 50 ms, and the cost model's
covariance grows with the square of their number."""
SIZE_STEP, WORKER_STEP = 4, 2
"""Factors between neighbours in the coarse grid: for sizes, and for processes and threads. Chosen:
the latter span a smaller range."""
SIGNIFICANT_BITS = 4
"""Proposals are rounded to this many significant bits. Chosen: neither speed nor entropy changes
measurably within steps of 6 % to 12 %."""
AROUND_STEP = 2**0.5
"""Factor between a size and its neighbours around a configuration. Chosen."""
AROUND = ((-2, -2), (-1, -1), (1, 1), (2, 2), (-1, 0), (1, 0), (0, -1), (0, 1))
"""Numbers of these steps in block size and fetch. Chosen: a fetch with as many blocks mixes as
well, and one with more blocks mixes better."""
RANDOM_TRIALS = 4
"""Random trials of samplers other than the cost model before they use measurements. Chosen."""

# Turns

LEAST_TURNS = 4
"""Fewest turns for a decision. Chosen."""
TURN_ROUNDS = 2
"""Fewest counted rounds of a replicate in a turn. Chosen: the fewest turns then yield a
throughput."""
TURN_ODDS = 0.7
"""Logarithm of the odds of each of the following variances against the next larger one, before
anything is measured. Chosen: about two to one, since most machines do little else."""
TURN_VARIANCES = (0.0, 0.3, 1.0, 3.0, 10.0, 100.0, 1e3, 1e4, 1e6)
"""How much turns may differ: the variance of what affects a whole turn, relative to that of
replicates within a turn. Chosen."""
NOTHING, NEXT_TO_NOTHING = 1e-15, 1e-10
"""Sum of squares below which nothing differs, and share of the largest that counts as rounding.
Chosen."""
FINALIST_SHARE = 0.5
"""A configuration with fewer turns than this share of the most has left the race. Chosen."""
FEWEST_PRODUCTS = 4
"""Fewest pairs of adjacent replicates for estimating what replicates of the same time have in
common. Chosen."""

# Time

PROPOSE_UNTIL, TURNS_UNTIL_WITH_STEP = 0.6, 0.75
"""Shares of the budget until which new configurations are measured, and until which turns run if a
training step is measured afterwards. Chosen."""
LIMIT_SHARE, LEAST_REPLICATE_LIMIT_SECONDS = 0.25, 5.0
"""A replicate is stopped after this share of the budget, but not before this many seconds.
Chosen."""
LEAST_LIMIT_LEFT = 0.5
"""A replicate is stopped at the end of the budget, but not before this many seconds. Chosen."""
SUSTAINED_SHARE, LEAST_SUSTAINED_SECONDS = 0.08, 3.0
"""Share of the budget for measuring the choice without a break, and the least seconds of that.
Chosen: several times as long as a replicate, so that a loader that slows down is noticed."""
EARLY_TURNS = 2
"""Turns after which the likeliest may be measured for that long before the end. Chosen: it is then
likely to stay so."""
LONG_BUDGETS, SUSTAINED_LEFT = 4.0, 0.6
"""Time is reserved for that if the search has this many times as much; it is measured with the
second share of it at least. Chosen."""
SLOWED_SHARE = 0.7
"""A loader has slowed down if the second half of that has less than this share of the throughput
that was expected. Chosen: beyond the noise of a busy machine."""
FIRST_LIMIT_SHARE, LEAST_FIRST_LIMIT_SECONDS = 0.125, 3.0
"""The same for first replicates until one has succeeded. Chosen: the speed of the disk is unknown
then, and starting the process takes part of the time."""
UNKNOWN_CELLS_PER_SECOND = 5000.0
"""Expected throughput of a configuration before anything is measured. Chosen: what a slow disk
gives with large fetches, so that no replicate starts that would take too long there."""
# What is chosen

NEED_MARGIN = 1.05
"""Factor by which the search aims above the needed throughput. Chosen: the lower end of its
interval must be sufficient."""
SHARE_PER_DOUBLING = 2e-5
"""Value of twice the memory, as a share of random sampling's entropy. Chosen: of configurations
that mix alike, the smaller one is proposed."""
SAME_MEMORY_SHARE = 0.05
"""Memory sizes that differ by less count as equal. Chosen: memory of one configuration varies by
this much between runs."""
DEPTH_ROUNDS, FEWEST_DEPTH_TURNS, MOST_DEPTH_TURNS = 2, 2, 16
"""Rounds in a replicate of a prefetch depth, fewest turns for comparing depths, and most turns.
Chosen."""
MOST_BYTES_AHEAD = 256 << 20
"""Most bytes in flight from a server. Source: `cellfeed.CellDataset`."""
