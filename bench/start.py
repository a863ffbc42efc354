"""Start: a fresh interpreter, until a statement has run."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench._profile import parameters
from cellfeed.synthetic import write_tahoe_like

AUTOTUNE = "from cellfeed_tuner._commands._autotune_cli import main; main({})"
FIRST_MINIBATCH = """
from cellfeed import BlockShuffling, CellDataset, open_collection
collection = open_collection("plates", obs=["plate"])
next(iter(CellDataset(collection, BlockShuffling(16), 64, 16, seed=0)))
"""
STARTS = {
    "import torch": "import torch",
    "import torch, anndata": "import torch, anndata",  # a training script has imported this anyway
    "import cellfeed": "import cellfeed",
    "all of cellfeed": "from cellfeed import *",
    "autotune --help": AUTOTUNE.format(["--help"]),
    "cellfeed --help": "from cellfeed.commands import main; main(['--help'])",
    "autotune explain --help": AUTOTUNE.format(["explain", "--help"]),
    "autotune show": AUTOTUNE.format(["show"]),
}
MISTYPED = {  # each ends with exit status 2
    "path": AUTOTUNE.format(["plate", "--label=plate"]),
    "column": AUTOTUNE.format(["plates", "--label=plte"]),
}
COUNT_PACKAGES = """
import atexit, sys
before = {name.partition(".")[0] for name in sys.modules}
def count():
    after = {name.partition(".")[0] for name in sys.modules}
    print(len(after - before - sys.stdlib_module_names), file=sys.stderr)
atexit.register(count)
"""


class Start:
    """Run a statement in its own interpreter, from files in the page cache."""

    rounds, repeat, number, warmup_time = 2, 4, 1, 0  # seconds each
    in_processes_of_its_own = True

    params = parameters(
        quick=["import torch, anndata", "import cellfeed", "all of cellfeed", "autotune --help"],
        full=["cellfeed --help", "autotune explain --help", "autotune show"],
    )
    param_names = ("what",)

    def setup_cache(self):
        for what in self.params:
            self.run(what)  # so that files are in the page cache, and loops compiled

    def time_start(self, what):
        self.run(what)

    def track_packages(self, what):
        return int(self.run(what, first=COUNT_PACKAGES).splitlines()[-1])

    track_packages.unit = "packages imported"

    def run(self, what, first=""):
        command = [sys.executable, "-c", first + STARTS[what]]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr


class FirstMinibatch:
    """Run a script up to its first minibatch, in its own interpreter.

    Parameters: a file of gzip CSR, with compiled code on disk ("warm") or an empty cache of it, as
    after an installation ("cold"); or ``import torch`` alone, to compare with.
    """

    rounds, repeat, number, warmup_time = 2, 3, 1, 0  # seconds each
    in_processes_of_its_own = True

    params = parameters(quick=["import torch", "warm", "cold"], full=["path", "column"])
    param_names = ("what",)

    def setup_cache(self):
        write_tahoe_like(Path.cwd() / "plates", n_cells=1_024, n_plates=2, seed=0)
        self.run("warm", Path.cwd() / "compiled")

    def setup(self, what):
        self.compiled = tempfile.mkdtemp() if what == "cold" else Path.cwd() / "compiled"

    def teardown(self, what):
        if what == "cold":
            shutil.rmtree(self.compiled)

    def time_first_minibatch(self, what):
        if what == "cold":  # each repetition
            shutil.rmtree(self.compiled)
        self.run(what, self.compiled)

    def run(self, what, compiled):
        script = STARTS.get(what) or MISTYPED.get(what) or FIRST_MINIBATCH
        environment = os.environ | {"NUMBA_CACHE_DIR": str(compiled)}
        ran = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
        assert ran.returncode == (2 if what in MISTYPED else 0)
