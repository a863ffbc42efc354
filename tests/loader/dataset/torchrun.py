"""Scripts that several processes run, as torchrun starts them."""

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.warm import python as warm

# Each rank's script begins with this, and ends by saying what it found.
_PROLOGUE = """
    import json, os, pickle, sys, time, warnings
    from contextlib import contextmanager
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader
    from cellfeed import BlockShuffling, CellDataset, CellfeedError, InterleavedDatasets

    warnings.filterwarnings("error")
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    warnings.filterwarnings("ignore", message="ranks are not compared where another")
    warnings.filterwarnings("ignore", message=".*(multi-threaded|NumPy array is not writable)")
    # What anndata sets, of which pandas 3.1 warns.
    warnings.filterwarnings("ignore", message="The 'future.infer_string' option is deprecated")

    def make(n_rows=101, **options):
        return CellDataset(np.arange(n_rows), BlockShuffling(4), 8, 2, **options)

    def epoch(loader):
        return [np.asarray(minibatch).tolist() for minibatch in loader]

    def refusal(function, *arguments, **options):
        try:
            function(*arguments, **options)
        except (CellfeedError, RuntimeError) as error:
            return str(error)

    @contextmanager
    def warned():
        texts = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield texts
        known = "multi-threaded", "not writable", "This DataLoader", "ranks are not", "infer_string"
        said = (str(each.message) for each in caught)
        texts += [each for each in said if not any(part in each for part in known)]

    if __name__ == "__main__":
        rank, folder, found = int(os.environ["RANK"]), sys.argv[1], {}
"""
_EPILOGUE = """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)
"""


def skip_without_ranks() -> None:
    """Skip the test where PyTorch lacks the stores through which ranks begin together."""
    distributed = pytest.importorskip("torch.distributed")
    if not hasattr(distributed.ProcessGroup, "get_group_store"):
        pytest.skip("several ranks need PyTorch 2.8 or newer")


def torchrun(folder: Path, n: int, *bodies: str) -> list[dict[str, Any]]:
    """Run a script as ``n`` processes, and return what each of them found."""
    skip_without_ranks()
    script = folder / "script.py"
    main = "".join(map(textwrap.dedent, (*bodies, _EPILOGUE)))
    script.write_text(textwrap.dedent(_PROLOGUE) + textwrap.indent(main, "    "))
    warm.torchrun(n, script, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(n)]


def assert_divided(of_ranks: Sequence[list[list[int]]], n_rows: int) -> None:
    """Ranks have equally many minibatches of equal sizes; no row twice, and none is missing.

    But for those that are repeated so that ranks are equal, of which there are as few as can be.
    """
    sizes = [[len(minibatch) for minibatch in minibatches] for minibatches in of_ranks]
    assert sizes == [sizes[0]] * len(of_ranks)
    rows = Counter(row for minibatches in of_ranks for each in minibatches for row in each)
    assert sorted(rows) == list(range(n_rows))
    assert rows.total() == n_rows + -n_rows % len(of_ranks)
