"""Every code block of Python in the pages runs, and prints what is shown.

Blocks of a page run one after the other, as one script, in a folder with the tutorial's plates. A
block of text after a block of Python is what that prints.
"""

import os
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version
from tests.warm import python as warm

from cellfeed.synthetic import write_tahoe_like

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FOLDERS = ("how-to", "explanation", "reference")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Pages with a test of their own, since they are modules, or need a server.
ELSEWHERE = {
    "how-to/another_loader.md": "docs/test_another_loader.py",
    "how-to/extending.md": "loader/testing/test_extending.py",
    "how-to/postgres.md": "loader/storages/postgres/test_postgres_docs.py",
    "how-to/remote.md": "loader/bytes/remote/test_same_rows.py",
}
SMOKE = "how-to/elements.md"
# What each page takes for granted, to run before it in the same folder.
TRAINING = """
import torch

model = torch.nn.Linear(200, 50)

def train_step(X, labels):
    return model(X.to_dense()).sum() + labels.sum()
"""
OBJECTS = """
import anndata

adata = anndata.concat(
    [anndata.read_h5ad(f"plates/plate0{k}.h5ad") for k in (1, 2)], merge="same"
)
"""
TUNED = f"""
import functools, sys
import cellfeed_tuner

sys.path.append({str(ROOT)!r})
from tests.short_replicates import shorten

shorten()
SMALL = dict(block_sizes=[4], fetch_factors=[2], workers=[0], entropy_floor=0.0)
cellfeed_tuner.autotune = functools.partial(cellfeed_tuner.autotune, **SMALL)
"""
BRIEFLY = (
    TUNED
    + """
whole = cellfeed_tuner.tune_dataloader
cellfeed_tuner.tune_dataloader = lambda *given, budget, **options: whole(
    *given, budget=2, workers=[0], **options
)
"""
)
DATASET = """
from cellfeed import BlockShuffling, CellDataset, open_collection

collection = open_collection("plates/*.h5ad", obs=["cell_line"])
loader = CellDataset(collection, BlockShuffling(16), 64, seed=0).loader()
"""
EXPERIMENT = f"""
import sys, warnings

sys.path.append({str(ROOT)!r})
from tests.loader.storages.soma.written import write_experiment

adata.obs["tissue"], adata.obs["donor"] = "lung", "d1"
adata.obs["cell_type"] = ["B", "T"] * (adata.n_obs // 2)
adata.obs["n_counts"] *= 10
write_experiment("atlas_soma", adata)
"""
ARCHIVE = """
from cellstream.cell import write_cell_archive

adata.obs["perturbation"], adata.obs["donor"] = adata.obs["drug"], "d1"
adata.write_h5ad("screen.h5ad")
write_cell_archive("screen.h5ad", "screen.csad")
"""
PUBLISHED = f"""
import sys
from pathlib import Path

sys.path.append({str(ROOT)!r})
from tests.loader.storages.parquet.written import write_repository

write_repository(Path("Tahoe-100M"), n_cells=600, n_genes=62)
"""
TREATED = """
from pathlib import Path
import anndata

for path in Path("plates").glob("*.h5ad"):
    plate = anndata.read_h5ad(path)
    plate.obs["treatment"] = [["DMSO", "A", "B"][k % 3] for k in range(plate.n_obs)]
    plate.write_h5ad(path)
"""
SETUPS = {
    "how-to/cellstream.md": OBJECTS + ARCHIVE,
    "how-to/ddp.md": TUNED,
    "how-to/how_many_gpus.md": TUNED,
    "how-to/elements.md": """
from pathlib import Path
import anndata

for path in Path("plates").glob("*.h5ad"):
    plate = anndata.read_h5ad(path)
    plate.var_names = ["CD3D", "CD8A", *plate.var_names[2:]]
    plate.layers["counts"] = plate.X
    plate.write_h5ad(path)
""",
    "how-to/moving.md": OBJECTS
    + EXPERIMENT
    + """
from cellfeed import preshuffle

preshuffle("plates/", "store.zarr", codec="annbatch")
""",
    "how-to/loaded.md": TRAINING,
    "how-to/num_workers.md": BRIEFLY,
    "how-to/one_gpu.md": TRAINING + DATASET,
    "how-to/several_gpus.md": TRAINING + DATASET,
    "how-to/parquet.md": PUBLISHED,
    "how-to/preshuffle.md": """
import anndata

for number, name in enumerate("ab", 1):
    plate = anndata.read_h5ad(f"plates/plate0{number}.h5ad")[:, 20 * number :].copy()
    plate.layers["counts"] = plate.X.copy()
    plate.X.data /= 2
    plate.write_h5ad(f"lab_{name}.h5ad")
plate.X = plate.X.tocsc()
plate.write_h5ad("by_gene.h5ad")
""",
    "how-to/questions.md": TRAINING
    + DATASET
    + """
dataset = loader.dataset
for minibatch in loader:
    train_step(minibatch.X, minibatch.obs["cell_line"])
""",
    "how-to/soma.md": OBJECTS + EXPERIMENT,
    "how-to/statistics.md": """
from cellfeed import BlockShuffling, CellDataset, open_collection

import torch
from cellfeed_tuner import _headroom

dataset = CellDataset(open_collection("plates/*.h5ad"), BlockShuffling(16), 64, 4, seed=0)
train = len
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters())
_headroom._TURN_SECONDS = 0.01
""",
    "how-to/tenx.md": TRAINING
    + f"""
import sys
from pathlib import Path

sys.path.append({str(ROOT)!r})
from tests.loader.storages.tenx.written import barcodes, counts, features, write_tenx

for sample in ("control", "treated"):
    outs = Path("samples", sample, "outs")
    outs.mkdir(parents=True)
    names = barcodes(150)
    write_tenx(
        outs / "filtered_feature_bc_matrix.h5",
        counts(150, 200),
        barcodes=names,
        features=features(190, 10),
        libraries=[sample],
    )
    table = "".join(f"{{name}},{{'BT'[k % 2]}}\\n" for k, name in enumerate(names[:140]))
    outs.with_name("cell_types.csv").write_text("barcode,cell_type\\n" + table)
""",
    "how-to/training.md": TRAINING + TREATED,
    "how-to/two_models.md": TREATED,
    "how-to/tuning.md": TRAINING
    + TUNED
    + """
import types
from cellfeed import open_collection

opened = open_collection("plates/*.h5ad", obs=["plate"])
cellfeed_tuner.autotune(opened, label="plate").save("autotune.json")
trainer = types.SimpleNamespace(fit=lambda model, train_dataloaders: len(train_dataloaders))
""",
    "how-to/perturbation_splits.md": f"""
import re
from pathlib import Path

import anndata
import numpy as np
import pandas as pd

page = Path({str(DOCS / "how-to/perturbation_splits.md")!r}).read_text()
Path("study.toml").write_text(re.search("```toml\\n(.*?)```", page, re.DOTALL)[1])
Path("replogle").mkdir()
genes = ["AARS", "NUP107", "POLR2A", "RPUSD4", "non-targeting"]
for line in ("jurkat", "k562", "rpe1"):
    obs = pd.DataFrame({{"gene": np.tile(genes, 15), "cell_type": line}})
    obs["gem_group"] = np.repeat(["1", "2", "3"], 25)
    obs.index = [f"{{line}}{{k}}" for k in range(len(obs))]
    study = anndata.AnnData(np.ones((len(obs), 20), np.float32), obs=obs)
    study.write_h5ad(f"replogle/{{line}}.h5ad")
""",
    "how-to/spatial.md": """
from pathlib import Path

import anndata
import numpy as np
import pandas as pd

rng = np.random.default_rng(0)
Path("slides").mkdir()
for slide in "ab":
    obs = pd.DataFrame({"cell_type": rng.choice(["T", "B"], 600)}, index=[*map(str, range(600))])
    X, places = rng.poisson(1, (600, 20)).astype("f4"), rng.random((600, 2))
    cells = anndata.AnnData(X, obs=obs, obsm={"spatial": places[np.argsort(places[:, 0])]})
    cells.write_h5ad(f"slides/{slide}.h5ad")
""",
    "reference/opening.md": OBJECTS
    + EXPERIMENT
    + ARCHIVE
    + """
import os
from pathlib import Path

for path in Path("plates").glob("*.h5ad"):
    plate = anndata.read_h5ad(path)
    plate.obs["donor"] = "d2"
    plate.write_h5ad(path)
os.rename("atlas_soma", "atlas.soma")
""",
}
NEEDS = {
    "how-to/cellstream.md": ["cellstream"],
    "how-to/memory_maps.md": ["datasets"],
    "how-to/moving.md": ["tiledbsoma"],
    "how-to/parquet.md": ["pyarrow"],
    "how-to/scvi.md": ["scvi"],
    "how-to/soma.md": ["tiledbsoma"],
    "reference/opening.md": ["cellstream", "tiledbsoma"],
}
# Of pages whose libraries warn of themselves.
LENIENT = {"how-to/scvi.md"}
# What a machine of the tests lacks: several ranks, and a GPU.
MESH = {'init_device_mesh("cuda", (2, 4)': 'init_device_mesh("cpu", (1, 1)'}
ON_GPU = {'load(device="cuda")': 'load(device="cpu")'}
REPLACED = {
    "how-to/loaded.md": ON_GPU,
    "how-to/several_gpus.md": MESH,
}
# What only PyTorch 2.8 and newer have; with older ones, blocks with it are left out.
OF_TORCH_2_8 = "profile_all_threads"
RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
FIGURES = re.compile(r" *[\d.,]+")
END = "\n<end of a block>\n"
STRICT = """
import warnings

warnings.simplefilter("error")
warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores
warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # PyTorch 2.5 of itself
# What anndata 0.13 does of which pandas 3.1 warns.
warnings.filterwarnings("ignore", "The 'future.infer_string' option is deprecated")
"""


def blocks(name):
    return BLOCK.findall((DOCS / name).read_text())


PAGES = [
    name
    for folder in FOLDERS
    for name in sorted(f"{folder}/{path.name}" for path in (DOCS / folder).glob("*.md"))
    if "python" in dict(blocks(name)) and name not in ELSEWHERE
]


@pytest.mark.docs
@pytest.mark.process
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.smoke) if each == SMOKE else each for each in PAGES],
)
def test_python_runs_as_printed(name, tmp_path):
    for library in ("torch", *NEEDS.get(name, [])):
        pytest.importorskip(library)
    lacks_it = Version(version("torch")) < Version("2.8")
    write_tahoe_like(tmp_path / "plates", n_cells=700, n_genes=200, n_plates=2)
    there = blocks(name)
    script, expected = SETUPS.get(name, "") + ("" if name in LENIENT else STRICT), []
    for (language, block), (following, text) in zip(there, [*there[1:], ("", "")], strict=True):
        if language == "python" and not (lacks_it and OF_TORCH_2_8 in block):
            script += f"\nprint(end={END!r})\n{block}"
            expected.append(text if following == "text" else None)
    for old, new in REPLACED.get(name, {}).items():
        assert old in script
        script = script.replace(old, new)
    environment = os.environ | {warm.ADDRESS: warm.address()}  # for what is measured
    if name in REPLACED:
        environment |= RANK
    (tmp_path / "page.py").write_text(script)
    ran = warm.run([sys.executable, tmp_path / "page.py"], cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stderr
    printed = ran.stdout.split(END)[1:]
    for output, text in zip(printed, expected, strict=True):
        if name == "how-to/statistics.md":  # figures of another machine
            output, text = FIGURES.sub("N", output), text and FIGURES.sub("N", text)  # noqa: PLW2901
        assert text is None or output == text


def test_pages_that_are_tested_elsewhere_are():
    for name, path in ELSEWHERE.items():
        assert Path(name).name in (ROOT / "tests" / path).read_text()
