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
