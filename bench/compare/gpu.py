"""How many cells a GPU gets, by the way they are copied, and what a training waits for them.

The cells of ``--data`` lie in the page cache. Minibatches arrive dense on the device: made dense
there or on the CPU; copied from pinned memory or not; by the training loop, or ahead of it, in a
thread or a CUDA stream of its own; or gathered there from cells that were loaded on the device.
Each way is measured without a model, and with steps of a small variational autoencoder, beside
steps on the same minibatch again and again, which wait for nothing. With ``--annbatch``, annbatch
(which needs CuPy) copies its fetches to the GPU from a shuffled store that it writes of the same
cells, and cellfeed reads that store, too. Needs no more than cellfeed and torch otherwise; with
``--device cpu``, ways that need a GPU are left out.
"""

import itertools
import time
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import torch
from bench._harness import Case, here, plates_of, say, warm
from torch import nn

from cellfeed import BlockShuffling, CellDataset, Minibatch, open_collection


@dataclass(frozen=True)
class Copying:
    """How minibatches come to the device.

    Parameters
    ----------
    is_dense
        Whether they are made dense on the CPU.
    pinned
        What copies them into pinned memory, from which a GPU copies while the CPU goes on: the
        training loop (``loader(pin_memory=True)``), or threads ahead of it; None if nothing does.
    copied
        What copies them to the device: the training loop, or threads or a CUDA stream ahead of it;
        nothing ("load") if all cells were loaded there before.
    store
        Whether they are read from annbatch's store, by which loader, and in blocks of how many.
    """

    is_dense: bool = False
    pinned: Literal["loop", "threads"] | None = None
    copied: Literal["loop", "threads", "stream", "load"] = "loop"
    store: tuple[Literal["cellfeed", "annbatch"], int] | None = None

    @property
    def needs_gpu(self):
        return self.pinned is not None or self.copied == "stream"


WAYS = {
    "dense on the CPU": Copying(is_dense=True),
    "dense on the CPU, pinned": Copying(is_dense=True, pinned="loop"),
    "sparse": Copying(),
    "sparse, pinned": Copying(pinned="loop"),
    "sparse, pinned by threads": Copying(pinned="threads"),
    "sparse, copied by threads": Copying(copied="threads"),
    "sparse, pinned by threads, copied in a stream": Copying(pinned="threads", copied="stream"),
    "from cells on the device": Copying(is_dense=True, copied="load"),
}
ON_STORE = {
    f"annbatch's store, blocks of {size}, {loader}": Copying(
        pinned="loop" if loader == "cellfeed" else None, store=(loader, size)
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
        hidden = [nn.LayerNorm(n_hidden), nn.ReLU()]
        self.encoder = nn.Sequential(nn.Linear(n_genes, n_hidden), *hidden)
        self.latent = nn.Linear(n_hidden, 2 * n_latent)
        hidden = [nn.LayerNorm(n_hidden), nn.ReLU()]
        self.decoder = nn.Sequential(
            nn.Linear(n_latent, n_hidden), *hidden, nn.Linear(n_hidden, n_genes)
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


class Bench:
    """Measures one way at a time.

    Parameters
    ----------
    collection, store, options
        The cells, annbatch's store of them if there is one, and the options of the command.
    """

    def __init__(self, collection, store, options):
        self.collection, self.store, self.options = collection, store, options
        self.stored = None if store is None else open_collection(store, obs=["cell_line"])
        self.device = torch.device(options.device)
        self.is_cuda = self.device.type == "cuda"
        self.model = Autoencoder(collection.n_vars).to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    @cached_property
    def loaded(self):
        return self.collection.load(device=self.device)

    def dataset(self, path):
        """Return a dataset whose threads pin or copy minibatches, if they shall."""
        functions = {"pinned": Minibatch.pin_memory, "copied": self.copy}
        by_threads = [each for what, each in functions.items() if getattr(path, what) == "threads"]
        size, fetch_factor = self.options.block, self.options.fetch
        if path.store is not None:
            size, fetch_factor = path.store[1], STORE_FETCH // self.options.batch
        collection = self.loaded if path.copied == "load" else self.collection
        return CellDataset(
            collection if path.store is None else self.stored, BlockShuffling(size),
            self.options.batch, fetch_factor, dense=path.is_dense, seed=0, drop_last=True,
            batch_transform=by_threads[0] if by_threads else None,
            transform_threads=len(by_threads),
        )  # fmt: skip

    def copy(self, minibatch, *, is_pinned=False):
        return minibatch.to(self.device, dense=True, non_blocking=is_pinned)

    def measured(self, seed, path, *, trains):
        """Return figures of a way."""
        if path.store is not None and path.store[0] == "annbatch":
            return self.rates(self.by_annbatch(path.store[1]), None, trains=trains)
        dataset = self.dataset(path)
        loader = dataset.loader(**({"pin_memory": True} if path.pinned == "loop" else {}))
        minibatches = itertools.chain.from_iterable(itertools.repeat(loader))
        if path.copied == "loop":
            minibatches = map(partial(self.copy, is_pinned=path.pinned is not None), minibatches)
        elif path.copied == "stream":
            minibatches = copied_in_stream(minibatches, self.device)
        return self.rates(minibatches, dataset.statistics, trains=trains)

    def by_annbatch(self, size):
        """Yield minibatches that annbatch has copied to the GPU with their fetch."""
        import annbatch
        import anndata

        def matrix_and_label(group):
            obs = anndata.io.read_elem(group["obs"])[["cell_line"]]
            return anndata.AnnData(X=anndata.io.sparse_dataset(group["X"]), obs=obs)

        loader = annbatch.Loader(
            batch_size=self.options.batch, chunk_size=size, preload_nchunks=STORE_FETCH // size,
            shuffle=True, drop_last=True, preload_to_gpu=self.is_cuda, to="torch",
        )  # fmt: skip
        loader.use_collection(annbatch.DatasetCollection(self.store), load_adata=matrix_and_label)
        for minibatch in itertools.chain.from_iterable(itertools.repeat(loader)):
            X = minibatch["X"].to(self.device).to_dense()
            yield Minibatch({"X": X}, {}, torch.arange(len(X)))

    def alone(self, seed):
        """Return figures of steps on the same minibatch."""
        minibatch = self.copy(next(iter(self.dataset(WAYS["dense on the CPU"]))))
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
                    self.optimizer.zero_grad(set_to_none=True)
                    self.model(minibatch.X).backward()
                    self.optimizer.step()
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


def written_by_annbatch(folder, paths):
    """Return annbatch's own shuffled store, read by the pipeline that it asks for."""
    import annbatch
    import zarr

    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    store = folder / "annbatch.zarr"
    if not store.exists():
        annbatch.DatasetCollection(store).add_adatas([str(path) for path in paths], shuffle=True)
    warm([store])
    return store


def cases(options):
    paths = plates_of(options, n_genes=options.genes)
    warm(paths)
    torch.manual_seed(0)
    store = written_by_annbatch(options.data, paths) if options.annbatch else None
    bench = Bench(open_collection(paths, obs=["cell_line"]), store, options)
    if bench.is_cuda:
        say(torch.cuda.get_device_name(bench.device))
    given = WAYS | (ON_STORE if options.annbatch else {})
    chosen = {name: path for name, path in given.items() if bench.is_cuda or not path.needs_gpu}
    for title, trains, ways in (
        ("delivered", False, {}),
        ("trained on", True, {ALONE: here(bench.alone)}),
    ):
        for name, path in chosen.items():
            ways[name] = here(bench.measured, path=path, trains=trains)
        yield Case(ways, title)


OPTIONS = {
    "cells": 50_000, "genes": 62_710, "batch": 256, "block": 16, "fetch": 16, "device": "cuda",
    "seconds": 3.0, "annbatch": False, "n_ratios": 1,
}  # fmt: skip
