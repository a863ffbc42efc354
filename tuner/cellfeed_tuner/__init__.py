"""Measure a loader's throughput and label entropy, and recommend settings for this machine.

The ``autotune`` command does it from a shell, and `autotune` from Python.
"""

from cellfeed_tuner import plots, theory, training
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
from cellfeed_tuner._explain._bottleneck import Bottleneck, Stage
from cellfeed_tuner._explain._stage_model import StageModel
from cellfeed_tuner._explain._storage_advice import StorageAdvice
from cellfeed_tuner._history._recall import Earlier
from cellfeed_tuner._interruption import AutotuneInterrupted
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._machine._busy import Busy
from cellfeed_tuner._machine._description import Machine, describe_machine
from cellfeed_tuner._measuring._annloader import measure_annloader
from cellfeed_tuner._measuring._decoded import decoded_bytes_per_cell
from cellfeed_tuner._measuring._loader import measure_loader
from cellfeed_tuner._measuring._measure import Measurement, measure
from cellfeed_tuner._measuring._storage_throughputs import storage_throughputs
from cellfeed_tuner._published import published_grid, published_macro_f1, published_workers
from cellfeed_tuner._recording._record import Recording, record
from cellfeed_tuner._recording._recorded_grid import RecordedGrid, read_grid
from cellfeed_tuner._replaying._replay import Replay, replay
from cellfeed_tuner._results._autotune_result import AutotuneResult, Ranges
from cellfeed_tuner._results._configuration_result import (
    ConditionalEntropyBits,
    ConfigurationResult,
    EntropyBits,
    LabelResult,
)
from cellfeed_tuner._results._dataset import Dataset, LabelCensus
from cellfeed_tuner._results._recommended import Constraints, Nearest, Recommended, Rival
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
    "Ranges",
    "Recommended",
    "RecordedGrid",
    "Recording",
    "Replay",
    "Rival",
    "Stage",
    "StageModel",
    "StorageAdvice",
    "StorageOrder",
    "Verdict",
    "autotune",
    "block_mixing",
    "decoded_bytes_per_cell",
    "describe_machine",
    "entropy_over_epoch",
    "joint_codes",
    "label_entropies",
    "label_entropy",
    "measure",
    "measure_annloader",
    "measure_loader",
    "minibatch_entropies",
    "plots",
    "published_grid",
    "published_macro_f1",
    "published_workers",
    "random_conditional_entropy_bits",
    "read_grid",
    "record",
    "replay",
    "storage_order",
    "storage_throughputs",
    "theory",
    "training",
]
