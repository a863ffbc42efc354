"""Parquet files pass the suite: lists of genes in files and folders, and a column per gene."""

import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import strategies as st
from tests.servers.web import WebServer

from cellfeed import ParquetSource
from cellfeed.testing import SourceConformance

pa = pytest.importorskip("pyarrow")

from tests.loader.storages.parquets import (  # noqa: E402
    lists_of,
    obs_columns,
    write_files,
    write_groups,
)

GROUPS = st.lists(st.integers(1, 12), min_size=1, max_size=4)  # ragged row groups
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "compression": st.sampled_from(["none", "snappy", "gzip", "zstd"]),
        "use_dictionary": st.booleans(),
        "data_page_version": st.sampled_from(["1.0", "2.0"]),
        "data_page_size": st.just(16),
        "write_page_checksum": st.booleans(),
        "write_statistics": st.booleans(),
    },
)


class TestLists(SourceConformance):
    """Genes have token ids; cells may begin with a marker."""

    layouts = ("csr",)
    max_examples = 12

    def storages(self, layout, dtype):
        return st.fixed_dictionaries(
            {
                "groups": GROUPS,
                "options": OPTIONS,
                "n_files": st.integers(0, 3),
                "lists": st.fixed_dictionaries(
                    {},
                    optional={
                        "kind": st.sampled_from(["list", "large_list"]),
                        "with_marker": st.booleans(),
                        "dictionary": st.booleans(),
                    },
                ),
            }
        )

    @pytest.fixture
    def write(self, tmp_path):
        numbers = itertools.count()

        def write(case):
            path, made = tmp_path / f"{next(numbers)}", case.storage
            has_marker = (
                made["lists"].get("with_marker", False) and np.dtype(case.dtype).kind != "u"
            )
            lists = lists_of(case, first_gene=3, **made["lists"] | {"with_marker": has_marker})
            table = pa.table(lists | obs_columns(case.obs))
            if made["n_files"]:
                write_files(path, table, made["n_files"], made["groups"], **made["options"])
            else:
                write_groups(path, table, made["groups"], **made["options"])
            genes = pd.DataFrame({"token_id": np.arange(3, 3 + case.n_vars)}, index=case.var.index)
            return ParquetSource(path, gene_table=genes, n_markers=int(has_marker))

        return write


class TestColumnPerGene(SourceConformance):
    layouts = ("dense",)
    max_examples = 12

    def cases(self, **options):
        def storable(case):  # there must be a gene
            return replace(case, n_vars=max(1, case.n_vars))

        return super().cases(**options).map(storable)

    def storages(self, layout, dtype):
        return st.fixed_dictionaries(
            {"groups": GROUPS, "options": OPTIONS, "n_files": st.integers(1, 3)}
        )

    @pytest.fixture
    def write(self, tmp_path):
        numbers = itertools.count()

        def write(case):
            path, made = tmp_path / f"{next(numbers)}", case.storage
            dense = case.dense
            columns = {name: dense[:, k] for k, name in enumerate(case.var.index)}
            table = pa.table(obs_columns(case.obs) | columns)
            write_files(path, table, made["n_files"], made["groups"], **made["options"])
            return ParquetSource(path, gene_columns=case.var.index.tolist())

        return write


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    pytest.importorskip("obstore")
    folder = tmp_path_factory.getbasetemp().parent
    with WebServer.in_process(folder) as url:
        yield folder, url


class TestOnServer(TestLists):
    """Files on a web server, read in byte ranges."""

    max_examples = 8

    @pytest.fixture
    def write(self, tmp_path, root):
        numbers, (folder, url) = itertools.count(), root

        def write(case):
            path, made = tmp_path / f"{next(numbers)}.parquet", case.storage
            table = pa.table(lists_of(case) | obs_columns(case.obs))
            write_groups(path, table, made["groups"], **made["options"])
            genes = pd.DataFrame({"token_id": range(case.n_vars)}, index=case.var.index)
            where = f"{url}/{path.absolute().relative_to(folder)}"
            return ParquetSource(where, gene_table=genes, n_markers=0)

        return write
