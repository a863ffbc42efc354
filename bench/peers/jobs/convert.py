"""Make the stores that other loaders need: ``convert.py STORAGE TARGET PLATE...``."""

import sys
import tempfile
from pathlib import Path


def annbatch(target: str, *plates: str) -> None:
    """Make annbatch's own shuffled zarr store, with its defaults and the pipeline it asks for."""
    import zarr  # noqa: PLC0415
    from annbatch import DatasetCollection  # noqa: PLC0415

    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    DatasetCollection(target).add_adatas(plates, shuffle=True)


def cellstream(target: str, *plates: str) -> None:
    """Make one cellstream archive of all plates, with its defaults."""
    from cellstream.cell import concat_cell_archives, write_cell_archive  # noqa: PLC0415

    Path(target).mkdir()
    with tempfile.TemporaryDirectory(dir=target) as parts:
        archives = [Path(parts) / Path(plate).with_suffix(".csad").name for plate in plates]
        for plate, archive in zip(plates, archives, strict=True):
            write_cell_archive(Path(plate), archive)
        concat_cell_archives(archives, Path(target) / "cells.csad")


def tiledbsoma(target: str, *plates: str) -> None:
    """Ingest the plates into one TileDB-SOMA experiment, registered together as in its guide."""
    import tiledbsoma.io as soma  # noqa: PLC0415

    measurement = "RNA"
    soma.from_h5ad(target, plates[0], measurement, ingest_mode="schema_only")
    registration = soma.register_h5ads(
        target,
        plates,
        measurement_name=measurement,
        obs_field_name="obs_id",
        var_field_name="var_id",
    )
    registration.prepare_experiment(target)
    for plate in plates:
        soma.from_h5ad(target, plate, measurement, registration_mapping=registration)


CONVERSIONS = {each.__name__: each for each in (annbatch, cellstream, tiledbsoma)}

if __name__ == "__main__":
    storage, *paths = sys.argv[1:]
    CONVERSIONS[storage](*paths)
