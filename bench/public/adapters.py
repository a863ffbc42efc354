"""cellfeed in two public benchmarks of loaders, by the interface that each of them asks for.

Neither is imported here: each is installed by who runs it.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from cellfeed import BlockShuffling, CellDataset, ParameterError, open_collection

LABEL = "cell_line"  # which laminlabs/arrayloader-benchmarks delivers with annbatch


def get_cellfeed_loader(
    local_paths: Sequence[Path],
    block_size: int = 4,
    fetch_factor: int = 16,
    num_workers: int = 0,
    batch_size: int = 4096,
    include_obs: bool = True,  # noqa: FBT001, FBT002 - as its other loaders
    seed: int = 0,
) -> Iterable[Any]:
    """Return what ``benchmark_loader`` of laminlabs/arrayloader-benchmarks iterates over.

    The counterpart of its ``get_scdataset_loader`` and ``get_annbatch_loader``, in
    ``scripts/run_loading_benchmark_on_collection.py``: parameters have their names, meanings and
    defaults, except that cellfeed reads with threads and so needs no workers.

    Parameters
    ----------
    local_paths
        ``.h5ad`` files or zarr stores.
    block_size, fetch_factor, num_workers, batch_size
        As of `BlockShuffling` and `CellDataset`.
    include_obs
        Whether minibatches have the column ``cell_line`` of ``obs``, as those of annbatch have
        there.
    seed
        Of the order.
    """
    dataset = CellDataset(
        open_collection([str(each) for each in local_paths], obs=[LABEL] if include_obs else []),
        BlockShuffling(block_size),
        batch_size=batch_size,
        fetch_factor=fetch_factor,
        seed=seed,
    )
    return dataset.loader(num_workers=num_workers)


def create_cellfeed_factory(
    paths: Sequence[Path],
    batch_size: int = 64,
    block_size: int = 16,
    fetch_factor: int = 64,
    num_workers: int = 0,
    seed: int = 0,
) -> Callable[[], Iterable[Any]]:
    """Return a ``dataloader_factory`` for bionemo-scspeedtest.

    Its ``benchmark_single_dataloader`` and ``benchmark_dataloaders_with_configs`` call the factory
    while they watch memory and time, then iterate; they read ``num_workers`` of what it returns,
    and ``X.shape[0]`` of each minibatch.
    """

    def factory() -> Iterable[Any]:
        return get_cellfeed_loader(
            paths, block_size, fetch_factor, num_workers, batch_size, include_obs=False, seed=seed
        )

    return factory


def run_arrayloader(paths: Sequence[Path], *, n_samples: int, batch_size: int, **settings: Any):
    """Run ``benchmark_loader`` as its script does; return samples/s and the size of minibatches.

    Raises
    ------
    ParameterError
        The benchmark is not installed, or there are fewer than ten cells.
    """
    try:
        from arrayloader_benchmarks import benchmark_loader  # noqa: PLC0415
    except ImportError as error:
        msg = (
            f"arrayloader_benchmarks is needed, but {error}; install it: pip install tqdm, and "
            "pip install --no-deps git+https://github.com/laminlabs/arrayloader-benchmarks"
        )
        raise ParameterError(msg) from error
    n_cells = len(open_collection([str(each) for each in paths]))
    batch_size = min(batch_size, n_cells // 10)  # as its script does
    if batch_size < 1:
        raise ParameterError(f"at least 10 cells are needed, but there are {n_cells}")
    loader = get_cellfeed_loader(paths, batch_size=batch_size, **settings)
    samples_per_s, *_ = benchmark_loader(loader, min(n_samples, n_cells), batch_size)
    return samples_per_s, batch_size


def run_scspeedtest(paths: Sequence[Path], *, seconds: float, warmup: float, **settings: Any):
    """Run ``benchmark_single_dataloader``, and return its result.

    Raises
    ------
    ParameterError
        The benchmark is not installed.
    """
    try:
        from bionemo import scspeedtest  # noqa: PLC0415
    except ImportError as error:
        msg = (
            f"bionemo-scspeedtest is needed, but {error}; install it: pip install tqdm, and "
            "pip install --no-deps 'git+https://github.com/NVIDIA/bionemo-framework"
            "#subdirectory=sub-packages/bionemo-scspeedtest'"
        )
        raise ParameterError(msg) from error
    named = ", ".join(f"{name} {value}" for name, value in settings.items())
    return scspeedtest.benchmark_single_dataloader(
        dataloader_factory=create_cellfeed_factory(paths, **settings),
        data_path=str(paths[0] if len(paths) == 1 else paths[0].parent),
        name=f"cellfeed, {named}",
        max_time_seconds=seconds,
        warmup_time_seconds=warmup,
        output_prefix="cellfeed_scspeedtest",
    )
