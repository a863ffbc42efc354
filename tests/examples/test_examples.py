"""Every example runs as its docstring says, and shows what it promises."""

import importlib.util
import math
import re
import shutil
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from tests.loader.dataset.torchrun import skip_without_ranks
from tests.loader.storages.memory_maps.written import write_scdl
from tests.loader.storages.soma.written import write_experiment
from tests.warm import python as warm
from tests.warm.python import SHORT_REPLICATES, output_of

from cellfeed import load_database
from cellfeed.synthetic import write_tahoe_like

pytestmark = [pytest.mark.docs, pytest.mark.process]

EXAMPLES = Path(__file__).parents[2] / "examples"
N_CELLS, N_GENES = 2_000, 2_000


@pytest.fixture(scope="module")
def plates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "plates"
    write_tahoe_like(folder, n_cells=N_CELLS, n_genes=N_GENES)
    return folder


def needs(name: str) -> pytest.MarkDecorator:
    is_missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(is_missing, reason=f"{name} is not installed: cellfeed[examples]")


def torchrun(n: int, *command: object) -> str:
    skip_without_ranks()
    return warm.torchrun(n, *command)


def losses_in(printed: str) -> list[float]:
    return [float(each) for each in re.findall(r"loss ([\d.]+)", printed)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("pytorch", r"accuracy \d+% on 400 cells", marks=pytest.mark.smoke),
        ("lightning_module", r"50 steps, 1 device\(s\), accuracy "),
        ("jax_numpy", ""),
        ("tokens", r"14 shards, 2000 cells[\s\S]*padded to \(8, "),
        ("masked_genes", "on 400 cells"),
    ],
)
def test_training(plates, name, said):
    printed = output_of(EXAMPLES / f"{name}.py", plates)
    assert re.search(said, printed)
    losses = losses_in(printed)
    if name != "lightning_module":
        assert losses[-1] < losses[0]
    if name == "masked_genes":
        assert losses[0] < math.log(N_GENES)  # which is that of guessing


def test_tune_dataloader(plates, monkeypatch):
    monkeypatch.setenv(SHORT_REPLICATES, "1")
    printed = output_of(EXAMPLES / "tune_dataloader.py", plates, 600)
    assert "Recommended: 0 workers" in printed or "Recommended: 1 worker" in printed
    (bits,) = re.findall(r"([\d.]+) bits of plates in a minibatch", printed)
    assert 3.5 < float(bits) < math.log2(14)  # that of random cells of 14 plates is 3.66


def test_processes_that_are_stopped_and_go_on(plates, tmp_path):
    command = EXAMPLES / "ddp_resume.py", plates, tmp_path / "run.pt"
    assert "2 ranks, 20 steps each: 1,280 of 2,000 cells" in torchrun(
        2, *command, "--stop-after", 20
    )
    assert "3 ranks, 8 steps each: 2,000 of 2,000 cells" in torchrun(3, *command)


def test_processes_that_are_tuned_together(plates, monkeypatch):
    monkeypatch.setenv(SHORT_REPLICATES, "1")
    printed = torchrun(2, EXAMPLES / "tune_ddp.py", plates, 600)
    assert "cells/s of 2 ranks together" in printed
    (n_cells,) = re.findall(r"2 ranks trained on ([\d,]+) cells", printed)
    # Whole minibatches of 32 on each rank.
    assert int(n_cells.replace(",", "")) == N_CELLS // 64 * 64


def test_accelerate(plates, tmp_path):
    printed = torchrun(2, EXAMPLES / "accelerate_training.py", plates, tmp_path / "run")
    assert "2 processes, 20 steps and 5 updates each" in printed
    assert "768 cells before the checkpoint, 1,232 after it: 2,000 of 2,000, 0 twice" in printed
    (difference,) = re.findall(r"weights differ by (\S+) from those of 2,000 cells", printed)
    assert float(difference) < 1e-7


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # to load in this process
def test_fsdp2(plates, tmp_path):
    """Resumed on the same ranks, it ends with the weights of one run; it resumes on others, too."""
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415 - needs torch

    def run(n, folder, *arguments):
        return torchrun(n, EXAMPLES / "fsdp2.py", plates, tmp_path / folder, *arguments)

    def saved(folder):
        import torch  # noqa: PLC0415 - needs torch

        found: dict[str, Any] = {
            "model": {"0.weight": torch.empty(64, N_GENES)},
            "seen": torch.empty(N_CELLS),
        }
        dcp.load(found, checkpoint_id=tmp_path / folder)
        return found["model"]["0.weight"].numpy()

    assert "2 ranks, 32 steps each: 2,000 of 2,000 cells seen" in run(2, "whole")
    assert "2 ranks, 10 steps each: 640 of 2,000 cells seen" in run(2, "run", "--stop-after", 10)
    shutil.copytree(tmp_path / "run", tmp_path / "others")
    assert "2 ranks, 22 steps each: 2,000 of 2,000 cells seen so far, 0 of" in run(2, "run")
    np.testing.assert_allclose(saved("run"), saved("whole"), rtol=1e-5, atol=1e-7)
    assert "4 ranks, 11 steps each: 2,000 of 2,000 cells" in run(4, "others", "--replicas", 2)


@needs("ray")
def test_ray(plates, tmp_path):
    import torch  # noqa: PLC0415 - needs torch

    def run(folder, *arguments):
        return output_of(EXAMPLES / "ray_train.py", plates, tmp_path / folder, *arguments)

    def saved(printed):
        (folder,) = re.findall(r"saved in (\S+)", printed)
        return torch.load(Path(folder, "run.pt"))

    whole = run("whole")
    assert "2 workers, 32 steps each: 2,000 cells seen so far, 0 twice" in whole
    stopped = run("run", "--stop-after", 10)
    assert "2 workers, 10 steps each: 640 cells seen so far, 0 twice" in stopped
    resumed = run("run")
    assert "2 workers, 22 steps each: 2,000 cells seen so far, 0 twice" in resumed
    for name, each in saved(whole)["model"].items():
        torch.testing.assert_close(saved(resumed)["model"][name], each)


@needs("jax")
def test_jax_on_several_devices(plates, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

    def run(folder, *arguments):
        return output_of(EXAMPLES / "jax_sharded.py", plates, tmp_path / folder, *arguments)

    whole = run("whole")
    assert "epoch 1 on 4 devices" in whole
    first, second = losses_in(whole)
    assert second < first
    assert "40 steps of 64 cells" in run("run", "--stop-after", 40)
    assert "22 steps of 64 cells" in run("run")
    weights = [np.load(tmp_path / each / "weights.npy") for each in ("run", "whole")]
    np.testing.assert_array_equal(*weights)


def test_class_balanced(plates):
    printed = output_of(EXAMPLES / "class_balanced.py", plates)
    stored, drawn = (
        [int(each) for each in re.findall(r"(\d+) to (\d+) " + words, printed)[0]]
        for words in ("cells each in storage", "in an epoch")
    )
    assert drawn[1] - drawn[0] < (stored[1] - stored[0]) / 2


def test_perturbation_sets(plates):
    printed = output_of(EXAMPLES / "perturbation_sets.py", plates)
    n_sets, n_whole = map(int, re.findall(r"(\d+) sets of 4 cells; (\d+) have", printed)[0])
    assert n_sets == n_whole > 0


def test_matched_controls(tmp_path):
    write_tahoe_like(tmp_path / "plates", n_cells=2_000, n_genes=500, n_drugs=6, n_plates=4)
    printed = output_of(EXAMPLES / "matched_controls.py", tmp_path / "plates")
    losses = losses_in(printed)
    (alone,) = re.findall(r"alone ([\d.]+)\n\d", printed)
    assert losses[-1] < min(losses[0], 0.95 * float(alone))
    n_matched, n_pairs = map(int, re.findall(r"(\d+) of (\d+) pairs", printed)[0])
    assert n_matched == n_pairs > 0


def test_held_out_conditions(tmp_path):
    write_tahoe_like(
        tmp_path / "plates", n_cells=2_000, n_genes=500, n_drugs=6, n_plates=4, n_cell_lines=6
    )
    printed = output_of(EXAMPLES / "perturbation_split.py", tmp_path / "plates")
    losses = losses_in(printed)
    assert losses[3] < 0.8 * losses[0]
    assert losses[4] < 1.2 * losses[3]
    (n_cells,) = re.findall(r"test ([\d,]+), train", printed)
    assert f"on {n_cells.replace(',', '')} cells of the conditions of the test" in printed


def test_neighbours_in_space(tmp_path):
    """Types are regions, and genes say little of a single cell."""
    rng = np.random.default_rng(0)
    for slide in "ab":
        places = rng.random((600, 2))
        types = (places * 2).astype(int) @ [2, 1]
        of_type = (np.arange(200) % 4 == types[:, None]) & (np.arange(200) < 40)
        counts = rng.poisson(0.3 + 0.5 * of_type).astype(np.float32)
        obs = pd.DataFrame({"cell_type": [f"type {each}" for each in types]})
        obs.index = obs.index.astype(str)
        cells = ad.AnnData(counts, obs=obs, obsm={"spatial": places})
        cells.write_h5ad(tmp_path / f"{slide}.h5ad")
    printed = output_of(EXAMPLES / "spatial_neighbors.py", tmp_path)
    accuracies = [float(each) for each in re.findall(r"accuracy ([\d.]+)", printed)]
    assert accuracies[-1] > max(0.9, accuracies[0])


@pytest.mark.server
def test_postgres(plates, postgres_server, monkeypatch):
    options = postgres_server.options
    url = load_database(plates, postgres_server.url, "examples", database_options=options)
    monkeypatch.setenv("PGPASSWORD", postgres_server.password)
    printed = output_of(EXAMPLES / "postgres.py", url)
    assert "1,000 of 2,000 cells to train on" in printed
    losses = losses_in(printed)
    assert losses[-1] < losses[0]


def test_soma(plates, tmp_path):
    pytest.importorskip("tiledbsoma")
    adata = ad.read_h5ad(plates / "plate01.h5ad")
    experiment = write_experiment(tmp_path / "experiment", adata)
    printed = output_of(EXAMPLES / "soma.py", experiment, "n_counts > 500")
    n_cells = int((adata.obs["n_counts"] > 500).sum())
    assert f"{n_cells:,} cells x {adata.n_vars:,} genes" in printed
    assert len(re.findall(rf"epoch \d: {n_cells:,} cells, [\d,.]+ counts each", printed)) == 2
    assert "last labels: ['plate01', 'plate01', 'plate01']" in printed


@needs("transformers")
def test_huggingface(plates, tmp_path):
    printed = output_of(EXAMPLES / "huggingface.py", plates, tmp_path / "run")
    assert "40 steps of 3 epochs: cells came 1 to 2 times" in printed
    assert "96 steps of 3 epochs: cells came 3 to 3 times" in printed


@needs("scvi")
def test_scvi(plates, tmp_path):
    for plate in plates.glob("*.h5ad"):
        adata = ad.read_h5ad(plate)[:, :300].copy()
        adata.layers["counts"] = adata.X.copy()
        adata.X = adata.X.log1p()
        adata.write_h5ad(tmp_path / plate.name)
    printed = output_of(EXAMPLES / "scvi_model.py", tmp_path, tmp_path / "model")
    first, second = map(int, re.findall(r"ELBO (\d+), then (\d+) on 200 cells", printed)[0])
    assert second < first
    assert "latent space (2000, 5) of 300 genes in 14 batches" in printed
    assert re.search(r"\w+ and \w+ differ most in \w+", printed)


@needs("datasets")
def test_tahoe_arrow(plates, tmp_path):
    import datasets  # noqa: PLC0415 - an extra

    adata = ad.concat([ad.read_h5ad(plate) for plate in sorted(plates.glob("*.h5ad"))[:3]])
    rows = [adata.X[k] for k in range(adata.n_obs)]
    columns = {  # tokens from 3 on; a marker of token 1 comes first
        "genes": [[1, *(row.indices + 3).tolist()] for row in rows],
        "expressions": [[-2.0, *row.data.tolist()] for row in rows],
        "drug": adata.obs["drug"].astype(str).tolist(),
    }
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "cells")
    tokens = range(3, adata.n_vars + 3)
    table = pd.DataFrame({"token_id": tokens, "gene_symbol": adata.var_names})
    table.to_parquet(tmp_path / "genes.parquet")
    printed = output_of(EXAMPLES / "tahoe_arrow.py", tmp_path / "cells", tmp_path / "genes.parquet")
    assert f"{adata.n_obs:,} cells x {adata.n_vars:,} genes" in printed
    first, second = losses_in(printed)
    assert second < first


@needs("bionemo")
def test_scdl_weighted(plates, tmp_path):
    adata = ad.concat([ad.read_h5ad(plate) for plate in plates.glob("*.h5ad")], index_unique="-")
    write_scdl(tmp_path / "cells", adata.X, adata.obs, adata.var)
    printed = output_of(EXAMPLES / "scdl_weighted.py", tmp_path / "cells")
    assert "16 minibatches, and 16 after resuming" in printed
    least, most = map(int, re.findall(r"(\d+) to (\d+) times", printed)[0])
    assert most < 3 * least
