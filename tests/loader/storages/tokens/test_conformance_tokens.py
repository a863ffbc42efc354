"""Documents and windows of token streams pass the suite of sources."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tests.loader.sources.suites import Suite
from tests.loader.sources.test_conformance_ragged import rows_of

from cellfeed import TokenStream, TokenStreamWriter


class Documents(TokenStream):
    """Without the column that the suite does not write, and with numbers, written as text."""

    def obs_names(self):
        return [name for name in super().obs_names() if name != "shard"]

    def read_obs(self, columns):
        return with_numbers(super().read_obs(columns))

    def read_obs_rows(self, columns, rows):
        return with_numbers(super().read_obs_rows(columns, rows))


def with_numbers(obs):
    return obs.assign(number=obs["number"].astype(float)) if "number" in obs else obs


class TestDocuments(Suite):
    layouts = ("ragged",)
    dtypes = ("<f4", "|b1", "|u1", "<u2", "<i8", "<f2")
    max_examples = 8
    decoded_here = True

    def storages(self, layout, dtype):
        return st.integers(1, 3)

    def stored(self, path, case):
        rows = rows_of(case)
        text = case.obs.astype(object).map(str)
        obs = text.where(case.obs.notna(), None).to_dict("records")
        for k, some in enumerate(np.array_split(np.arange(case.n_rows), case.storage)):
            options: Any = {"documents": True, "obs": ["plate", "number"]}
            with TokenStreamWriter(path, case.dtype, shard=str(k), **options) as writer:
                for row in some.tolist():
                    writer.append(rows.row(row), obs=obs[row])
        stream = Documents(path, documents=True)
        stream.elements = {"X": stream.elements["X"]}
        return stream


class TestWindows(Suite):
    """Windows, of which each row of a dense matrix is one, over the borders of shards."""

    layouts = ("dense",)
    dtypes = ("<f4", "|b1", "|u1", "<u2", "<i8", "<f2")
    max_examples = 8
    decoded_here = True

    def storable(self, case):
        return replace(case, n_vars=max(1, case.n_vars))

    def storages(self, layout, dtype):
        return st.lists(st.floats(0, 1), max_size=3)

    def stored(self, path, case):
        tokens = case.dense.reshape(-1)
        bounds = sorted(int(share * tokens.size) for share in case.storage)
        for k, some in enumerate(np.split(tokens, bounds)):
            with TokenStreamWriter(path, case.dtype, shard=str(k)) as writer:
                writer.append(some)
        return Windows(path, case)


class Windows(TokenStream):
    """With obs, and names of columns, of the case."""

    def __init__(self, folder, case):
        super().__init__(folder, case.n_vars)
        self._obs = case.obs
        names = partial(np.array, case.var.index.tolist(), object)
        vars(self.elements["X"])["var_names"] = names

    def obs_names(self):
        return list(self._obs)

    def read_obs(self, columns):
        return self._obs[list(columns)]

    def read_obs_rows(self, columns, rows):
        return self._obs[list(columns)].iloc[rows]
