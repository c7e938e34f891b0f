# %% [markdown]
"""A Hugging Face transformer: trained by a `Trainer`, calibrated on its data loader, predicted with its collator.

A review is a sequence of three to twelve words, its score the sum of the words' worths. The model is a small BERT from
a config, with random weights at first, so that nothing is downloaded.
"""

# %%
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import latedrop
from latedrop import plots
from latedrop.adapters.huggingface import predict_with

# %%
WORDS = 30
WORTH = torch.randn(WORDS, generator=torch.Generator().manual_seed(0))


# %%
def reviews(count: int, seed: int) -> list[dict[str, Any]]:
    dice = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 13, (count,), generator=dice).tolist()
    words = [torch.randint(1, WORDS, (length,), generator=dice) for length in lengths]
    noise = 0.3 * torch.randn(count, generator=dice)
    return [{"input_ids": w, "label": float(WORTH[w].sum() / 3 + e)} for w, e in zip(words, noise, strict=True)]


# %%
def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad to the longest review of the batch, as a tokenizer's collator does."""
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": torch.tensor([row["label"] for row in rows]),
    }


# %%
def rmse(both: Any) -> dict[str, float]:
    return {"rmse": float(((both.predictions[:, 0] - both.label_ids) ** 2).mean() ** 0.5)}


# %%
torch.manual_seed(0)
size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
config = BertConfig(vocab_size=WORDS, num_labels=1, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **size)
arguments = TrainingArguments(
    tempfile.mkdtemp(),
    num_train_epochs=4,
    learning_rate=2e-3,
    per_device_train_batch_size=64,
    per_device_eval_batch_size=128,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
model = BertForSequenceClassification(config)
trainer = Trainer(model, arguments, data_collator=collate, train_dataset=reviews(2400, 1), compute_metrics=rmse)
trainer.train()

# %%
validation = trainer.get_eval_dataloader(reviews(300, 2))
uq = latedrop.calibrate(
    model,
    validation,
    method=latedrop.Sampling(rates=[0.01, 0.05], draws=30),
    readout="logits",
    progress=False,
)
found = predict_with(trainer, reviews(500, 3), uq, level=0.9)
print({name: round(value, 3) for name, value in found.metrics.items()})
print(f"first review: {found.predictions[0, 0]:.2f}, between {found.low[0, 0]:.2f} and {found.high[0, 0]:.2f}")
print(f"the 90 % interval holds {found.metrics['test_coverage']:.1%} of {len(found.predictions)} fresh reviews")

# %% [markdown]
# What to see: each dot is a review at its true score; about nine of ten lie inside the band.

# %%
scores = [row["label"] for row in reviews(500, 3)]
mean, ends = found.predictions, {0.9: (found.low, found.high)}
ax = plots.intervals(mean, mean, ends, target=scores, xlabel="predicted score", ylabel="true score")
Path("output").mkdir(exist_ok=True)
ax.figure.savefig("output/hf_trainer.png", dpi=160)
