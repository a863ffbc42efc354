"""The Trainer of transformers trains on datasets of cells, and goes on where it was."""

from typing import Any

import numpy as np
import pytest

from cellfeed import (
    BlockShuffling,
    CellDataset,
    ParameterError,
    PathError,
    Streaming,
    open_collection,
)

torch = pytest.importorskip("torch")
transformers: Any = pytest.importorskip(
    "transformers", reason="transformers is not installed: cellfeed[examples]"
)

from cellfeed.frameworks.transformers import CellTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of itself


class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.seen = torch.nn.Linear(3, 2), list[list[int]]()

    def forward(self, X, labels):
        if self.training:
            self.seen.append(X[:, 0].int().tolist())
        scores = self.linear(X)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


def inputs(minibatch):
    return {"X": minibatch.X, "labels": minibatch.obs["label"]}


@pytest.fixture
def collection(write_h5ad):
    X = np.arange(90, dtype=np.float32)[:, None] * np.array([1, 0, 0], np.float32)
    return open_collection(write_h5ad(X, {"label": ["a", "b"] * 45}), obs=["label"])


@pytest.fixture
def trainer(collection, tmp_path):
    def make(*callbacks, **options):
        dataset = CellDataset(
            collection, BlockShuffling(4), 8, 2, seed=3, batch_transform=inputs, **options
        )
        streamed = CellDataset(collection, Streaming(range(20)), 8, batch_transform=inputs)
        arguments = transformers.TrainingArguments(
            str(tmp_path / "run"),
            num_train_epochs=3,
            save_steps=5,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        return CellTrainer(
            Model(),
            arguments,
            train_dataset=dataset,
            eval_dataset=streamed,
            callbacks=[*callbacks],
        )

    return make


class Stops(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, n):
        self.n = n

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == self.n


@pytest.mark.parametrize("n", [5, 20, 30])
def test_it_goes_on_exactly(trainer, tmp_path, n):
    whole = trainer()
    whole.train()
    assert len(whole.model.seen) == 36
    before = trainer(Stops(n))
    before.train()
    after = trainer()
    after.train(resume_from_checkpoint=str(tmp_path / f"run/checkpoint-{n}"))
    assert before.model.seen + after.model.seen == whole.model.seen
    for one, other in zip(after.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_it_evaluates_and_predicts(trainer, collection):
    by = trainer()
    assert by.evaluate()["eval_loss"] > 0
    streamed = CellDataset(collection, Streaming(), 8, batch_transform=inputs)
    found = by.predict(streamed)
    assert found.predictions.shape == (90, 2)
    assert found.label_ids.tolist() == [0, 1] * 45


def test_mistakes(trainer, tmp_path, collection):
    with pytest.raises(PathError, match=r"cellfeed_loader\.json: no such file; resume from"):
        trainer().train(resume_from_checkpoint=str(tmp_path))
    with pytest.raises(ParameterError, match="`test_dataset` must be a CellDataset, but got list"):
        trainer().predict([1, 2])
    with pytest.raises(ParameterError, match=r"use `cellfeed\.frameworks\.transformers\.CellTrain"):
        transformers.Trainer(
            Model(),
            transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True),
            train_dataset=CellDataset(collection, Streaming(), 8),
        ).train()
