"""A loader that Accelerate has prepared: divided once, counted, saved and restored."""

from typing import Any

import pytest
from tests.loader.dataset.torchrun import assert_divided, torchrun

pytest.importorskip("accelerate")
pytestmark = pytest.mark.process

N_ROWS, N_ACCUMULATED = 101, 4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    return torchrun(
        tmp_path_factory.mktemp("accelerate"),
        2,
        f"""
        from accelerate import Accelerator

        def updates(accelerator, model, loader, looks=False):
            made = []
            for minibatch in loader:
                with accelerator.accumulate(model):
                    made.append(accelerator.sync_gradients)
                if looks and len(made) == 2:
                    loader.peek(1)
            return made

        options = dict(cpu=True, gradient_accumulation_steps={N_ACCUMULATED})
        accelerator = Accelerator(**options)
        model = torch.nn.Linear(1, 1)
        for workers in (0, 2):
            loader = make(seed=0).loader(workers)
            prepared = accelerator.prepare(loader)
            assert prepared is loader
            found[f"epochs {{workers}}"] = [epoch(prepared) for _ in range(3)]
            found[f"updates {{workers}}"] = updates(accelerator, model, prepared)
            one_looks = updates(accelerator, model, prepared, looks=rank == 0)
            found[f"one looks {{workers}}"] = one_looks

            def anew():
                again = Accelerator(**options)
                return again, again.prepare(make(seed=0).loader(workers))

            again, stopped = anew()
            epoch(stopped), epoch(stopped)
            iterator = iter(stopped)
            begun = [np.asarray(next(iterator)).tolist() for _ in range(3)]
            again.save_state(f"{{folder}}/state {{workers}}")
            again.wait_for_everyone()
            del iterator
            again, restored = anew()
            again.load_state(f"{{folder}}/state {{workers}}")
            found[f"resumed {{workers}}"] = begun + epoch(restored)

        plain = lambda **options: DataLoader(make(seed=0, **options), batch_size=None)
        for dispatches in (True, False):
            accelerator.dataloader_config.dispatch_batches = dispatches
            found[f"plain {{dispatches}}"] = refusal(epoch, accelerator.prepare(plain()))
        """,
    )


@pytest.mark.parametrize("workers", [0, 2])
class TestPrepared:
    def test_no_cell_comes_twice_and_none_is_missing(self, ranks, workers):
        for epochs in zip(*(rank[f"epochs {workers}"] for rank in ranks), strict=True):
            assert_divided(epochs, N_ROWS)

    def test_gradients_are_synchronised_at_the_end_of_an_epoch(self, ranks, workers):
        n = len(ranks[0][f"epochs {workers}"][0])
        assert n % N_ACCUMULATED != 0
        expected = [k % N_ACCUMULATED == 0 or k == n for k in range(1, n + 1)]
        for what in ("updates", "one looks"):
            assert [rank[f"{what} {workers}"] for rank in ranks] == [expected] * len(ranks)

    def test_it_is_saved_and_restored_in_the_middle_of_an_epoch(self, ranks, workers):
        for rank in ranks:
            assert rank[f"resumed {workers}"] == rank[f"epochs {workers}"][2]


@pytest.mark.parametrize("dispatches", [True, False])
def test_another_dataloader_is_not_divided_twice(ranks, dispatches):
    """Neither where the first rank reads for all, nor where each reads its part."""
    for rank in ranks:
        assert rank[f"plain {dispatches}"] == (
            "Accelerate divides another DataLoader among ranks, but the dataset is divided "
            "already, so cells would be missing; pass `dataset.loader(...)` to "
            "`accelerator.prepare`"
        )


def test_a_process_by_itself(tmp_path, plates):
    """Any DataLoader will do, but only the loader has a state."""
    (found,) = torchrun(
        tmp_path,
        1,
        f"""
        from accelerate import Accelerator, skip_first_batches
        from cellfeed import open_collection

        accelerator = Accelerator(cpu=True)
        plain = lambda dataset, n=0: accelerator.prepare(
            DataLoader(dataset, batch_size=None, num_workers=n)
        )
        stopped = make(seed=0)
        found["alone"] = epoch(plain(stopped))
        list(stopped)
        iterator = iter(stopped)
        found["begun"] = [next(iterator).tolist() for _ in range(3)]
        loaded = make(seed=0)
        loaded.load_state_dict(stopped.state_dict())
        loader = accelerator.prepare(loaded.loader())
        found["rest"] = epoch(loader)
        again = make(seed=0)
        again.set_epoch(2)
        found["only skipped"] = epoch(skip_first_batches(again.loader(), 3))

        collection = open_collection({list(map(str, plates))!r})
        dataset = CellDataset(collection, BlockShuffling(4), 8, 2, seed=0)
        for workers in (0, 2):
            prepared = accelerator.prepare(dataset.loader(workers))
            found[f"rows {{workers}}"] = sum(map(len, prepared)) - len(collection)
        """,
    )
    assert_divided([found["alone"]], N_ROWS)
    assert_divided([found["begun"] + found["rest"]], N_ROWS)
    assert found["only skipped"] == found["rest"]
    for workers in (0, 2):
        assert found[f"rows {workers}"] == 0
