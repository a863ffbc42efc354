"""Numbers that several modules or a user's defaults share; others are beside their use.

The commands' help shows some, so this module imports nothing.
"""

# Where nothing is given

# Block sizes to search. Source: the paper's, from single cells up.
DEFAULT_BLOCK_SIZES = (1, 4, 16, 64, 256, 1024)
# Fetch factors to search. Source: the paper's, from single minibatches up.
DEFAULT_FETCH_FACTORS = (1, 4, 16, 64, 256)
# Time budget in seconds. Chosen: what a user will wait before a training.
DEFAULT_BUDGET_SECONDS = 60.0
# Seconds that a profile of the whole grid may take: more than any will.
UNLIMITED_SECONDS = 1e6
# Prefetch depth for files on servers if none is chosen. Source: `cellfeed.CellDataset`.
REMOTE_PREFETCH = 8
# Entropy floor, as a share of random sampling's entropy. Measured: at 0.95, linear classifiers
# retained as little as half of what they learn from random minibatches
# (notebooks/worth_of_entropy.ipynb).
DEFAULT_ENTROPY_FLOOR = 0.99
# The share of its time that an accelerator must compute. Source: MLPerf Storage v1 (training of
# 3D U-Net and ResNet-50).
UTILIZATION = 0.9

# What is measured

# Seconds of counted rounds in a replicate; exceeded if its rounds take longer. Chosen: short
# compared with a budget of 60 s, and several rounds of most configurations.
REPLICATE_SECONDS = 0.5
# The same for the first replicate of a configuration. Chosen: most fetches take a tenth of it.
PROFILE_SECONDS = 0.3
# Most counted rounds in a replicate. Chosen: more make it no more exact.
MOST_ROUNDS_OF_REPLICATE = 64
# Fewest rounds after the first for a throughput. Chosen: an interval from fewer says hardly
# anything.
FEWEST_ROUNDS = 4
# Fewest rounds after the first of a measurement by itself. Chosen: twice the fewest.
LEAST_ROUNDS = 8
# Largest share of the time for checking which pages are cached, and for checking memory. Chosen:
# within the noise of a replicate.
LOOKING_SHARE = 0.04
# Standard errors that a difference must exceed to be reported as a fault. Chosen: chance exceeds
# it once in 10,000 times, so about 1 % of grids of 100 configurations get a false alarm.
BEYOND_CHANCE = 3.8906
# Smallest share of the processors taken by other programs, and smallest share of an epoch that its
# start takes, that are worth mentioning.
LEAST_BUSY_SHARE, MUCH_START = 0.1, 0.05

# What is measured next, and what leaves the race

# Probability of being the best below which a configuration leaves the race.
LEAST_CHANCE = 0.05
# Fewest turns for a decision.
LEAST_TURNS = 4
# A replicate is stopped at the end of the budget, but not before this many seconds.
LEAST_LIMIT_LEFT = 0.5
# Least seconds for measuring the choice without a break. Chosen: several times as long as a
# replicate, so that a loader that slows down is noticed.
LEAST_SUSTAINED_SECONDS = 3.0
