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
    from cellfeed_tuner._entropy._label_entropy import (
        LabelEntropy,
        StorageOrder,
        StrategyEntropy,
        label_entropy,
        strategy_entropy,
    )
    from cellfeed_tuner._entropy._minibatch_entropy import Conditional, minibatch_entropies
    from cellfeed_tuner._explain._bottleneck import Bottleneck, Stage, StageModel
    from cellfeed_tuner._explain._storage_advice import StorageAdvice, epochs_until_paid
    from cellfeed_tuner._history._recall import Earlier
    from cellfeed_tuner._interval import Estimate
    from cellfeed_tuner._machine._busy import Busy
    from cellfeed_tuner._machine._description import Machine, describe_machine
    from cellfeed_tuner._measuring._measure import measure
    from cellfeed_tuner._measuring._measurement import Measurement
    from cellfeed_tuner._ranks import Ranks
    from cellfeed_tuner._result import AutotuneInterrupted, AutotuneResult, Ranges
    from cellfeed_tuner._results._configuration_result import (
        ConditionalEntropyBits,
        ConfigurationResult,
        EntropyBits,
        LabelResult,
        Verdict,
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

# Modules by what they have; imported when it is asked for, as is said above to type checkers.
_MODULE_OF = {
    name: f"{__name__}.{module}"
    for module, names in {
        "_autotune": "autotune",
        "_configuration": "Configuration",
        "_entropy._label_entropy": "LabelEntropy StorageOrder StrategyEntropy label_entropy "
        "strategy_entropy",
        "_entropy._minibatch_entropy": "Conditional minibatch_entropies",
        "_explain._bottleneck": "Bottleneck Stage StageModel",
        "_explain._storage_advice": "StorageAdvice epochs_until_paid",
        "_history._recall": "Earlier",
        "_interval": "Estimate",
        "_machine._busy": "Busy",
        "_machine._description": "Machine describe_machine",
        "_measuring._measure": "measure",
        "_measuring._measurement": "Measurement",
        "_ranks": "Ranks",
        "_result": "AutotuneInterrupted AutotuneResult Ranges",
        "_results._configuration_result": "ConditionalEntropyBits ConfigurationResult EntropyBits "
        "LabelResult Verdict",
        "_results._dataset": "Dataset LabelCensus",
        "_results._recommended": "Constraints Nearest PrefetchResult Recommended Rival",
        "_subject._tunable": "Tunable",
    }.items()
    for name in names.split()
}
_MODULES = ("plots", "theory")

__all__ = [
    "AutotuneInterrupted", "AutotuneResult", "Bottleneck", "Busy", "Conditional",
    "ConditionalEntropyBits", "Configuration", "ConfigurationResult", "Constraints", "Dataset",
    "Earlier", "EntropyBits", "Estimate", "LabelCensus", "LabelEntropy", "LabelResult",
    "Machine", "Measurement", "Nearest", "PrefetchResult", "Ranges", "Ranks", "Recommended",
    "Rival", "Stage", "StageModel", "StorageAdvice", "StorageOrder", "StrategyEntropy",
    "Tunable", "Verdict", "autotune", "describe_machine", "epochs_until_paid", "label_entropy",
    "measure", "minibatch_entropies", "plots", "strategy_entropy", "theory",
]  # fmt: skip

if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> typing.Any:
        if name in _MODULES:
            return _imported(f"{__name__}.{name}")
        if name not in _MODULE_OF:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        value = getattr(_imported(_MODULE_OF[name]), name)
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
        return _imported("cellfeed_tuner._reports._words").html_summary(result)
