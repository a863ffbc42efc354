"""Measure a loader's throughput and label entropy, and recommend settings for this machine.

The ``autotune`` command does it from a shell, and `autotune` from Python.
"""

import importlib
import sys
import typing

if typing.TYPE_CHECKING:
    from cellfeed_tuner import plots, theory
    from cellfeed_tuner._autotune import autotune
    from cellfeed_tuner._configuration import Configuration
    from cellfeed_tuner._entropy._block_mixing import BlockMixing, block_mixing
    from cellfeed_tuner._entropy._conditional_entropy import (
        Conditional,
        joint_codes,
        random_conditional_entropy_bits,
    )
    from cellfeed_tuner._entropy._epoch_course import EpochCourse, entropy_over_epoch
    from cellfeed_tuner._entropy._label_entropy import (
        LabelEntropy,
        label_entropies,
        label_entropy,
    )
    from cellfeed_tuner._entropy._minibatch_entropy import minibatch_entropies
    from cellfeed_tuner._entropy._storage_order import StorageOrder, storage_order
    from cellfeed_tuner._entropy._strategy_entropy import StrategyEntropy, strategy_entropy
    from cellfeed_tuner._explain._bottleneck import Bottleneck, Stage
    from cellfeed_tuner._explain._stage_model import StageModel
    from cellfeed_tuner._explain._storage_advice import StorageAdvice, epochs_until_paid
    from cellfeed_tuner._history._recall import Earlier
    from cellfeed_tuner._interruption import AutotuneInterrupted
    from cellfeed_tuner._interval import Estimate
    from cellfeed_tuner._machine._busy import Busy
    from cellfeed_tuner._machine._description import Machine, describe_machine
    from cellfeed_tuner._measuring._measure import Measurement, measure
    from cellfeed_tuner._ranks._world import Ranks
    from cellfeed_tuner._result import AutotuneResult, Ranges
    from cellfeed_tuner._results._configuration_result import (
        ConditionalEntropyBits,
        ConfigurationResult,
        EntropyBits,
        LabelResult,
    )
    from cellfeed_tuner._results._dataset import Dataset, LabelCensus
    from cellfeed_tuner._results._recommended import (
        Constraints,
        Nearest,
        PrefetchResult,
        Recommended,
        Rival,
    )
    from cellfeed_tuner._subject._tunable import Tunable
    from cellfeed_tuner._verdicts._verdict import Verdict

__all__ = [
    "AutotuneInterrupted",
    "AutotuneResult",
    "BlockMixing",
    "Bottleneck",
    "Busy",
    "Conditional",
    "ConditionalEntropyBits",
    "Configuration",
    "ConfigurationResult",
    "Constraints",
    "Dataset",
    "Earlier",
    "EntropyBits",
    "EpochCourse",
    "Estimate",
    "LabelCensus",
    "LabelEntropy",
    "LabelResult",
    "Machine",
    "Measurement",
    "Nearest",
    "PrefetchResult",
    "Ranges",
    "Ranks",
    "Recommended",
    "Rival",
    "Stage",
    "StageModel",
    "StorageAdvice",
    "StorageOrder",
    "StrategyEntropy",
    "Tunable",
    "Verdict",
    "autotune",
    "block_mixing",
    "describe_machine",
    "entropy_over_epoch",
    "epochs_until_paid",
    "joint_codes",
    "label_entropies",
    "label_entropy",
    "measure",
    "minibatch_entropies",
    "plots",
    "random_conditional_entropy_bits",
    "storage_order",
    "strategy_entropy",
    "theory",
]

# Imported when it is asked for, as is said above to type checkers.
_IMPORTED_WHEN_USED = {
    "AutotuneInterrupted": "cellfeed_tuner._interruption",
    "AutotuneResult": "cellfeed_tuner._result",
    "BlockMixing": "cellfeed_tuner._entropy._block_mixing",
    "Bottleneck": "cellfeed_tuner._explain._bottleneck",
    "Busy": "cellfeed_tuner._machine._busy",
    "Conditional": "cellfeed_tuner._entropy._conditional_entropy",
    "ConditionalEntropyBits": "cellfeed_tuner._results._configuration_result",
    "Configuration": "cellfeed_tuner._configuration",
    "ConfigurationResult": "cellfeed_tuner._results._configuration_result",
    "Constraints": "cellfeed_tuner._results._recommended",
    "Dataset": "cellfeed_tuner._results._dataset",
    "Earlier": "cellfeed_tuner._history._recall",
    "EntropyBits": "cellfeed_tuner._results._configuration_result",
    "EpochCourse": "cellfeed_tuner._entropy._epoch_course",
    "Estimate": "cellfeed_tuner._interval",
    "LabelCensus": "cellfeed_tuner._results._dataset",
    "LabelEntropy": "cellfeed_tuner._entropy._label_entropy",
    "LabelResult": "cellfeed_tuner._results._configuration_result",
    "Machine": "cellfeed_tuner._machine._description",
    "Measurement": "cellfeed_tuner._measuring._measure",
    "Nearest": "cellfeed_tuner._results._recommended",
    "PrefetchResult": "cellfeed_tuner._results._recommended",
    "Ranges": "cellfeed_tuner._result",
    "Ranks": "cellfeed_tuner._ranks._world",
    "Recommended": "cellfeed_tuner._results._recommended",
    "Rival": "cellfeed_tuner._results._recommended",
    "Stage": "cellfeed_tuner._explain._bottleneck",
    "StageModel": "cellfeed_tuner._explain._stage_model",
    "StorageAdvice": "cellfeed_tuner._explain._storage_advice",
    "StorageOrder": "cellfeed_tuner._entropy._storage_order",
    "StrategyEntropy": "cellfeed_tuner._entropy._strategy_entropy",
    "Tunable": "cellfeed_tuner._subject._tunable",
    "Verdict": "cellfeed_tuner._verdicts._verdict",
    "autotune": "cellfeed_tuner._autotune",
    "block_mixing": "cellfeed_tuner._entropy._block_mixing",
    "describe_machine": "cellfeed_tuner._machine._description",
    "entropy_over_epoch": "cellfeed_tuner._entropy._epoch_course",
    "epochs_until_paid": "cellfeed_tuner._explain._storage_advice",
    "joint_codes": "cellfeed_tuner._entropy._conditional_entropy",
    "label_entropies": "cellfeed_tuner._entropy._label_entropy",
    "label_entropy": "cellfeed_tuner._entropy._label_entropy",
    "measure": "cellfeed_tuner._measuring._measure",
    "minibatch_entropies": "cellfeed_tuner._entropy._minibatch_entropy",
    "random_conditional_entropy_bits": "cellfeed_tuner._entropy._conditional_entropy",
    "storage_order": "cellfeed_tuner._entropy._storage_order",
    "strategy_entropy": "cellfeed_tuner._entropy._strategy_entropy",
}
_MODULES = ("plots", "theory")

if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> typing.Any:
        if name in _MODULES:
            return _imported(f"{__name__}.{name}")
        if name not in _IMPORTED_WHEN_USED:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        value = getattr(_imported(_IMPORTED_WHEN_USED[name]), name)
        globals()[name] = value
        return value

    def _imported(module: str) -> typing.Any:
        try:
            imported = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith(__name__):
                raise
            msg = f"{error.name} is not installed; install it: pip install 'cellfeed[tune]'"
            raise ModuleNotFoundError(msg, name=error.name) from error
        if "cellfeed_tuner._result" in sys.modules:
            # How a notebook shows a result, which knows nothing of that itself.
            sys.modules["cellfeed_tuner._result"].AutotuneResult._repr_html_ = _shown
        return imported

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

    def _shown(result: typing.Any) -> str:
        return _imported("cellfeed_tuner._reports._notebook").html_summary(result)
