"""Comparisons with one harness: ``python -m bench.compare NAME``; ``--help`` lists its options."""

import importlib
import sys
from pathlib import Path

from bench import _harness

NAMES = sorted(each.stem for each in Path(__file__).parent.glob("[a-z]*.py"))

if __name__ == "__main__":
    if sys.argv[1:2] == [] or sys.argv[1] not in NAMES:
        sys.stderr.write(f"give one of these: {', '.join(NAMES)}\n")
        raise SystemExit(2)
    comparison = importlib.import_module(f"bench.compare.{sys.argv.pop(1)}")
    _harness.main(comparison.cases, **comparison.OPTIONS)
