"""Models, trainers and batches in the forms of scikit-learn, Lightning and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from architectures import missing


def needs(*libraries: str) -> pytest.MarkDecorator:
    """Skip a test where one of these libraries is not installed."""
    absent = missing("torchvision", *libraries) if set(libraries) & {"lightning", "timm"} else missing(*libraries)
    return pytest.mark.skipif(bool(set(absent) & set(libraries)), reason=f"not installed: {', '.join(libraries)}")


class AnyWidth(nn.Module):
    """Takes tables of any width, as scikit-learn's checks have many."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.each, self.head = nn.Conv1d(1, 20, 1), nn.Linear(20, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.each(x[:, None]).relu().mean(2))


def lightning_module(net: nn.Module) -> Any:
    """Wrap a network as a module of Lightning."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
            if isinstance(batch, list):
                batch = batch[0]
            return self(batch)

    return Module()


def trainer(*callbacks: Any) -> Any:
    """Make a trainer of Lightning that says nothing."""
    import lightning.pytorch as pl

    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", callbacks=[*callbacks], enable_progress_bar=False, **quiet)


def padded(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Collate texts of several lengths."""
    tokens = nn.utils.rnn.pad_sequence([row["input_ids"] for row in batch], batch_first=True)
    inputs = {"input_ids": tokens, "attention_mask": (tokens > 0).long()}
    return inputs | ({"labels": torch.tensor([row["label"] for row in batch])} if "label" in batch[0] else {})


def hugging_face(folder: Path, labels: int = 1, **options: Any) -> Any:
    """Make a trainer of transformers around a small BERT."""
    import transformers

    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=20, max_position_embeddings=16, num_labels=labels, **small)
    model = transformers.BertForSequenceClassification(config)
    arguments = transformers.TrainingArguments(
        str(folder), per_device_eval_batch_size=16, report_to=[], use_cpu=True, disable_tqdm=True
    )
    return transformers.Trainer(model, arguments, data_collator=padded, **options)
