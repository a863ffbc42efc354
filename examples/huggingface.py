"""The `Trainer` of Hugging Face transformers, stopped mid-epoch and resumed.

    python examples/huggingface.py 'plates/*.h5ad' run
    torchrun --nproc-per-node 2 examples/huggingface.py 'plates/*.h5ad' run

On its own, the Trainer would skip the earlier minibatches one by one, in a different order from
the epoch's. With `ignore_data_skip`, the state of the loader does this instead.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from cellfeed import BlockShuffling, CellDataset, open_collection
from cellfeed.transforms import Log1p, NormalizeTotal

LABEL, N_EPOCHS, STOP_AFTER = "cell_line", 3, 40


class Classifier(torch.nn.Module):
    def __init__(self, n_genes: int, n_classes: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(n_genes, n_classes)

    def forward(self, X: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.linear(X)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


class CellTrainer(Trainer):
    loader_state: Any = None

    def get_train_dataloader(self) -> Any:
        loader = self.train_dataset.loader()
        if self.loader_state is not None:
            loader.load_state_dict(self.loader_state)
        return self.accelerator.prepare(loader)


class SavesLoader(TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        file = Path(args.output_dir, f"checkpoint-{state.global_step}", "loader.json")
        file.write_text(json.dumps(objects["train_dataloader"].state_dict()))
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
            ignore_data_skip=True,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        model = Classifier(collection.n_vars, len(collection.obs[LABEL].categories))
        trainer = CellTrainer(model, arguments, train_dataset=dataset, callbacks=[SavesLoader()])
        if is_resumed:
            trainer.loader_state = json.loads((checkpoint / "loader.json").read_text())
        trainer.train(resume_from_checkpoint=str(checkpoint) if is_resumed else None)
        counts = trainer.accelerator.reduce(seen)
        trainer.accelerator.print(
            f"{trainer.state.global_step} steps of {N_EPOCHS} epochs: "
            f"cells came {int(counts.min())} to {int(counts.max())} times"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
