"""Make one archive of cellstream, with its defaults, of all plates."""

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
