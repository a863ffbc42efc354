"""Numbers that decide what ``autotune`` measures and says, and where each comes from.

`docs/constants.py` makes a page of these, and of those of other modules of this name. The commands'
help shows some, and so nothing is imported here.
"""

# Where nothing is given

DEFAULT_BLOCK_SIZES = (1, 4, 16, 64, 256, 1024)
"""Block sizes that are searched. Source: those of the paper, from single cells up."""
DEFAULT_FETCH_FACTORS = (1, 4, 16, 64, 256)
"""Fetch factors that are searched. Source: those of the paper, from single minibatches up."""

DEFAULT_BUDGET_SECONDS = 60.0
"""Seconds to spend. Chosen: what a user waits for before a training."""

DEFAULT_SAMPLER = "cost-model"
"""What proposes configurations. Measured: the best in replays of recorded grids."""
RACE, RACE_SIZE = "race", 6
"""The sampler that races so many configurations, the largest, and measures nothing else. Measured:
in replays with little noise it is as good as the default."""
SAMPLERS = (DEFAULT_SAMPLER, RACE, "gp", "random", "tpe")
"""What may propose configurations. Source: the first two are ours, the others Optuna's."""

PREFETCHES = (1, 2, 4, 8, 16)
"""Depths of fetches read ahead that are measured of files on servers. Chosen."""
REMOTE_PREFETCH = 8
"""What is read ahead of these where nothing is chosen. Source: `cellfeed.CellDataset`."""

DEFAULT_ENTROPY_FLOOR = 0.99
"""Least entropy, as a share of random sampling's. Measured: at 0.95, linear classifiers kept as
little as half of what they learn from random minibatches (notebooks/worth_of_entropy.ipynb)."""

# What is measured

REPLICATE_SECONDS = 0.75
"""Seconds of counted rounds in a replicate, unless its rounds are longer. Chosen: short beside a
budget of 60 s, and several rounds of most configurations."""
FEWEST_ROUNDS = 4
"""Rounds after the first without which there is no throughput. Chosen: an interval of fewer says
hardly anything."""
LEAST_ROUNDS = 8
"""Rounds after the first without which a throughput is "not enough samples". Chosen: twice the
fewest."""
MOST_ROUNDS = 200
"""Rounds after which a measurement by itself ends. Chosen: more do not narrow an interval
that drifts with the machine."""
LIMIT_TIMES, LEAST_LIMIT_SECONDS = 20, 60.0
"""A measurement by itself is stopped after so many times the time that it was given, and not before
so many seconds. Chosen: a slow machine is to come to its least rounds."""
FEW_BATCHES, MANY_BATCHES = 4, 8
"""Batches of neighbouring rounds that an interval of one process rests on. Chosen: rounds side by
side are not independent, and means of batches nearly are."""
EPOCHS_APART = 1000
"""Epochs between the first ones of two measurements. Chosen: no measurement goes through as many,
so that each reads other rows."""
STRAY_PAGES = 0.05
"""Share of pages that may be in the other state of the cache. Chosen: other processes may have
mapped some."""
WARM_SHARE_OF_MEMORY = 0.8
"""Share of the available memory that files may take to be measured warm. Chosen: the loader needs
the rest."""
FETCHES_AHEAD = 2
"""Fetches that are read or planned while one is delivered. Source: `cellfeed.CellDataset`."""
LEAST_MINIBATCHES_AHEAD = 8
"""Minibatches that pages are kept for, at least, when caches are dropped. Chosen: what the
kernel itself reads ahead of a file read in order is less."""
LOOKING_SHARE = 0.04
"""Share of the time that finding out which pages are cached may take, and that looking at memory
may. Chosen: within the noise of a look."""
MEMORY_EVERY_SECONDS, MEMORY_AT_LEAST_EVERY_SECONDS = 0.05, 0.5
"""Seconds between two looks at the memory of a process, at first, and at most where looking takes
more than its share. Chosen: short beside a fetch, and beside a look at a configuration."""
LONG_EPOCH = 3
"""An epoch is long if it has so many times the rounds of its start: those that are asked of a
server, or go into new memory. Chosen."""
LONG_EPOCH_OF_WORKERS = 10
"""The same of an epoch that worker processes read, which are started anew in each. Chosen: what is
left out would change its throughput by a few percent."""
STEP_SECONDS, STEP_LEAST_ROUNDS = 1.0, 4
"""Seconds and rounds that a user's training step is timed for. Chosen: as long as two looks."""

# How mixed minibatches are

MIXING_ROWS, MOST_MIXING_ROWS = 1 << 18, 1 << 22
"""Rows of a plan that entropy is taken of, at first, and four times as many again and again while
the interval holds the floor, at most. Chosen: what is near
the floor is worth more time."""
MIXING_ROWS_OF_SETS = 1 << 20
"""Rows of a plan of random sets, which others are held against. Chosen: between the two above."""
LEAST_FETCHES = 16
"""Fetches that the interval of an entropy rests on, at least. Chosen: minibatches of one fetch
resemble each other."""
EPOCHS_OF_ENDS, MOST_EPOCHS = 16, 256
"""Epochs of which both ends are replayed, of a large collection; and epochs that are replayed of a
small one, at most. Chosen."""
MOST_DRAWS = 1 << 22
"""Draws of an epoch that stand for all of them. Chosen: frequencies are then known to 0.05 %."""
MOST_IN_BLOCKS = 1 << 18
"""Rows of an epoch that show how labels lie in its blocks. Chosen: thousands of usual blocks."""
LEAST_CELLS_PER_LABEL, LEAST_CELLS_PER_FRACTION = 2, 10
"""Cells of a value, on average, without which values are no labels but an identity; and, of
fractions, without which they are a quantity. Chosen."""

# Intervals

CONFIDENCE = 0.95
"""Share of intervals that hold the truth. Chosen: the field's custom."""
USUAL_SPREAD, USUAL_FREEDOM = 0.05, 2.0
"""How much replicates differ on a machine that does little else, and the degrees of freedom that
this is worth. Chosen: looks at one configuration soon outweigh it."""
BEYOND_CHANCE = 3.8906
"""Standard errors that a difference must exceed before anything is said to be wrong. Chosen: chance
does that once in 10,000 times, so that about 1 % of grids of 100 configurations get a false
alarm."""

# Why

LEAST_SAVING = 0.15
"""Share of the time without which no stage is called the bottleneck. Chosen."""
SURE, LIKELY = 0.95, 0.75
"""Shares of resampled rounds that name the same bottleneck for "clearly" and "probably". Chosen."""
N_RESAMPLES = 1000
"""Times that rounds are resampled for that. Chosen: their share is then known to 1 %."""
LEAST_ACCOUNTED, MOST_ACCOUNTED = 0.7, 1.4
"""Stages that explain less or more of the time than this share of it explain it badly. Chosen."""
LEAST_SPEEDUP = 1.2
"""Times the throughput that other storage must give to be worth a word. Chosen."""
CHUNKS_PER_BLOCK = 4
"""Chunks of a block in files that are written anew. Chosen: smaller chunks cost little beyond the
block."""
PRESHUFFLE_OVERHEAD = 3.0
"""What `preshuffle` takes for all that is beside reading and encoding each cell once, as a factor.
Chosen: above what conversions took that `bench/advice` holds it against."""
LEAST_CHUNK_BYTES = 16_384
"""Bytes of a chunk below which advice does not go. Chosen: smaller ones cost more to find than they
save."""
CELLS_PER_STORE_CHUNK = 64
"""Cells of a chunk of a shuffled copy. Source: `cellfeed.preshuffle`."""
LEAST_BUSY_SHARE, MUCH_SPREAD = 0.1, 0.1
"""Share of the processors that other programs must take, and spread of replicates, to be worth a
sentence. Chosen."""

# Earlier runs

MOST_FIRST = 2
"""First looks that an earlier run decides. Chosen."""

# The budget

EXPLAIN_SHARE, PREFETCH_SHARE, LEAST_THROUGHPUT_SHARE = 0.1, 0.35, 0.25
"""Shares of the budget for finding the bottleneck, or for how much to read ahead of a server, and
at least for throughput. Chosen."""
MOST_START_SECONDS, WRITING_SECONDS, LEAST_SHARE_LEFT = 15.0, 2.0, 0.5
"""The command's own start counts as spent up to the first, the picture and the page take the
second, and so much of a budget is left at least. Chosen: what takes longer has done something else
before."""
