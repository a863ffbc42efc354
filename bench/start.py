"""Start: a fresh interpreter, until a statement has run."""

import subprocess
import sys

from bench._profile import parameters

AUTOTUNE = "from cellfeed_tuner._commands._autotune_cli import main; main({})"
STARTS = {
    "import torch, anndata": "import torch, anndata",  # a training script has imported this anyway
    "import cellfeed": "import cellfeed",
    "all of cellfeed": "from cellfeed import *",
    "autotune --help": AUTOTUNE.format(["--help"]),
    "cellfeed --help": "from cellfeed._cli import main; main(['--help'])",
    "autotune explain --help": AUTOTUNE.format(["explain", "--help"]),
    "autotune show": AUTOTUNE.format(["show"]),
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
