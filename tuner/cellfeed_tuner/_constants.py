"""Numbers that determine what ``autotune`` measures and says, and where each comes from.

`docs/constants.py` writes a page of these and of the other modules with this name. The commands'
help shows some of them, so this module imports nothing.
"""


# Where nothing is given

DEFAULT_BLOCK_SIZES = (1, 4, 16, 64, 256, 1024)
"""Block sizes to search. Source: the paper's, from single cells up."""
DEFAULT_FETCH_FACTORS = (1, 4, 16, 64, 256)
"""Fetch factors to search. Source: the paper's, from single minibatches up."""

DEFAULT_BUDGET_SECONDS = 60.0
"""Time budget in seconds. Chosen: what a user will wait before a training."""

DEFAULT_SAMPLER = "cost-model"
"""What proposes configurations. Measured: the best in replays of recorded grids."""
RACE, RACE_SIZE = "race", 6
"""The sampler that races the largest configurations, this many, and measures no others. Measured:
as good as the default in replays with little noise."""
SAMPLERS = (DEFAULT_SAMPLER, RACE, "gp", "random", "tpe")
"""What can propose configurations. Source: our own two, and Optuna's samplers."""

PREFETCHES = (1, 2, 4, 8, 16)
"""Prefetch depths, in fetches, to measure for files on servers. Chosen."""
REMOTE_PREFETCH = 8
"""Prefetch depth for files on servers if none is chosen. Source: `cellfeed.CellDataset`."""

DEFAULT_ENTROPY_FLOOR = 0.99
"""Entropy floor, as a share of random sampling's entropy. Measured: at 0.95, linear classifiers
retained as little as half of what they learn from random minibatches
(notebooks/worth_of_entropy.ipynb)."""

# What is measured

REPLICATE_SECONDS = 0.75
"""Seconds of counted rounds in a replicate; exceeded if its rounds take longer. Chosen: short
compared with a budget of 60 s, and several rounds of most configurations."""
MOST_ROUNDS_OF_REPLICATE = 64
"""Most counted rounds in a replicate. Chosen: more make it no more exact."""
FEWEST_ROUNDS = 4
"""Fewest rounds after the first for a throughput. Chosen: an interval from fewer says hardly
anything."""
LEAST_ROUNDS = 8
"""Fewest rounds after the first for a throughput that is not reported as "not enough samples".
Chosen: twice the fewest."""
MOST_ROUNDS = 200
"""Rounds after which a standalone measurement ends. Chosen: more rounds do not narrow an interval
that drifts with the machine."""
LIMIT_TIMES, LEAST_LIMIT_SECONDS = 20, 60.0
"""A standalone measurement is stopped after this many times its given time, but not before this
many seconds. Chosen: even a slow machine should reach the fewest rounds."""
FEW_BATCHES, MANY_BATCHES = 4, 8
"""Batches of adjacent rounds for the interval of one process: with few rounds, and with many.
Chosen: adjacent rounds are not independent, but batch means nearly are."""
EPOCHS_APART = 1000
"""Distance between the first epochs of two measurements. Chosen: no measurement runs through as
many, so each reads different rows."""
STRAY_PAGES = 0.05
"""Share of pages that may be in the other cache state. Chosen: other processes may have mapped
some."""
WARM_SHARE_OF_MEMORY = 0.8
"""Largest share of available memory that files may take to be measured warm. Chosen: the loader
needs the rest."""
FETCHES_AHEAD = 2
"""Fetches that are read or planned while one is delivered. Source: `cellfeed.CellDataset`."""
LEAST_MINIBATCHES_AHEAD = 8
"""Fewest minibatches ahead whose pages are kept when caches are dropped. Chosen: more than the
kernel reads ahead in a sequentially read file."""
LOOKING_SHARE = 0.04
"""Largest share of the time for checking which pages are cached, and for checking memory. Chosen:
within the noise of a replicate."""
MEMORY_EVERY_SECONDS, MEMORY_AT_LEAST_EVERY_SECONDS = 0.05, 0.5
"""Seconds between two checks of a process's memory: initially, and at most if checking takes more
than its share. Chosen: short compared with a fetch, and with a replicate."""
ANSWER_SECONDS = 4.0
"""Seconds beyond a time limit in which the measuring process must answer, and in which processes
that were killed must end. Chosen: short compared with what a run may take beyond its budget.
"""
HUNG_SHARE, HUNG_TIMES, COMPUTING_SHARE = 0.5, 3.0, 0.05
"""A loader hangs if it delivered before, and then delivered nothing for the first share of its
time limit and this many times as long as ever before, while it took less than the last share of a
processor. Chosen: slow loaders are regular, or compute."""
LONG_EPOCH = 3
"""An epoch is long if it has this many times the rounds at its start, which are requested from a
server or go into new memory. Chosen."""
LONG_EPOCH_OF_WORKERS = 10
"""The same for epochs read by worker processes, which are restarted in each epoch. Chosen: what is
left out would change throughput by a few percent."""
STEP_SECONDS, STEP_LEAST_ROUNDS = 1.0, 4
"""Seconds and rounds for timing a user's training step. Chosen: as long as two replicates."""

# How mixed minibatches are

MIXING_ROWS, MOST_MIXING_ROWS = 1 << 18, 1 << 22
"""Rows of a plan for computing its entropy: initially, and at most. The number is quadrupled as
long as the interval contains the floor. Chosen: configurations near the floor deserve more time."""
MIXING_ROWS_OF_SETS = 1 << 20
"""Rows of a plan of random sets, with which others are compared. Chosen: between the two above."""
LEAST_FETCHES = 16
"""Fewest fetches for the interval of an entropy. Chosen: minibatches of one fetch resemble each
other."""
EPOCHS_OF_ENDS, MOST_EPOCHS = 16, 256
"""Epochs whose two ends are replayed for a large collection, and most epochs that are replayed for
a small one. Chosen."""
MOST_DRAWS = 1 << 22
"""Draws of an epoch that represent all of them. Chosen: frequencies are then known to 0.05 %."""
MOST_IN_BLOCKS = 1 << 18
"""Rows of an epoch that show how labels are distributed over its blocks. Chosen: thousands of
typical blocks."""
LEAST_CELLS_PER_LABEL, LEAST_CELLS_PER_FRACTION = 2, 10
"""Fewest cells per value, on average, for values to be labels and not identifiers; and, for
fractions, to be labels and not a quantity. Chosen."""

# Intervals

CONFIDENCE = 0.95
"""Confidence level of intervals. Chosen: the field's convention."""
USUAL_SPREAD, USUAL_FREEDOM = 0.05, 2.0
"""Prior spread of replicates on a machine that does little else, and its weight in degrees of
freedom. Chosen: replicates of one configuration soon outweigh it."""
BEYOND_CHANCE = 3.8906
"""Standard errors that a difference must exceed to be reported as a fault. Chosen: chance exceeds
it once in 10,000 times, so about 1 % of grids of 100 configurations get a false alarm."""

WRONG_SHARE = 0.02
"""Share of random sampling's entropy by which another loader may differ from its plan beyond
chance. Chosen: it may leave out the end of an epoch, which the plan contains.
"""

# Why

LEAST_SAVING = 0.15
"""Smallest share of the time for a stage to be called the bottleneck. Chosen."""
SURE, LIKELY = 0.95, 0.75
"""Shares of bootstrap resamples that name the same bottleneck for "clearly" and "probably".
Chosen."""
VAGUE_SHARE = 0.5
"""A stage is only "possibly" the bottleneck if its interval begins below this share of its mean.
Chosen."""
MUCH_WAITING = 0.01
"""Share of its time that training may wait for a loader that is called fast enough. Chosen."""
N_RESAMPLES = 1000
"""Number of bootstrap resamples of rounds for this. Chosen: the share is then known to 1 %."""
LEAST_ACCOUNTED, MOST_ACCOUNTED = 0.7, 1.4
"""If the stages explain less or more than these shares of the time, they explain it badly.
Chosen."""
LEAST_SPEEDUP = 1.2
"""Smallest speedup from other storage that is worth mentioning. Chosen."""
CHUNKS_PER_BLOCK = 4
"""Chunks per block in rewritten files. Chosen: smaller chunks cost little outside the block."""
PRESHUFFLE_OVERHEAD = 3.0
"""Time of `preshuffle`, as a multiple of reading and encoding each cell once. Chosen: above the
conversions that `bench/advice` compares it with."""
LEAST_CHUNK_BYTES = 16_384
"""Smallest chunk size, in bytes, that is advised. Chosen: smaller chunks cost more to find than
they save."""
CELLS_PER_STORE_CHUNK = 64
"""Cells per chunk of a shuffled copy. Source: `cellfeed.preshuffle`."""
LEAST_BUSY_SHARE, MUCH_SPREAD, MUCH_START = 0.1, 0.1, 0.05
"""Smallest share of the processors taken by other programs, smallest spread of replicates, and
smallest share of an epoch that its start takes, that are worth mentioning. Chosen."""

# Earlier runs

MOST_FIRST = 2
"""Most configurations from an earlier run that are measured first. Chosen."""

# The budget

EXPLAIN_SHARE, PREFETCH_SHARE = 0.1, 0.35
"""Shares of the budget: for finding the bottleneck, and for choosing the prefetch depth of a
server. Chosen."""
LEAST_OVERTIME_SECONDS, OVERTIME_SHARE = 15.0, 0.15
"""A run ends within this many seconds after its budget, or within this share of it, whichever is
more. Chosen: half of it is for a first measurement if the start took the budget, the rest for
writing."""
COMPARING_SECONDS = 2.0
"""Most seconds for reading delivered cells again from their files. Chosen."""
LEAST_SEARCH_SECONDS = 3.0
"""If less is left of the budget for measuring, half of the overtime is used too. Chosen: less
measures nothing."""
WRITING_SECONDS, WRITING_SHARE = 2.0, 0.4
"""Seconds that the command reserves for the picture and the page, or this share of what its start
took, whichever is more. Measured: what these take, also on a busy machine."""
SLOW_START_SHARE = 0.4
"""If the start took more than this share of the budget, the search has all the rest. Chosen."""
REPLAY_SHARE, LATE_MIXING_ROWS = 0.25, 1 << 15
"""After this share of the budget, entropies are computed over so many rows of each plan. Chosen:
their intervals are then wider, but throughput can be measured."""


# Numbers that determine what a search proposes, compares and chooses, and their origins.

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
