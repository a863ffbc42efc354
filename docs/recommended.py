"""The output of `make demo` in the README and on the tuning page: `python docs/recommended.py`.

It comes from the result of one run, docs/benchmarks/demo.json. Nothing is measured here.
"""

import contextlib
import io
import re
from pathlib import Path

import made

from cellfeed_tuner import AutotuneResult
from cellfeed_tuner._reports._text import print_report
from cellfeed_tuner.plots import autotune_figure

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "docs" / "benchmarks" / "demo.json"
PICTURE = ROOT / "docs" / "images" / "autotune.png"
MADE_OF = [MEASURED, Path(__file__)]
README = ROOT / "README.md"
TUNING = ROOT / "docs" / "how-to" / "tuning.md"
SHOWN = re.compile(r"(<!-- python docs/recommended.py -->\n).*?(<!-- end -->)", re.DOTALL)


def printed(result):
    """Return the lines that the command prints for a result, up to the code to paste."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        print_report(result, Path("autotune.json"))
    answer, _, _ = stdout.getvalue().partition("\nTo train with it:")
    return [line.rstrip() for line in answer.strip().splitlines()]


def with_answer(page):
    """Return the page with the output filled in."""
    result = AutotuneResult.load(MEASURED)
    lines = printed(result)
    cpu = result.machine.cpu
    how = (
        f"(`make demo`, {cpu.usable_cores:g} cores of {cpu.model}, page cache {result.cache}, "
        f"{result.date:%Y-%m-%d})"
    )
    shown = "\n".join(["```", *lines, "```", "", how])
    text, n = SHOWN.subn(lambda match: f"{match[1]}{shown}\n{match[2]}", page)
    assert n == 1, "the page must have exactly one block of autotune's output"
    return text


if __name__ == "__main__":
    made.save(autotune_figure(AutotuneResult.load(MEASURED)), PICTURE, of=MADE_OF)
    README.write_text(with_answer(README.read_text()))
    TUNING.write_text(with_answer(TUNING.read_text()))
