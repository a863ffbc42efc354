"""Ingest the plates into one TileDB-SOMA experiment, registered together as in its guide."""

import sys

import tiledbsoma.io as soma

MEASUREMENT = "RNA"

if __name__ == "__main__":
    target, *plates = sys.argv[1:]
    soma.from_h5ad(target, plates[0], MEASUREMENT, ingest_mode="schema_only")
    registration = soma.register_h5ads(
        target,
        plates,
        measurement_name=MEASUREMENT,
        obs_field_name="obs_id",
        var_field_name="var_id",
    )
    registration.prepare_experiment(target)
    for plate in plates:
        soma.from_h5ad(target, plate, MEASUREMENT, registration_mapping=registration)
