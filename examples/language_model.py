# %% [markdown]
"""Two language models of Hugging Face: the next character, and whether a piece of text is prose or code.

Both give more than latedrop needs; `readout=` takes the logits of the last position, or a part of the output by name.
The texts come with Python: its help topics, and the source of one of its modules. The transformers are tiny.
"""

# %%
import argparse
import inspect
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

import latedrop

# %%
torch.manual_seed(0)
PAST = 24
texts = {"prose": "".join(topics[name] for name in sorted(topics)[:12]), "code": inspect.getsource(argparse)}
signs = sorted({sign for text in texts.values() for sign in text})
place = {sign: k for k, sign in enumerate(signs)}


def pieces(text: str) -> tuple[Tensor, Tensor]:
    """Pieces of 25 characters: those of the first three quarters, and those of the rest."""
    codes = torch.tensor([place[sign] for sign in text]).unfold(0, PAST + 1, 1)
    cut = 3 * len(codes) // 4
    return codes[:cut], codes[cut + PAST :]


def some(rows: Tensor, count: int) -> Tensor:
    return rows[torch.randperm(len(rows))[:count]]


prose, code = pieces(texts["prose"]), pieces(texts["code"])
shape = {"vocab_size": len(signs), "n_positions": PAST, "n_embd": 48, "n_layer": 2, "n_head": 4}
config = GPT2Config(**shape, bos_token_id=0, eos_token_id=0, pad_token_id=1)

# %%
speaker = GPT2LMHeadModel(config)
optimiser = torch.optim.AdamW(speaker.parameters(), lr=3e-3)
for _ in range(250):
    rows = some(prose[0], 32)
    optimiser.zero_grad()
    logits = speaker(rows[:, :-1]).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
    optimiser.step()

# %%
judge = GPT2ForSequenceClassification(config)
optimiser = torch.optim.AdamW(judge.parameters(), lr=2e-3)
for _ in range(200):
    rows = torch.cat([some(prose[0], 16), some(code[0], 16)])[:, :PAST]
    optimiser.zero_grad()
    nn.functional.cross_entropy(judge(rows).logits, torch.arange(2).repeat_interleave(16)).backward()
    optimiser.step()

# %% [markdown]
# The next character is one class among all signs, from the logits of the last position. A piece has one label; its
# logits are a part of the output by name.

# %%
known = some(prose[1], 900)
next_sign = latedrop.calibrate(
    speaker.eval(), (known[:500, :-1], known[:500, -1]), readout=lambda output: output.logits[:, -1], progress=False
).conformal((known[500:, :-1], known[500:, -1]))
both = torch.cat([some(prose[1], 300), some(code[1], 300)])[:, :PAST]
kind = latedrop.calibrate(
    judge.eval(), (both, torch.arange(2).repeat_interleave(300)), readout="logits", progress=False
)

# %%
fresh = some(prose[1], 500)
p = next_sign.predict(fresh[:, :-1])
sets = p.prediction_set(0.9)
print(f"next character: {(p.label == fresh[:, -1]).float().mean():.1%} right, sets of 90 % hold", end=" ")
print(f"{sets[torch.arange(500), fresh[:, -1]].float().mean():.1%} with {sets.sum(1).float().mean():.1f} characters")
for start in ("if the expression is tru", "this is the value of the"):
    codes = torch.tensor([[place[sign] for sign in start]])
    likely = next_sign.predict(codes).probabilities[0].topk(3)
    named = ", ".join(f"{signs[k]!r} {share:.0%}" for share, k in zip(likely.values, likely.indices, strict=True))
    print(f"after {start!r}: {named}")
groups = {
    "prose": some(prose[1], 300)[:, :PAST],
    "code": some(code[1], 300)[:, :PAST],
    "random characters": torch.randint(len(signs), (300, PAST)),
}
judged = {name: kind.predict(rows) for name, rows in groups.items()}
for name, q in judged.items():
    print(f"{name}: called code in {(q.label == 1).float().mean():.0%}, median novelty {q.novelty.median():.2f}")

# %% [markdown]
# What to see: where several characters may follow, the set is long; random characters get a label as anything does, and
# their novelty tells.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
left.hist(sets.sum(1).numpy(), bins=range(32))
left.set(xlabel="characters in a set of 90 %", ylabel="pieces of text")
for name, q in judged.items():
    right.hist(q.novelty.clamp(max=4).numpy(), bins=40, histtype="step", label=name)
right.set(xlabel="novelty", ylabel="pieces of text")
right.legend(frameon=False)
Path("output").mkdir(exist_ok=True)
figure.savefig("output/language_model.png", dpi=160)
