"""Make one cellstream archive of all plates, with its defaults."""

import sys
import tempfile
from pathlib import Path

from cellstream.cell import concat_cell_archives, write_cell_archive

if __name__ == "__main__":
    target, *plates = map(Path, sys.argv[1:])
    target.mkdir()
    with tempfile.TemporaryDirectory(dir=target) as parts:
        archives = [Path(parts) / plate.with_suffix(".csad").name for plate in plates]
        for plate, archive in zip(plates, archives, strict=True):
            write_cell_archive(plate, archive)
        concat_cell_archives(archives, target / "cells.csad")
