"""Parameters of a dataset from names alone, as tests write them."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from cellfeed import ReadOptions

NAMES = {each.name for each in fields(ReadOptions)}


def parameters_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """What belongs to `ReadOptions` goes there."""
    of_reading = {name: value for name, value in options.items() if name in NAMES}
    others = {name: value for name, value in options.items() if name not in NAMES}
    return others | {"read_options": ReadOptions(**of_reading)} if of_reading else others
