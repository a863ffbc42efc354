"""Integration with those who iterate: DataLoaders of torch, and what trainers make of them.

Accelerate replaces each DataLoader that it prepares, and divides its minibatches among ranks. Our
loaders are divided already, so they report that they are prepared.

A dataset is not told who makes a DataLoader of it, nor which trainer iterates over it; where it
matters, the calling functions are looked at.
"""

import sys
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from types import FrameType
from typing import Any

from cellfeed._collection import Collection
from cellfeed._errors import ParameterError, StateError

_N_CALLERS = 4  # between a DataLoader and the dataset that it asks for its class
_LIGHTNING = ("pytorch_lightning", "lightning.pytorch")
_RAY = "ray.train.torch.train_loop_utils"


class _Active:
    """One of the iterations over a loader, all of which Accelerate would remove with the first."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    @property
    def end_of_dataloader(self) -> bool:
        """See `MinibatchLoader`."""
        return bool(self._loader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """See `MinibatchLoader`."""
        return int(self._loader.remainder)


def accumulating(loader: Any, minibatches: Iterator[Any]) -> Generator[Any, None, None]:
    """Yield minibatches without keeping the last, as those of Accelerate's active DataLoader.

    At its end, Accelerate synchronises accumulated gradients.
    """
    from accelerate.state import GradientState  # noqa: PLC0415 - only where it is used

    gradients, active = GradientState(), _Active(loader)
    gradients._add_dataloader(active)  # noqa: SLF001 - as its own DataLoaders do
    try:
        yield from minibatches
    finally:
        gradients._remove_dataloader(active)  # noqa: SLF001


def require_kept_whole(dataset: Any, *, world_size: int, resumes_another: bool) -> None:
    """Check that Accelerate, if it iterates over a dataset, uses the dataset's own loader.

    Parameters
    ----------
    dataset
        The dataset.
    world_size
        The number of ranks among which it is divided.
    resumes_another
        Whether a state was loaded, which setting the epoch would discard.

    Raises
    ------
    ParameterError
        Accelerate divides it a second time, or cannot tell how many cells a minibatch has.
    StateError
        Accelerate's own count of epochs would discard the position in the state.
    """
    active = _remade(dataset)
    if active is None:
        return
    if world_size > 1:
        msg = (
            f"Accelerate divides a DataLoader among {world_size} ranks, but the dataset is "
            "already divided among them, so cells would be missing; pass "
            "`dataset.loader(...)` to `accelerator.prepare`"
        )
        raise ParameterError(msg)
    yields_minibatches = any(
        isinstance(each.collection, Collection) and not each.batch_transform
        for each in getattr(dataset, "datasets", (dataset,))
    )
    divides = sys.modules["accelerate.data_loader"].DataLoaderDispatcher
    if isinstance(active, divides) and yields_minibatches:
        msg = (
            "Accelerate cannot tell how many cells a minibatch has that another DataLoader than "
            "cellfeed's delivers; pass `dataset.loader(...)` to `accelerator.prepare`"
        )
        raise ParameterError(msg)
    if resumes_another:
        msg = (
            "Accelerate counts the epochs of a DataLoader from 0, which would discard the "
            "loaded state; pass `dataset.loader(...)` to `accelerator.prepare`"
        )
        raise StateError(msg)


def _remade(dataset: Any) -> Any:
    """Return the DataLoader that Accelerate iterates over in place of another of this dataset."""
    loaders, state = (sys.modules.get(f"accelerate.{name}") for name in ("data_loader", "state"))
    if loaders is None or state is None:
        return None
    active = state.GradientState().active_dataloader
    if not isinstance(active, loaders.DataLoaderAdapter):
        return None
    iterated = active.dataset
    is_over_it = iterated is dataset or getattr(iterated, "dataset", None) is dataset
    return active if is_over_it else None


def check_data_loader(
    dataset: Any, caller: FrameType | None, n_resumed_after: Callable[[], int]
) -> None:
    """Check the options of a DataLoader that is being made over a dataset, if one is.

    Parameters
    ----------
    dataset
        The dataset, whose class has been asked for.
    caller
        Who asked.
    n_resumed_after
        Returns after how many minibatches the next iteration resumes an epoch.

    Raises
    ------
    ParameterError
        The DataLoader would batch minibatches again, or has options that do not apply.
    StateError
        Accelerate would skip minibatches, but the dataset resumes after them.
    """
    options: Mapping[str, Any] = {}
    for _ in range(_N_CALLERS):
        if caller is None:
            return
        if caller.f_code.co_name == "__init__" and "batch_sampler" in caller.f_code.co_varnames:
            options = caller.f_locals
            break
        caller = caller.f_back
    if options.get("dataset") is not dataset:
        return
    _require_none_skipped(_skipped_by_accelerate(caller), n_resumed_after)
    collate, n_collated = options.get("collate_fn"), options.get("batch_size")
    whose = "torch" if collate is None else str(getattr(collate, "__module__", "")).split(".")[0]
    remedy = "write `dataset.loader()`, or DataLoader(dataset, batch_size=None)"
    if whose == "transformers":
        remedy = "use `cellfeed.frameworks.transformers.CellTrainer`, which takes the dataset"
    for name in ("shuffle", "sampler", "batch_sampler"):
        if options.get(name) not in (None, False):
            msg = (
                f"`{name}` of a DataLoader does not apply to a cellfeed dataset, whose strategy "
                f"determines the order and which divides itself among ranks; {remedy}"
            )
            raise ParameterError(msg)
    if n_collated is not None and whose in ("torch", "transformers"):
        msg = (
            "a cellfeed dataset yields minibatches, which a DataLoader with "
            f"batch_size={n_collated} would batch again; {remedy}"
        )
        raise ParameterError(msg)
    if options.get("drop_last") and n_collated is None:
        msg = f"`drop_last` is a parameter of the dataset; give it there, and {remedy}"
        raise ParameterError(msg)


def _require_none_skipped(n_skipped: int, n_resumed_after: Callable[[], int]) -> None:
    if n_skipped and (n_delivered := n_resumed_after()):
        msg = (
            f"`skip_first_batches` would skip {n_skipped:,} minibatches of what is left, since the "
            f"loaded state resumes an epoch after {n_delivered:,}; leave it out"
        )
        raise StateError(msg)


def _skipped_by_accelerate(caller: FrameType | None) -> int:
    """Return how many minibatches a DataLoader of Accelerate that is being made will skip."""
    for _ in range(_N_CALLERS):
        caller = None if caller is None else caller.f_back
        if caller is None or caller.f_globals.get("__name__") != "accelerate.data_loader":
            return 0
        if "skip_batches" in caller.f_locals:
            return int(caller.f_locals["skip_batches"])
    return 0


def n_taken_ahead() -> int:
    """Return how many minibatches are taken from an iteration ahead of the training loop.

    One is, by the loader that ``prepare_data_loader`` of Ray Train returns.
    """
    if _RAY not in sys.modules:
        return 0
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - there is no other way
    while frame is not None:
        if frame.f_globals.get("__name__") == _RAY and "prefetch" in frame.f_code.co_name:
            return 1
        frame = frame.f_back
    return 0


def is_overfitting() -> bool:
    """Return whether Lightning repeats the same minibatches (``overfit_batches``)."""
    loop = _loop_of_lightning()
    return loop is not None and loop.trainer.overfit_batches > 0


# Of which datasets a warning has told that their place is lost, by loop of Lightning.
_told = weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]]()


def check_lightning(dataset: Any) -> None:
    """Warn if Lightning resumes within an epoch without the state of a dataset's loader.

    Parameters
    ----------
    dataset
        The dataset, which begins an epoch that it does not resume.

    Warns
    -----
    UserWarning
        It does.
    """
    fit = _fit_of(_loop_of_lightning())
    dropped = getattr(fit, "_combined_loader_states_to_load", None)
    if fit is None or not (dropped or fit.epoch_loop.restarting):
        return
    if not any(each is dataset for each in _trained_by(fit)) or dataset in _told.get(fit, ()):
        return
    if fit.epoch_loop.batch_progress.current.completed:
        reason = (
            "`estimated_stepping_batches` was asked for before the checkpoint was loaded"
            if dropped
            else "a DataLoader that is not `dataset.loader()` has no state"
        )
    else:
        epoch, n = fit.epoch_progress.current.processed, 0
        for state in () if dataset.n_resumed else dropped or ():
            if isinstance(state, Mapping) and state.get("format") == "cellfeed state":
                n = sum(each[-1] for each in (*state["after"], state["progress"]))
                if state["epoch"] == epoch - 1:  # which `max_steps` has ended
                    warn_of_rest(dataset, epoch, epoch - 1, n)
                n *= state["epoch"] == epoch
        if not n:
            return
        reason = "the run had been resumed before, at the end of an epoch"
    _tell_of(dataset, fit)
    warnings.warn(
        "Lightning resumes within an epoch but has not restored this loader, so the epoch starts "
        f"again from its first minibatch, because {reason}; hold the loader in a data module: "
        "`cellfeed.frameworks.lightning.CellDataModule(train=dataset)`",
        UserWarning,
        stacklevel=2,
    )


def align_lightning(
    dataset: Any, length: int, n_left: int | None = None, *, resumes: bool = True
) -> None:
    """Make Lightning's count of minibatches end with the length of an epoch.

    When it resumes, it counts on from where it was stopped, and leaves out what comes after the
    length. But with other numbers of ranks or workers, the rest of the epoch has another number of
    minibatches, and an epoch that starts again has all.

    Parameters
    ----------
    dataset
        The dataset, which begins an epoch.
    length
        How many minibatches a whole one has.
    n_left
        How many minibatches are left; None if the epoch has not begun.
    resumes
        Whether the dataset resumes it. Lightning may do so where the dataset starts it again.
    """
    # A callback may also iterate over the dataset.
    loop = _loop_of_lightning(is_fetching=n_left is not None)
    epochs, n = _epoch_loop_of(loop, dataset, length)
    if epochs is None or not (resumes or epochs.restarting):
        return
    progress, n_begun = epochs.batch_progress.current, 0
    if n_left is None:
        n_done = min(progress.completed, n - 1)  # or it would not begin
        epochs.batch_progress.is_last_batch = False
    else:
        n_done = max(0, n - n_left)
        fetcher = loop.trainer.fit_loop._data_fetcher  # noqa: SLF001 - there is no other way
        fetcher.fetched += n_done - progress.completed
        if loop in (epochs.automatic_optimization, epochs.manual_optimization):
            # In a step, which may take several minibatches; steps are counted then.
            n_done, n_begun = min(progress.completed, n_done), 1
    progress.ready = progress.started = n_done + n_begun
    progress.processed = progress.completed = n_done


def end_epoch_of_lightning(dataset: Any, length: int) -> None:
    """Make Lightning end an epoch all of which the dataset delivered before Lightning resumed it.

    It was stopped in the validation after the last minibatch. With other numbers of ranks or
    workers, its count is not the length, so that it would train on the whole epoch again.
    """
    loop = _loop_of_lightning()
    epochs, n = _epoch_loop_of(loop, dataset, length)
    if epochs is None:
        return
    if not (epochs.restarting and epochs.batch_progress.current.completed):
        epoch = loop.trainer.fit_loop.epoch_progress.current.processed
        warnings.warn(
            f"Lightning trains in epoch {epoch} again, though the loaded state is of its end: it "
            "counts from 0 without a checkpoint, and one too few if it has resumed at the end of "
            "an epoch before; give it a checkpoint that was saved in `on_train_epoch_end`",
            UserWarning,
            stacklevel=3,
        )
        return
    interval = loop.trainer.val_check_batch
    if isinstance(interval, int):  # the validation goes on after a multiple of it
        n += -n % interval
    progress = epochs.batch_progress.current
    progress.increment_by(n - progress.ready)


def _epoch_loop_of(loop: Any, dataset: Any, length: int) -> tuple[Any, int]:
    """Return Lightning's loop over an epoch of a dataset, and the length of that.

    None if another loop calls, if it trains on other data as well, or not to the end of the epoch.
    """
    fit = _fit_of(loop)
    if fit is None or _trained_by(fit) != [dataset]:
        return None, 0
    epochs, n = fit.epoch_loop, fit.max_batches
    own = (fit, epochs, epochs.automatic_optimization, epochs.manual_optimization)
    if loop not in own or not isinstance(n, int) or n < length:
        return None, 0
    return epochs, n


def warn_of_rest(dataset: Any, epoch: int, discarded: int, n_minibatches: int) -> None:
    """Warn that setting the epoch discards the rest of another one, after so many minibatches."""
    if n_minibatches:
        fit = _fit_of(_loop_of_lightning())
        if fit is not None:
            _tell_of(dataset, fit)
            if n_minibatches >= fit.trainer.num_training_batches:  # `limit_train_batches` ended it
                return
        warnings.warn(
            f"epoch {epoch} was set, so that the rest of epoch {discarded}, after "
            f"{n_minibatches:,} minibatches, is not delivered, as the loaded state would have; set "
            "the epoch of the state, or none (Lightning sets the next one where `max_steps` has "
            "ended an epoch)",
            UserWarning,
            stacklevel=3,
        )


def _tell_of(dataset: Any, fit: Any) -> None:
    _told.setdefault(fit, weakref.WeakSet()).add(dataset)


def _fit_of(loop: Any) -> Any:
    """Return the loop of Lightning's ``fit`` to which another belongs; None if there is none."""
    return None if loop is None else getattr(loop.trainer, "fit_loop", None)


def _trained_by(fit: Any) -> list[Any]:
    """Return the datasets of the loaders on which Lightning trains."""
    loaders = getattr(getattr(fit, "_combined_loader", None), "flattened", ())
    return [getattr(each, "dataset", None) for each in loaders]


def _loop_of_lightning(*, is_fetching: bool = False) -> Any:
    """Return the innermost loop of Lightning that calls this; None if there is none.

    With ``is_fetching``, only if it calls this to get its next minibatch.
    """
    if not any(name in sys.modules for name in _LIGHTNING):
        return None
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - there is no other way
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(tuple(f"{name}.loops." for name in _LIGHTNING)):
            is_fetching &= not module.endswith(".fetchers")
            loop = frame.f_locals.get("self")
            if hasattr(loop, "trainer"):
                return None if is_fetching else loop
        frame = frame.f_back
    return None
