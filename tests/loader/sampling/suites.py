"""The suite of strategies, with what the plan of an epoch makes of each."""

import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from cellfeed.testing import StrategyConformance
from cellfeed.testing._strategy import _delivered as delivered


class PlanConformance(StrategyConformance):
    """Plans of a strategy divide it among ranks and fetches."""

    def test_ranks(self, cases):
        """Ranks get disjoint rows, in equal numbers of minibatches of equal sizes."""

        def check(plan):
            n_ranks, together = plan.world_size, plan.strategy.n_together
            plans = [replace(plan, rank=rank) for rank in range(n_ranks)]
            sizes = [plan.delivered_rows(number).size for number in range(plan.n_fetches)]
            assert set(sizes[:-1]) <= {plan.fetch_size}
            assert sum(sizes) == plan.rows_per_stream
            assert plan.n_minibatches == -(-plan.rows_per_stream // plan.batch_size)
            rows = [delivered(each) for each in plans]
            assert [len(each) for each in rows] == [plan.rows_per_stream] * n_ranks
            counts = Counter(row for each in rows for row in each)
            alone = replace(plan, rank=0, world_size=1, drop_last=False)
            visited = Counter(delivered(alone))
            if plan.drop_last:
                assert plan.rows_per_stream % plan.batch_size == 0
                assert visited.total() - counts.total() < n_ranks * plan.batch_size
                assert counts <= visited
            else:
                assert counts.total() - visited.total() < n_ranks * together
                assert visited <= counts

        self._try_plans(cases, check)

    def test_fetches(self, cases):
        """Any fetch may be taken at any time, of a new, used or pickled plan, alone or not."""

        def check(plan, data):
            every = [plan.delivered_rows(number)[0] for number in range(plan.n_fetches)]
            for number in data.draw(st.permutations(range(plan.n_fetches))):
                for each in (plan, replace(plan), pickle.loads(pickle.dumps(plan))):
                    fetch = each.fetch(number)
                    assert (np.diff(fetch.rows) > 0).all()
                    assert fetch.rows[fetch.order].tolist() == every[number].tolist()
            n_whole = plan.n_whole_fetches
            if n_whole:
                first = data.draw(st.integers(0, n_whole - 1))
                together = plan.delivered_rows(first, n_whole - first)
                assert together.tolist() == [rows.tolist() for rows in every[first:n_whole]]
            for beyond in (-1, plan.n_fetches):
                with pytest.raises(IndexError):
                    plan.fetch(beyond)

        self._try_plans(cases, check, data=st.data())
