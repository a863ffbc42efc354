"""Parquet files: which files, genes and rows, what is decoded, and what is said of others."""

import json
import re
from urllib.parse import parse_qs

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.servers.faults import Status, redirect
from tests.servers.web import WebServer

from cellfeed import (
    BlockShuffling,
    CellDataset,
    ColumnError,
    FormatError,
    MismatchError,
    ParameterError,
    ParquetSource,
    PathError,
    RemoteError,
    open_collection,
)

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from tests.loader.storages.parquet.written import (  # noqa: E402
    OTHER_ENCODINGS,
    lists_of,
    obs_columns,
    write_files,
    write_groups,
)

N_ROWS, N_VARS = 130, 17
COUNTS = np.random.default_rng(0).poisson(0.4, (N_ROWS, N_VARS)).astype(np.float32)
COUNTS[10:13] = 0  # cells of which nothing was counted
X = sp.csr_matrix(COUNTS)
OBS = pd.DataFrame(
    {
        "drug": [f"drug {k // 9}" for k in range(N_ROWS)],
        "plate": pd.Categorical(["a", "b", None, "c", "a"] * (N_ROWS // 5)),
        "row": np.arange(N_ROWS),
    }
)
GENES = pd.DataFrame(
    {
        "gene_symbol": [f"S{k}" for k in range(N_VARS)],
        "ensembl_id": [f"ENSG{k}" for k in range(N_VARS)],
        "token_id": np.arange(3, 3 + N_VARS),
    }
)
TABLE = pa.table(lists_of(X, first_gene=3, with_marker=True) | obs_columns(OBS))
ROW_GROUPS = [7, 20, 3, 11]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository like that of Tahoe-100M: three files, and tables of other things."""
    root = tmp_path_factory.mktemp("hub") / "datasets" / "owner" / "cells"
    write_files(root / "data", TABLE, 3, ROW_GROUPS)
    (root / "metadata").mkdir()
    pq.write_table(pa.Table.from_pandas(GENES), root / "metadata/gene_metadata.parquet")
    pq.write_table(pa.table({"drug": ["drug 0"]}), root / "metadata/drug_metadata.parquet")
    return root


def check_all(collection):
    assert np.array_equal(collection[:].X.toarray(), COUNTS)
    assert collection[[99, 3]].obs["row"].tolist() == [99, 3]
    assert collection.var_names.tolist() == GENES["ensembl_id"].tolist()


class TestFiles:
    @pytest.mark.parametrize(
        "where", ["data", "", "data/*.parquet", "data/train-0000[0-2].parquet"]
    )
    def test_folders_and_patterns_with_their_table_of_genes(self, repository, where):
        collection = open_collection(str(repository / where), obs=["row", "drug"])
        check_all(collection)
        assert len(collection.files) == 3
        assert collection.sources[0].read_var()["gene_symbol"].tolist() == [*GENES["gene_symbol"]]

    def test_a_table_in_the_folder_of_the_cells_is_none_of_them(self, tmp_path):
        write_files(tmp_path / "cells", TABLE, 2, ROW_GROUPS)
        pq.write_table(pa.Table.from_pandas(GENES), tmp_path / "cells/gene_metadata.parquet")
        check_all(open_collection(tmp_path / "cells", obs=["row"]))

    def test_any_name(self, repository, tmp_path):
        path = tmp_path / "cells"
        path.write_bytes((repository / "data/train-00000.parquet").read_bytes())
        source = ParquetSource(path, gene_table=GENES.set_index("gene_symbol"))
        assert open_collection(source).var_names[0] == "S0"
        with pytest.raises(FormatError, match="cells"):
            open_collection(path)

    def test_parquet_beside_other_cells_is_left_alone(self, write_h5ad, tmp_path):
        path = write_h5ad(np.eye(3, dtype=np.float32), {})
        (tmp_path / "both").mkdir()
        (tmp_path / "both/a.h5ad").write_bytes(path.read_bytes())
        pq.write_table(pa.table({"drug": ["a"]}), tmp_path / "both/drugs.parquet")
        assert len(open_collection(tmp_path / "both")) == 3


@pytest.fixture
def hub(repository, monkeypatch):
    """What the hub does for datasets: it lists files page by page, and redirects to their bytes."""
    pytest.importorskip("obstore")
    root = repository.parents[2]

    def answer(request):
        parts = request.path.strip("/").split("/")
        if "resolve" in parts:
            return redirect("/" + "/".join(parts[:3] + parts[5:]))
        if parts[0] != "api":
            return None
        base = root.joinpath(*parts[1:4])
        files = sorted(each for each in base.joinpath(*parts[6:]).rglob("*") if each.is_file())
        if not files:
            return Status(404)
        first = int(parse_qs(request.query).get("cursor", ["0"])[0])
        page = [{"type": "file", "path": str(each.relative_to(base))} for each in files]
        link = f'<{server.url}/{request.path}?cursor={first + 2}>; rel="next"'
        more = {"Link": link} if first + 2 < len(files) else {}
        listed = [{"type": "directory", "path": "x"}, *page[first : first + 2]]
        return Status(200, more, json.dumps(listed).encode())

    with WebServer(root) as server:
        server.answer = answer
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


class TestHub:
    @pytest.mark.parametrize("path", ["", "/", "/data", "/data/*.parquet", "@main/data"])
    def test_folders_and_patterns(self, hub, path):
        collection = open_collection(f"hf://datasets/owner/cells{path}", obs=["row"])
        check_all(collection)
        assert collection.is_remote

    def test_partition_folders(self, hub, repository):
        root = repository.parent / "parts"
        write_files(root / "data", TABLE, 1, ROW_GROUPS)
        write_files(root / "data/plate=1/drug=a", TABLE, 1, ROW_GROUPS)
        said = r"data: plate=1/drug=a/\S+ is in a partition folder, .* to one folder"
        for path in (root / "data", "hf://datasets/owner/parts/data"):
            with pytest.raises(PathError, match=said):
                open_collection(path)
        assert len(open_collection(root / "data/plate=1/drug=a")) == N_ROWS

    def test_one_file(self, hub):
        url = "hf://datasets/owner/cells@v1/data/train-00001.parquet"
        collection = open_collection(url, obs=["row"])
        first = int(collection[[0]].obs["row"][0])
        assert np.array_equal(collection[:].X.toarray(), COUNTS[first : first + len(collection)])
        asked = {request.path for request in hub.requests}
        assert "datasets/owner/cells/resolve/v1/data/train-00001.parquet" in asked

    def test_the_token_of_an_account(self, hub, monkeypatch):
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        collection = open_collection("hf://datasets/owner/cells/data", obs=["row"])
        check_all(collection)
        sent = {request.headers.get("authorization") for request in hub.requests}
        assert sent == {"Bearer hf_secret"}
        assert "hf_secret" not in repr(collection) + str(collection.describe())

    @pytest.mark.parametrize(
        ("url", "said"),
        [
            ("hf://datasets/owner/none/data", r"has no such dataset or folder, .*\(HTTP 404\)"),
            ("hf://datasets/owner/cells/other", "HTTP 404"),
            ("hf://datasets/owner/cells/metadata/x*.parquet", "matches no Parquet file"),
            ("hf://models/owner/cells", "must be of the form hf://datasets/OWNER/NAME/path"),
            ("hf://datasets/owner/cells/data/none.parquet", "none.parquet"),
        ],
    )
    def test_what_is_not_there(self, hub, url, said):
        with pytest.raises(PathError, match=said):
            open_collection(url)

    def test_what_is_no_list(self, hub, monkeypatch, repository):
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(RemoteError, match="the hub does not list its files"):
            open_collection("hf://datasets/owner/cells")


class TestServer:
    def test_only_wanted_columns_are_requested(self, tmp_path):
        pytest.importorskip("obstore")
        text = np.random.default_rng(0).bytes(1 << 20).hex()
        bulky = [text[k * 8000 : (k + 1) * 8000] for k in range(N_ROWS)]
        table = TABLE.append_column("notes", [bulky])
        path = write_groups(tmp_path / "cells.parquet", table, [26])
        with WebServer(tmp_path) as server:
            source = ParquetSource(
                f"{server.url}/cells.parquet", gene_table=GENES.set_index("gene_symbol")
            )
            assert np.array_equal(open_collection(source)[:].X.toarray(), COUNTS)
            asked = [each.range for each in server.requests if each.range is not None]
        assert sum(stop - first for first, stop in asked) < path.stat().st_size / 4

    def test_patterns_need_a_store_that_lists(self):
        pytest.importorskip("obstore")
        with pytest.raises(PathError, match="a web server cannot list files"):
            open_collection("https://host/data/*.parquet")


class TestDecoding:
    """What pyarrow decodes: a row group from its beginning, and no further than needed."""

    @pytest.fixture
    def decoded(self, monkeypatch):
        """Number of rows that come of each call that decodes."""
        decoded = list[int]()
        real = pq.ParquetFile.iter_batches

        def iter_batches(self, **options):
            decoded.append(0)
            for batch in real(self, **options):
                decoded[-1] += batch.num_rows
                yield batch

        monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
        return decoded

    @pytest.fixture
    def one_group(self, tmp_path):
        """5,000 cells, each with one more than its number."""
        n = 5000
        lists = {"genes": [[k % 5] for k in range(n)], "expressions": [[1.0 + k] for k in range(n)]}
        path = write_groups(tmp_path / "cells.parquet", pa.table(lists), [n], **OTHER_ENCODINGS)
        return open_collection(ParquetSource(path, n_vars=5))

    @pytest.mark.parametrize("groups", [[10], [7, 20, 3, 11]])
    @pytest.mark.parametrize("block_size", [20, 26])
    def test_aligned_blocks_decode_each_row_group_once(self, tmp_path, decoded, groups, block_size):
        path = write_groups(tmp_path / "cells.parquet", TABLE, groups, **OTHER_ENCODINGS)
        collection = open_collection(ParquetSource(path, n_markers=1), obs=["row"])
        decoded.clear()
        strategy = BlockShuffling(block_size, align="chunks")
        for fetch_factor in (1000, 2):  # of which the second divides row groups
            dataset = CellDataset(collection, strategy, 13, fetch_factor, seed=0)
            seen = np.concatenate([each.obs["row"] for each in dataset])
            assert sorted(seen.tolist()) == [*range(N_ROWS)]
            if fetch_factor == 1000:
                assert len(decoded) == pq.ParquetFile(path).num_row_groups

    def test_only_as_many_rows_of_a_large_group_are_decoded_as_needed(self, one_group, decoded):
        assert one_group[[1500]].X.sum() == 1501
        assert sum(decoded) == 1536

    def test_large_row_groups_are_told_with_the_line_that_rewrites_them(
        self, tmp_path, monkeypatch
    ):
        n = 20_000
        lists = {"genes": [[k % 5] for k in range(n)], "expressions": [[1.0 + k] for k in range(n)]}
        path = tmp_path / "cells.parquet"
        pq.write_table(pa.table(lists), path)
        collection = open_collection(ParquetSource(path, n_vars=5))
        (described,) = collection.describe().to_dict("records")
        reason = "through pyarrow: a row group of 20,000 rows is decoded for any of them"
        wanted = {"chunk_shape": (n, 5), "rows_per_chunk": n, "is_fast": False, "reason": reason}
        assert wanted.items() <= described.items()
        (line,) = re.findall("`(from .*)`", str(collection.slow_reading()))
        monkeypatch.chdir(tmp_path)
        exec(line)
        rewritten = open_collection(ParquetSource("smaller", n_vars=5))
        assert rewritten.describe()["rows_per_chunk"].tolist() == [1000]
        assert rewritten.slow_reading() is None
        assert np.array_equal(rewritten[:].X.toarray(), collection[:].X.toarray())


class TestGenes:
    def test_numbers_are_columns_without_a_table(self, tmp_path):
        path = write_groups(tmp_path / "cells.parquet", pa.table(lists_of(X)), ROW_GROUPS)
        collection = open_collection(path)
        assert collection.n_vars == 1 + X.indices.max()
        assert np.array_equal(collection[[5, 3]].X.toarray(), COUNTS[[5, 3], : collection.n_vars])

    @pytest.mark.parametrize("names", [("gene_ids", "values"), ("indices", "data"), ("a", "b")])
    def test_other_names_of_the_lists(self, tmp_path, names):
        table = pa.table(dict(zip(names, lists_of(X).values(), strict=True)))
        path = write_groups(tmp_path / "cells.parquet", table, ROW_GROUPS)
        given = path if names[0] != "a" else ParquetSource(path, genes="a", values="b")
        collection = open_collection(given)
        assert np.array_equal(collection[:].X.toarray(), COUNTS[:, : collection.n_vars])

    def test_files_without_a_table_have_the_genes_of_all(self, tmp_path):
        write_files(tmp_path / "cells", pa.table(lists_of(X)), 3, ROW_GROUPS)
        collection = open_collection(tmp_path / "cells")
        assert collection.n_vars == 1 + X.indices.max()
        assert np.array_equal(collection[:].X.toarray(), COUNTS[:, : collection.n_vars])

    @pytest.mark.parametrize("given", ["read", "filtered", "indexed", "numbers as text"])
    def test_names_are_those_of_the_table_however_it_is_given(self, tmp_path, given):
        """Genes are matched by name; the numbers of its rows are none."""
        rows, sources = np.arange(6).reshape(2, 3).astype(np.float32), []
        names = np.array(["7157", "4609", "238"] if given == "numbers as text" else [*"pqr"])
        for study, order in (("a", [0, 1, 2]), ("b", [2, 0, 1])):
            path = tmp_path / f"{study}.parquet"
            pq.write_table(pa.table(lists_of(sp.csr_matrix(rows[:, order] + 1))), path)
            genes = pd.DataFrame({"token_id": range(3), "gene_symbol": names[order]})
            if given == "filtered":
                genes = genes.set_index(pd.Index([5, 9, 70]))
            elif given in ("indexed", "numbers as text"):
                genes = genes.set_index("gene_symbol")
            sources.append(ParquetSource(path, gene_table=genes))
        collection = open_collection(sources)
        assert collection.var_names.tolist() == names.tolist()
        assert np.array_equal(collection[:].X.toarray(), [*rows + 1, *rows + 1])

    def test_genes_without_a_name_are_not_matched(self, tmp_path):
        path = tmp_path / "cells.parquet"
        pq.write_table(pa.table(lists_of(sp.csr_matrix(np.eye(2, dtype=np.float32)))), path)
        genes = pd.DataFrame({"token_id": [0, 1], "gene_id": ["p", None]})
        one, other = (
            ParquetSource(path, gene_table=each)
            for each in (genes, genes[::-1].set_index("gene_id"))
        )
        assert open_collection(one).var_names.tolist() == ["p", None]
        with pytest.raises(MismatchError, match="1 gene has no name"):
            open_collection([one, other], join_vars="outer")

    def test_joined_with_other_files_by_name(self, repository, write_h5ad):
        path = write_h5ad(
            np.ones((4, 2), np.float32), {"row": [1, 2, 3, 4]}, genes=["ENSG3", "ENSG1"]
        )
        collection = open_collection([repository / "data", path], join_vars="inner", obs=["row"])
        assert collection.var_names.tolist() == ["ENSG1", "ENSG3"]
        assert np.array_equal(collection[:N_ROWS].X.toarray(), COUNTS[:, [1, 3]])


def write_table(folder, **columns):
    table = pa.table(lists_of(X, first_gene=3, with_marker=True) | columns)
    return write_groups(folder / "cells.parquet", table, ROW_GROUPS)


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "error", "said"),
        [
            ({"genes": "genes"}, ParameterError, "name two columns; give both, or none"),
            ({"genes": "g", "values": "expressions"}, ColumnError, "no column 'g'; give `genes="),
            ({"genes": "genes", "values": "v"}, ColumnError, "no column 'v'; give `values="),
            (
                {"genes": "row", "values": "expressions"},
                FormatError,
                "int64, not a list of numbers",
            ),
            ({"genes": "expressions", "values": "genes"}, FormatError, "which are no gene numbers"),
            ({"n_vars": 0}, ParameterError, "`n_vars >= 1` must hold"),
            ({"n_vars": 1 << 27}, FormatError, "gene numbers up to 134217727, which are no colum"),
            ({"n_markers": -1}, ParameterError, "`n_markers >= 0` must hold"),
            ({"gene_table": 3}, ParameterError, "must be a data frame, but is of type int; read"),
            ({"gene_table": GENES, "n_vars": 3}, ParameterError, "exclude each other; leave one"),
            ({"gene_table": GENES[["ensembl_id"]]}, ColumnError, "'token_id' with their numbers"),
            (
                {"gene_table": GENES[["token_id"]]},
                ColumnError,
                "^gene_table: has no column with the names of genes; index the table by them, or n",
            ),
            (
                {"gene_table": GENES.assign(token_id=GENES["gene_symbol"])},
                FormatError,
                "must have distinct int",
            ),
        ],
    )
    def test_parameters(self, tmp_path, options, error, said):
        path = write_table(tmp_path, row=np.arange(N_ROWS))
        with pytest.raises(error, match=said):
            ParquetSource(path, **options)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({}, "a cell begins with the value -2.0, like the marker .* `n_markers=1`"),
            ({"n_vars": 5, "n_markers": 1}, "gene number .* is not below `n_vars`, 5; give"),
            (
                {"gene_table": GENES[:4]},
                "gene number .* is not in the table of genes; give `gene_t",
            ),
            ({"gene_table": GENES, "n_markers": 0}, "gene number 1 is not in the table of genes"),
        ],
    )
    def test_genes_that_are_not_known(self, tmp_path, options, said):
        path = write_table(tmp_path)
        with pytest.raises(FormatError, match=rf"cells.parquet: row group \d+: {said}"):
            open_collection(ParquetSource(path, **options))[:]

    def test_a_marker_may_be_kept(self, tmp_path):
        path = write_table(tmp_path)
        kept = open_collection(ParquetSource(path, n_markers=0))[:].X.toarray()
        assert (kept[:, 1] == -2).all()
        assert np.array_equal(kept[:, 3:], COUNTS[:, : kept.shape[1] - 3])

    def test_other_tables_are_told_from_cells(self, tmp_path):
        path = tmp_path / "drugs.parquet"
        pq.write_table(pa.table({"drug": ["a"], "target": ["b"]}), path)
        said = r"no lists of genes \(columns are drug, target\); .* column per gene make an AnnData"
        with pytest.raises(FormatError, match=said):
            open_collection(path)

    def test_an_empty_folder_and_a_pattern_without_files(self, tmp_path):
        (tmp_path / "empty").mkdir()
        with pytest.raises(PathError, match="nothing that can be opened"):
            open_collection(tmp_path / "empty")
        with pytest.raises(PathError, match="no Parquet file of cells is there"):
            ParquetSource(tmp_path / "*.parquet")

    def test_no_cells(self, tmp_path):
        pq.write_table(TABLE.slice(0, 0), tmp_path / "cells.parquet")
        with pytest.raises(FormatError, match="has no cells"):
            open_collection(ParquetSource(tmp_path / "cells.parquet", n_vars=3))
