"""Results as plain values: settings beside what is said of them, intervals that JSON can hold."""

import math
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._entropy._epoch_course import EpochCourse
from cellfeed_tuner._entropy._storage_order import StorageOrder
from cellfeed_tuner._explain._bottleneck import Bottleneck

if TYPE_CHECKING:
    from cellfeed_tuner._results._configuration_result import (
        ConditionalEntropyBits,
        ConfigurationResult,
        EntropyBits,
    )
    from cellfeed_tuner._results._recommended import Recommended

__all__ = [
    "bottleneck_json",
    "configuration_json",
    "course_json",
    "flat",
    "nested",
    "recommended_json",
    "storage_order_json",
]

_ABSENT = {"value": None, "low": None, "high": None}
# What chance may do, of which nothing is known where there are few fetches.
_PERHAPS_INFINITE = {"drift_error_bits", "departure_error_bits"}
_SETTINGS = tuple(each.name for each in fields(Configuration))


def configuration_json(result: "ConfigurationResult") -> dict[str, Any]:
    """Return what is known of a configuration, with its settings beside it."""
    plain = flat(asdict(result))
    plain["cells_per_second"] = plain["cells_per_second"] or _ABSENT
    plain["entropy_bits"] = _entropy_json(result.entropy_bits)
    for name, each in result.further_labels.items():
        plain["further_labels"][name]["entropy_bits"] = _entropy_json(each.entropy_bits)
    if result.conditional_entropy_bits is not None:
        plain["conditional_entropy_bits"] = _with_intervals(result.conditional_entropy_bits)
    return plain


def recommended_json(recommended: "Recommended") -> dict[str, Any]:
    """Return the choice, with its settings beside it."""
    plain = flat(asdict(recommended))
    plain["rivals"] = [
        flat(each) | {"undecided": rival.is_undecided}
        for each, rival in zip(plain["rivals"], recommended.rivals, strict=True)
    ]
    share = recommended.waiting and recommended.waiting.share
    if share is not None:
        plain["waiting"]["share"] = {name: _finite(each) for name, each in asdict(share).items()}
    return plain


def _entropy_json(entropy: "EntropyBits") -> dict[str, Any]:
    return _with_intervals(entropy) | {"verdict": entropy.verdict}


def _with_intervals(entropy: "EntropyBits | ConditionalEntropyBits") -> dict[str, Any]:
    plain = asdict(entropy)
    for name in ("measured", "expected"):
        value, low, high = (plain[name] or _ABSENT).values()
        plain |= {name: value, f"{name}_interval": [_finite(low), _finite(high)]}
    return plain


def course_json(course: EpochCourse) -> dict[str, Any]:
    """Return the entropy over an epoch, and what to say of it."""
    plain = asdict(course)
    deciles = [{key: _finite(each) for key, each in one.items()} for one in plain.pop("deciles")]
    finite = {name: _finite(each) for name, each in plain.items()}
    said = {"drifts": course.drifts, "sentence": course.sentence}
    return {"deciles": deciles, **finite, **said}


def storage_order_json(order: StorageOrder) -> dict[str, Any]:
    """Return whether files are shuffled, and what to say of it."""
    return asdict(order) | {"already_shuffled": order.already_shuffled, "sentence": order.sentence}


def bottleneck_json(found: Bottleneck) -> dict[str, Any]:
    """Return where the time goes, and what to say of it."""
    return asdict(found) | {
        "read_amplification": found.read_amplification,
        "sentence": found.sentence,
    }


def flat(plain: dict[str, Any]) -> dict[str, Any]:
    """Lift the settings to the level of what is said of them."""
    settings: dict[str, Any] = plain.pop("configuration")
    return settings | plain


def nested(plain: Any) -> Any:
    """Undo what is done here to make values easier to use."""
    if isinstance(plain, list):
        return [nested(each) for each in plain]
    if not isinstance(plain, dict):
        return plain
    known = {name: nested(each) for name, each in plain.items()}
    for name in [name for name in known if f"{name}_interval" in known]:
        low, high = known.pop(f"{name}_interval")
        known[name] = _estimate({"value": known[name], "low": low, "high": high})
    for name in _PERHAPS_INFINITE & known.keys():
        known[name] = math.inf if known[name] is None else known[name]
    if known.keys() == _ABSENT.keys():
        return _estimate(known)
    if all(name in known for name in _SETTINGS):
        known["configuration"] = {name: known[name] for name in _SETTINGS}
    return known


def _estimate(plain: dict[str, Any]) -> dict[str, Any] | None:
    """Return an estimate with its infinite ends, None if it has no value."""
    if plain["value"] is None:
        return None
    low, high = plain["low"], plain["high"]
    return plain | {
        "low": -math.inf if low is None else low,
        "high": math.inf if high is None else high,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
