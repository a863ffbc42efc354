"""Collections in PostgreSQL pass the suite."""

import itertools
import warnings
from dataclasses import replace

import pytest
from tests.loader.matrices import adata_of

from cellfeed import PostgresSource, load_database
from cellfeed.testing import SourceConformance


class TestPostgres(SourceConformance):
    dtypes = ("<f2", "<f4", "<f8", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "|b1")
    elements = ("X", "layers/counts", "raw/X")
    max_examples = 6

    def cases(self, **options):
        def storable(case):  # a value that is there twice is added up when it is loaded
            columns = "in any order" if case.columns == "some twice" else case.columns
            return replace(case, columns=columns)

        return super().cases(**options).map(storable)

    @pytest.fixture
    def write(self, tmp_path, postgres_server):
        numbers = itertools.count()

        def write(case):
            number = next(numbers)
            adata = adata_of(case)
            path, name = tmp_path / f"{number}.h5ad", f"{tmp_path.name} {number}"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of AnnData's own
                adata.write_h5ad(path)
            done = load_database(
                path,
                postgres_server.url,
                name,
                elements=[case.element],
                database_options=postgres_server.options,
            )
            source = PostgresSource(done.url, storage_options=postgres_server.options)
            source.elements = {case.element: source.elements[case.element]}
            return source

        return write
