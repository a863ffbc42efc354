"""What an Optuna study proposes, where gains and constraints are known exactly."""

import numpy as np
import optuna
import pytest

from cellfeed_tuner import Configuration
from cellfeed_tuner._planning._planner import NOT_WORTH
from cellfeed_tuner._planning._proposals import Proposals
from cellfeed_tuner._planning._space import Space

SPACE = Space.of(range(1, 4097), range(1, 513), range(9))
BLOCKS_PER_FETCH = 50


def gain(configuration):
    """Grows with both sizes; three workers are best."""
    sizes = configuration.block_size * configuration.fetch_factor
    return np.log2(sizes) / 22 / (1 + abs(configuration.num_workers - 3))


def gains(configurations):
    return np.array([gain(each) for each in configurations])


def shortfall(configuration):
    """A fetch must hold so many blocks, and there is memory for so many minibatches."""
    blocks = 64 * configuration.fetch_factor / configuration.block_size
    too_few = max(0.0, np.log(BLOCKS_PER_FETCH / blocks))
    return too_few + max(0.0, np.log(configuration.minibatches_in_memory / 1000))


def proposed(n_rounds=6, *, gains=gains, shortfall=shortfall, seed=0, known=None):
    known = SPACE.coarse_grid() if known is None else known
    proposals = Proposals(SPACE, known=known, seed=seed)
    found = [proposals.propose(gains, shortfall, lambda each: 1.0) for _ in range(n_rounds)]
    return found[-1], proposals


# At three workers memory allows a fetch of 111 minibatches, and that blocks of 142 cells.
BEST = gain(SPACE.nearest(block_size=142, fetch_factor=111, num_workers=3))


@pytest.mark.parametrize("seed", range(3))
def test_they_come_near_to_the_best_that_meets_the_constraints(seed):
    found, proposals = proposed(seed=seed)
    assert gain(found[0]) >= 0.95 * BEST
    coarse = max(gain(each) for each in SPACE.coarse_grid() if not shortfall(each))
    assert gain(found[0]) > coarse
    assert proposals.n_considered < 500


def test_all_are_feasible_and_worth_it_and_the_best_come_first():
    found, _ = proposed()
    values = [gain(each) for each in found]
    assert found
    assert all(each in SPACE for each in found)
    assert not any(shortfall(each) for each in found)
    assert values == sorted(values, reverse=True)


def test_where_nothing_is_worth_it_nothing_is_proposed_and_no_constraint_is_asked_about():
    asked: list[Configuration] = []

    def noted(configuration):
        asked.append(configuration)
        return 0.0

    found, _ = proposed(
        gains=lambda configurations: np.full(len(configurations), NOT_WORTH / 2), shortfall=noted
    )
    assert found == asked == []


def test_a_small_feasible_part_is_found_by_how_much_others_fall_short():
    def far_off(configuration):
        sizes = configuration.block_size, configuration.fetch_factor
        return sum(max(0.0, abs(np.log2(size / 100)) - 0.3) for size in sizes)

    assert all(far_off(each) for each in SPACE.coarse_grid())
    found, _ = proposed(gains=lambda them: np.ones(len(them)), shortfall=far_off)
    assert found
    assert all(far_off(each) == 0 for each in found)


def test_what_is_dear_needs_a_larger_gain():
    proposals = Proposals(SPACE, known=SPACE.coarse_grid(), seed=0)
    cheap = proposals.propose(
        lambda them: np.ones(len(them)), lambda each: 0.0, lambda each: each.fetch_factor**2
    )
    assert {each.fetch_factor for each in cheap} == {1}


def test_the_same_seed_proposes_the_same():
    assert proposed(seed=5)[0] == proposed(seed=5)[0]


def test_optuna_says_nothing(capfd):
    proposed(2)
    assert capfd.readouterr() == ("", "")
    assert optuna.logging.get_verbosity() == optuna.logging.INFO
