"""Measure what dropout does to a small transformer that predicts the next character: `python -m benchmarks.language`

A GPT-2 of two layers reads Python's help topics, trained without dropout and with it.
"""

from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.nets import step
from benchmarks.timing import by_seeds, markdown_table
from latedrop import calibrate, sample

RATES, PAST = (0.01, 0.03, 0.1, 0.3), 24


def run(seed: int) -> dict[str, Any]:
    """Train two networks; measure each as it is, calibrated, and with units dropped."""
    from pydoc_data.topics import topics

    from transformers import GPT2Config, GPT2LMHeadModel

    text = "".join(topics[name] for name in sorted(topics)[:20])
    signs, last = sorted(set(text)), lambda output: output.logits[:, -1]
    codes = torch.tensor([signs.index(sign) for sign in text]).unfold(0, PAST + 1, 1)
    cut, result = 3 * len(codes) // 4, {}
    torch.manual_seed(seed)
    for trained_with in (0.0, 0.1):
        shape = {"vocab_size": len(signs), "n_positions": PAST, "n_embd": 64, "n_layer": 2, "n_head": 4}
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), trained_with)
        net = GPT2LMHeadModel(GPT2Config(**shape, **rates, bos_token_id=0, eos_token_id=0))
        optimiser = torch.optim.AdamW(net.parameters(), 3e-3)
        for _ in range(400):
            rows = codes[torch.randint(cut, (32,))]
            logits = net(rows[:, :-1]).logits
            step(optimiser, nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))
        net.eval()
        unseen = codes[cut + PAST :]
        validation, test = unseen[torch.randperm(len(unseen))[:900]].split([500, 400])
        uq = calibrate(net, (validation[:, :-1], validation[:, -1]), readout=last, progress=False)
        x, y = test[:, :-1], test[:, -1]
        p = uq.predict(x)
        measures = {"plain": _right(p.logits.softmax(1), y), "default": _right(p.probabilities, y)}
        for rate in RATES:
            draws = sample(net, x, rate, 10, readout=last, keep_draws=True).outputs
            thinned = draws.double().softmax(2)
            measures[f"one at {rate}"] = [mean(values) for values in zip(*(_right(p, y) for p in thinned), strict=True)]
            measures[f"mean at {rate}"] = _right(thinned.mean(0), y)
        result[f"trained with {trained_with:g}"] = measures
    return result


def _right(p: Tensor, y: Tensor) -> list[float]:
    """Return the share of right answers and the negative log-likelihood in nats."""
    nll = -p.gather(1, y[:, None]).clamp_min(1e-30).log()
    return [float((p.argmax(1) == y).double().mean()), float(nll.mean())]


def table(record: dict[str, Any]) -> str:
    rows, (first, *_) = [], record["runs"]
    for kind in next(iter(first.values())):
        pairs = [[mean(run[net][kind][k] for run in record["runs"]) for k in range(2)] for net in first]
        rows.append([kind, *(cell for right, nats in pairs for cell in (f"{right:.1%}", f"{nats:.3f}"))])
    return markdown_table(["network", "trained without dropout", "nats", "trained with 0.1", "nats"], rows)


if __name__ == "__main__":
    by_seeds("language", lambda seeds: {"rates": RATES, "runs": [run(seed) for seed in range(seeds)]}, seeds=3)
