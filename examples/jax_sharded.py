"""JAX on all devices: minibatches divided among them, stopped within an epoch, and resumed.

    python examples/jax_sharded.py 'plates/*.h5ad' run --stop-after 20
    python examples/jax_sharded.py 'plates/*.h5ad' run

To try it without several GPUs, set ``XLA_FLAGS=--xla_force_host_platform_device_count=4``. The
loader needs no torch: cells come in NumPy, and `device_put` copies each part to its device.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from cellfeed import BlockShuffling, CellDataset, open_collection
from cellfeed.transforms import Log1p, NormalizeTotal

LABEL, N_EPOCHS = "cell_line", 2


@partial(jax.jit, donate_argnums=0)
def step(weights: jax.Array, X: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the weights after a step of gradient descent, and the loss before it."""

    def loss_of(weights: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(X @ weights)
        return -jnp.take_along_axis(scores, labels[:, None], axis=1).mean()

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    return weights - 1e-3 * gradient, loss


def main(plates: str, folder: Path, stop_after: int | None) -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("cells",))
    by_cell, everywhere = (NamedSharding(mesh, PartitionSpec(*each)) for each in (["cells"], []))
    collection = open_collection(plates, obs=[LABEL])
    dataset = CellDataset(
        collection,
        BlockShuffling(16),
        batch_size=64,  # a multiple of the number of devices
        fetch_factor=16,
        dense=True,
        transform=[NormalizeTotal(1e4), Log1p()],
        as_torch=False,
        drop_last=True,
        seed=0,
    )
    weights = np.zeros((collection.n_vars, len(collection.obs[LABEL].categories)), np.float32)
    if (folder / "state.json").exists():
        weights = np.load(folder / "weights.npy")
        dataset.load_state_dict(json.loads((folder / "state.json").read_text()))
    on_devices, n_steps = jax.device_put(weights, everywhere), 0
    for epoch in range(dataset.state_dict()["epoch"], N_EPOCHS):
        losses = []
        for cells in dataset:
            X, labels = jax.device_put((cells.X, cells.obs[LABEL].astype(np.int32)), by_cell)
            on_devices, loss = step(on_devices, X, labels)
            losses.append(loss)  # not `float(loss)`, which would wait for the devices
            n_steps += 1
            if n_steps == stop_after:
                break
        print(f"epoch {epoch} on {len(X.devices())} devices: loss {np.mean(losses):.3f}")
        if n_steps == stop_after:
            break
    folder.mkdir(exist_ok=True)
    np.save(folder / "weights.npy", on_devices)
    (folder / "state.json").write_text(json.dumps(dataset.state_dict()))
    print(f"{n_steps} steps of {X.shape[0]} cells")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plates")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stop-after", type=int)
    main(**vars(parser.parse_args()))
