"""How many cells a GPU gets, by the way they are copied, and what a training waits for them.

    python -m bench.gpu.compare FOLDER [--device cuda] [--rounds 3] [--json FILE]

Ways take turns, round after round, on a synthetic collection that is written to the folder first,
and lies in the page cache. Minibatches arrive dense on the device: made dense there or on the CPU;
copied from pinned memory or not; by the training loop, or ahead of it, in a thread or a CUDA stream
of its own. Each way is measured without a model, and with steps of a small variational autoencoder,
beside steps on the same minibatch again and again, which wait for nothing. With ``--annbatch``,
annbatch copies its fetches to the GPU from a shuffled store that it writes of the same cells, and
cellfeed reads that store, too. Needs no more than cellfeed and torch otherwise; with ``--device
cpu``, ways that need a GPU are left out.
"""

import argparse
import itertools
import json
import platform
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from bench._turns import say, spread, warm
from torch import nn

from cellfeed import BlockShuffling, CellDataset, Minibatch, open_collection
from cellfeed.machine import usable_cpu_count
from cellfeed.synthetic import write_tahoe_like


@dataclass(frozen=True)
class Way:
    """How minibatches come to the device.

    Parameters
    ----------
    is_dense
        Whether they are made dense on the CPU.
    pinned
        What copies them into pinned memory, from which a GPU copies while the CPU goes on: the
        training loop (``loader(pin_memory=True)``), or threads ahead of it; None if nothing does.
    copied
        What copies them to the device: the training loop, or threads or a CUDA stream ahead of it.
    store
        Whether they are read from annbatch's store, by which loader, and in blocks of how many.
    """

    is_dense: bool
    pinned: Literal["loop", "threads"] | None = None
    copied: Literal["loop", "threads", "stream"] = "loop"
    store: tuple[Literal["cellfeed", "annbatch"], int] | None = None

    @property
    def needs_gpu(self):
        return self.pinned is not None or self.copied == "stream"


WAYS = {
    "dense on the CPU": Way(is_dense=True),
    "dense on the CPU, pinned": Way(is_dense=True, pinned="loop"),
    "sparse": Way(is_dense=False),
    "sparse, pinned": Way(is_dense=False, pinned="loop"),
    "sparse, pinned by threads": Way(is_dense=False, pinned="threads"),
    "sparse, copied by threads": Way(is_dense=False, copied="threads"),
    "sparse, pinned by threads, copied in a stream": Way(
        is_dense=False, pinned="threads", copied="stream"
    ),
}
ON_STORE = {
    f"annbatch's store, blocks of {size}, {loader}": Way(
        is_dense=False, pinned="loop" if loader == "cellfeed" else None, store=(loader, size)
    )
    for size in (16, 512)
    for loader in ("cellfeed", "annbatch")
}
STORE_FETCH = 16_384  # cells of a fetch from it, annbatch's default
ALONE = "the same minibatch"


class Autoencoder(nn.Module):
    """Counts are Poisson, with shares of genes decoded from a normal latent variable."""

    def __init__(self, n_genes, n_hidden=256, n_latent=32):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(n_genes, n_hidden), nn.LayerNorm(n_hidden), nn.ReLU()
        )
        self.latent = nn.Linear(n_hidden, 2 * n_latent)
        self.decoder = nn.Sequential(
            nn.Linear(n_latent, n_hidden),
            nn.LayerNorm(n_hidden),
            nn.ReLU(),
            nn.Linear(n_hidden, n_genes),
        )

    def forward(self, X):
        mean, log_variance = self.latent(self.encoder(X.log1p())).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum(1) / 2
        log_shares = self.decoder(z).log_softmax(dim=1)
        return (divergence - (X * log_shares).sum(1)).mean()


def copied_in_stream(loader, device):
    """Yield minibatches on a GPU, dense; the next one is copied in a stream of its own."""
    training, copying = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    arriving = None
    for minibatch in loader:
        with torch.cuda.stream(copying):
            coming = minibatch.to(device, dense=True, non_blocking=True), copying.record_event()
        if arriving is not None:
            yield arrived(*arriving, training)
        arriving = coming
    if arriving is not None:
        yield arrived(*arriving, training)


def arrived(minibatch, is_copied, stream):
    """Return a minibatch that a stream may use from now on."""
    stream.wait_event(is_copied)
    for tensor in (minibatch.X, minibatch.rows, *minibatch.obs.values()):
        tensor.record_stream(stream)  # its memory is not reused before the stream is done with it
    return minibatch


class Delivered:
    """What annbatch delivers, as `Minibatch` names it."""

    def __init__(self, X):
        self.X = X

    def __len__(self):
        return len(self.X)


class Bench:
    """Measures one way at a time.

    Parameters
    ----------
    collection, store, options
        The cells, annbatch's store of them if there is one, and the arguments of the command.
    """

    def __init__(self, collection, store, options):
        self.collection, self.store, self.options = collection, store, options
        self.stored = None if store is None else open_collection(store, obs=["cell_line"])
        self.device = torch.device(options.device)
        self.is_cuda = self.device.type == "cuda"
        self.model = Autoencoder(collection.n_vars).to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def dataset(self, way):
        """Return a dataset whose threads pin or copy minibatches, if they shall."""
        functions = {"pinned": Minibatch.pin_memory, "copied": self.copy}
        by_threads = [function for what, function in functions.items()
                      if getattr(way, what) == "threads"]  # fmt: skip
        stored = way.store is not None
        return CellDataset(
            self.stored if stored else self.collection,
            BlockShuffling(way.store[1] if stored else self.options.block_size),
            self.options.batch_size,
            fetch_factor=(
                STORE_FETCH // self.options.batch_size if stored else self.options.fetch_factor
            ),
            dense=way.is_dense,
            batch_transform=by_threads[0] if by_threads else None,
            transform_threads=1 if by_threads else 0,
            seed=0,
            drop_last=True,
        )

    def copy(self, minibatch, *, is_pinned=False):
        return minibatch.to(self.device, dense=True, non_blocking=is_pinned)

    def step(self, minibatch):
        self.optimizer.zero_grad(set_to_none=True)
        self.model(minibatch.X).backward()
        self.optimizer.step()

    def of_way(self, way, *, trains):
        """Return figures of a way."""
        if way.store is not None and way.store[0] == "annbatch":
            return self.rates(self.by_annbatch(way.store[1]), None, trains=trains)
        dataset = self.dataset(way)
        loader = dataset.loader(**({"pin_memory": True} if way.pinned == "loop" else {}))
        minibatches = itertools.chain.from_iterable(itertools.repeat(loader))
        if way.copied == "loop":
            minibatches = map(partial(self.copy, is_pinned=way.pinned is not None), minibatches)
        elif way.copied == "stream":
            minibatches = copied_in_stream(minibatches, self.device)
        found = self.rates(minibatches, dataset.statistics, trains=trains)
        return found | {"synchronisations": self.n_synchronisations(way)}

    def by_annbatch(self, size):
        """Yield minibatches that annbatch has copied to the GPU with their fetch."""
        import annbatch  # noqa: PLC0415
        import anndata  # noqa: PLC0415

        def matrix_and_label(group):
            obs = anndata.io.read_elem(group["obs"])[["cell_line"]]
            return anndata.AnnData(X=anndata.io.sparse_dataset(group["X"]), obs=obs)

        loader = annbatch.Loader(
            batch_size=self.options.batch_size,
            chunk_size=size,
            preload_nchunks=STORE_FETCH // size,
            shuffle=True,
            drop_last=True,
            preload_to_gpu=self.is_cuda,
            to="torch",
        )
        loader.use_collection(annbatch.DatasetCollection(self.store), load_adata=matrix_and_label)
        for minibatch in itertools.chain.from_iterable(itertools.repeat(loader)):
            yield Delivered(minibatch["X"].to(self.device).to_dense())

    def alone(self):
        """Return figures of steps on the same minibatch."""
        minibatch = self.copy(next(iter(self.dataset(Way(is_dense=True)))))
        return self.rates(itertools.repeat(minibatch), None, trains=True)

    def rates(self, minibatches, statistics, *, trains):
        """Return figures of some seconds, after one quarter as many."""
        found, before = {}, None
        for duration in (self.options.seconds / 4, self.options.seconds):
            self.finish()
            before = statistics and statistics()
            start, n_cells = time.perf_counter(), 0
            for minibatch in minibatches:
                if trains:
                    self.step(minibatch)
                n_cells += len(minibatch)
                if time.perf_counter() - start > duration:
                    break
            self.finish()
            found["cells/s"] = n_cells / (time.perf_counter() - start)
        if statistics:
            found["% waited"] = 100 * (statistics() - before).waiting_share
        return found

    def finish(self):
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def n_synchronisations(self, way):
        """Return how often the CPU waits for the GPU while a minibatch is copied and made dense."""
        if not self.is_cuda:
            return 0
        minibatch = next(iter(self.dataset(Way(is_dense=way.is_dense))))
        minibatch = minibatch.pin_memory() if way.pinned else minibatch
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self.copy(minibatch, is_pinned=way.pinned is not None)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(each.message) for each in told)


def table_of(title, rounds, alone=None):
    """Print medians of each way, with the least and the most; ratios are within rounds."""
    say(f"\n| {title} | cells/s | times {ALONE if alone else 'the first'} | waited | syncs |")
    say("| --- | --- | --- | --- | --- |")
    base = alone or next(iter(rounds.values()))
    for name, runs in rounds.items():
        rates = [run["cells/s"] for run in runs]
        ratios = [rate / one["cells/s"] for rate, one in zip(rates, base, strict=True)]
        waited = [run["% waited"] for run in runs if "% waited" in run]
        syncs = [run["synchronisations"] for run in runs if "synchronisations" in run]
        say(
            f"| {name} | {spread(rates)} | {spread(ratios, '.2f')} | "
            f"{spread(waited, '.0f') + ' %' if waited else ''} | "
            f"{median(syncs) if syncs else ''} |"
        )


def written_by_annbatch(folder, paths):
    """Return annbatch's own shuffled store, read by the pipeline that it asks for."""
    import annbatch  # noqa: PLC0415
    import zarr  # noqa: PLC0415

    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    store = folder / "annbatch.zarr"
    if not store.exists():
        annbatch.DatasetCollection(store).add_adatas([str(path) for path in paths], shuffle=True)
    warm([store])
    return store


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for the collection; written if not there")
    parser.add_argument("--cells", type=int, default=50_000)
    parser.add_argument("--genes", type=int, default=62_710)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--fetch-factor", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3, help="of each measurement")
    parser.add_argument(
        "--annbatch", action="store_true", help="which must be installed, with CuPy"
    )
    parser.add_argument("--json", type=Path, help="for all figures")
    options = parser.parse_args(arguments)
    paths = write_tahoe_like(options.folder, n_cells=options.cells, n_genes=options.genes)
    warm(paths)
    torch.manual_seed(0)
    store = written_by_annbatch(options.folder, paths) if options.annbatch else None
    bench = Bench(open_collection(paths, obs=["cell_line"]), store, options)
    name = torch.cuda.get_device_name(bench.device) if bench.is_cuda else platform.processor()
    machine = (
        f"{name or options.device}, {usable_cpu_count()} processors, torch {torch.__version__}"
    )
    X = next(iter(bench.dataset(Way(is_dense=False)))).X
    say(
        f"{machine}; {options.cells:,} cells x {options.genes:,} genes, "
        f"{X.values().numel() / len(X):,.0f} of them not 0 in a cell; "
        f"minibatches of {options.batch_size:,} cells"
    )
    given = WAYS | ON_STORE if options.annbatch else WAYS
    ways = {each: way for each, way in given.items() if bench.is_cuda or not way.needs_gpu}
    delivered = {each: [] for each in ways}
    trained = {each: [] for each in (ALONE, *ways)}
    for _ in range(options.rounds):
        for each, way in ways.items():
            delivered[each].append(bench.of_way(way, trains=False))
        trained[ALONE].append(bench.alone())
        for each, way in ways.items():
            trained[each].append(bench.of_way(way, trains=True))
    table_of("delivered", delivered)
    table_of("trained on", trained, trained[ALONE])
    if options.json:
        given = {key: str(value) if isinstance(value, Path) else value
                 for key, value in vars(options).items()}  # fmt: skip
        found = {"machine": machine, "options": given, "delivered": delivered, "trained": trained}
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
