"""The `Trainer` of Hugging Face transformers, stopped mid-epoch and resumed.

    python examples/huggingface.py 'plates/*.h5ad' run
    torchrun --nproc-per-node 2 examples/huggingface.py 'plates/*.h5ad' run

Checkpoints of a `CellTrainer` contain the position of the training, so that it goes on with the
minibatch that would have followed.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments

from cellfeed import BlockShuffling, CellDataset, open_collection
from cellfeed.frameworks.transformers import CellTrainer
from cellfeed.transforms import Log1p, NormalizeTotal

LABEL, N_EPOCHS, STOP_AFTER = "cell_line", 3, 40


class Classifier(torch.nn.Module):
    def __init__(self, n_genes: int, n_classes: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(n_genes, n_classes)

    def forward(self, X: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.linear(X)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


class Stops(TrainerCallback):
    def on_save(self, *arguments: Any, **_: Any) -> None:
        _, state, control = arguments
        control.should_training_stop = state.global_step == STOP_AFTER


def main(plates: str, folder: str) -> None:
    collection = open_collection(plates, obs=[LABEL])
    seen = torch.zeros(len(collection), dtype=torch.int64)

    def inputs(minibatch: Any) -> dict[str, torch.Tensor]:
        seen[minibatch.rows] += 1
        return {"X": minibatch.X, "labels": minibatch.obs[LABEL]}

    checkpoint = Path(folder, f"checkpoint-{STOP_AFTER}")
    for is_resumed in (False, True):
        dataset = CellDataset(
            collection,
            BlockShuffling(16),
            batch_size=64,
            dense=True,
            transform=[NormalizeTotal(1e4), Log1p()],
            batch_transform=inputs,
            seed=0,
        )
        arguments = TrainingArguments(
            folder,
            num_train_epochs=N_EPOCHS,
            save_steps=STOP_AFTER,
            report_to=[],
            disable_tqdm=True,
        )
        model = Classifier(collection.n_vars, len(collection.obs[LABEL].categories))
        trainer = CellTrainer(model, arguments, train_dataset=dataset, callbacks=[Stops()])
        trainer.train(resume_from_checkpoint=str(checkpoint) if is_resumed else None)
        counts = trainer.accelerator.reduce(seen)
        trainer.accelerator.print(
            f"{trainer.state.global_step} steps of {N_EPOCHS} epochs: "
            f"cells came {int(counts.min())} to {int(counts.max())} times"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
