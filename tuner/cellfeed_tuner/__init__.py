"""Measure a loader's throughput and label entropy, and recommend settings for this machine.

The ``autotune`` command does it from a shell, and `autotune` from Python.
"""

import importlib
import sys
import typing

if typing.TYPE_CHECKING:
    from cellfeed_tuner import plots, theory
    from cellfeed_tuner._autotune import autotune
    from cellfeed_tuner._bottleneck import Bottleneck, Stage, StageModel
    from cellfeed_tuner._configuration import Configuration
    from cellfeed_tuner._dataloaders._trainers import tune_trainer
    from cellfeed_tuner._dataloaders._tune import TunedDataLoader, tune_dataloader
    from cellfeed_tuner._entropy import (
        LabelEntropy,
        StrategyEntropy,
        label_entropy,
        minibatch_entropies,
        strategy_entropy,
    )
    from cellfeed_tuner._headroom import Headroom, headroom
    from cellfeed_tuner._interval import Estimate
    from cellfeed_tuner._machine import Busy, Machine, describe_machine
    from cellfeed_tuner._measuring._measurement import Measurement, measure
    from cellfeed_tuner._profile import profile
    from cellfeed_tuner._ranks import FedRanks, Ranks, Scaling
    from cellfeed_tuner._result import AutotuneInterrupted, AutotuneResult, Ranges
    from cellfeed_tuner._results import (
        ConfigurationResult,
        Constraints,
        Dataset,
        EntropyBits,
        LabelCensus,
        LabelResult,
        Nearest,
        PrefetchResult,
        Recommended,
        Rival,
        StorageOrder,
        Verdict,
    )
    from cellfeed_tuner._storage_advice import StorageAdvice, epochs_until_paid
    from cellfeed_tuner._subject import Tunable

# Lazy: modules by what they have; keep in step with the TYPE_CHECKING block above.
_MODULE_OF = {
    name: f"{__name__}.{module}"
    for module, names in {
        "_autotune": "autotune",
        "_bottleneck": "Bottleneck Stage StageModel",
        "_configuration": "Configuration",
        "_dataloaders._tune": "TunedDataLoader tune_dataloader",
        "_dataloaders._trainers": "tune_trainer",
        "_entropy": "LabelEntropy StrategyEntropy label_entropy "
        "minibatch_entropies strategy_entropy",
        "_headroom": "Headroom headroom",
        "_interval": "Estimate",
        "_machine": "Busy Machine describe_machine",
        "_profile": "profile",
        "_measuring._measurement": "Measurement measure",
        "_ranks": "FedRanks Ranks Scaling",
        "_result": "AutotuneInterrupted AutotuneResult Ranges",
        "_results": "ConfigurationResult Constraints Dataset EntropyBits LabelCensus LabelResult "
        "Nearest PrefetchResult Recommended Rival StorageOrder Verdict",
        "_storage_advice": "StorageAdvice epochs_until_paid",
        "_subject": "Tunable",
    }.items()
    for name in names.split()
}
_MODULES = ("plots", "theory")

__all__ = [
    "AutotuneInterrupted", "AutotuneResult", "Bottleneck", "Busy", "Configuration",
    "ConfigurationResult", "Constraints", "Dataset", "EntropyBits", "Estimate", "FedRanks",
    "Headroom", "LabelCensus", "LabelEntropy", "LabelResult",
    "Machine", "Measurement", "Nearest", "PrefetchResult", "Ranges", "Ranks", "Recommended",
    "Rival", "Scaling", "Stage", "StageModel", "StorageAdvice", "StorageOrder", "StrategyEntropy",
    "Tunable", "TunedDataLoader", "Verdict", "autotune", "describe_machine",
    "epochs_until_paid", "headroom", "label_entropy", "measure", "minibatch_entropies", "plots",
    "profile", "strategy_entropy", "theory", "tune_dataloader", "tune_trainer",
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
        return _imported("cellfeed_tuner._reports._text").html_summary(result)
