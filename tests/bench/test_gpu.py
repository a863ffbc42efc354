"""The comparison of ways to a GPU also runs on a CPU, with what a CPU can do."""

import importlib
import json
from typing import Any

import pytest

pytestmark = [pytest.mark.docs, pytest.mark.slow]

torch = pytest.importorskip("torch")
harness: Any = importlib.import_module("bench._harness")
bench: Any = importlib.import_module("bench.compare.gpu")


@pytest.fixture
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_way_is_measured(tmp_path, capsys, one_thread, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU with CUDA")
    file = tmp_path / "figures.json"
    sizes = "--cells=280", "--genes=50", "--batch=20", "--rounds=2", "--seconds=0.1"
    arguments = [*sizes, f"--data={tmp_path / 'plates'}", f"--device={device}", f"--out={file}"]
    harness.main(bench.cases, arguments, **bench.OPTIONS)
    delivered, trained = (each["ways"] for each in json.loads(file.read_text())["tables"])
    ways = [each for each in bench.WAYS if device == "cuda" or not bench.WAYS[each].needs_gpu]
    assert list(delivered) == ways
    assert list(trained) == [bench.ALONE, *ways]
    for runs in (*delivered.values(), *trained.values()):
        assert all(run["cells/s"] > 0 for run in runs)
        assert len(runs) == 2
    assert all(0 < run["% waited"] < 100 for name in ways for run in trained[name])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(lines) == len(ways) + len(ways) + 1 + 2 * 2  # with two heads, of two lines each
