"""What dropout does to a small transformer that predicts the next character: `python -m benchmarks.language`

A GPT-2 of two layers reads Python's help topics, trained without dropout and with it.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import by_seeds, markdown_table
from latedrop import calibrate, sample

RATES = (0.01, 0.03, 0.1, 0.3)
PAST = 24


def measured(seeds: int) -> dict[str, Any]:
    """Return the share of right characters and nats, by seed."""
    return {"rates": RATES, "runs": [run(seed) for seed in range(seeds)]}


def run(seed: int) -> dict[str, Any]:
    """Train two networks, and measure them as they are, calibrated and thinned."""
    from pydoc_data.topics import topics

    from transformers import GPT2Config, GPT2LMHeadModel

    text = "".join(topics[name] for name in sorted(topics)[:20])
    signs = sorted(set(text))
    codes = torch.tensor([signs.index(sign) for sign in text]).unfold(0, PAST + 1, 1)
    cut = 3 * len(codes) // 4
    torch.manual_seed(seed)
    result: dict[str, Any] = {}
    for trained_with in (0.0, 0.1):
        shape = {"vocab_size": len(signs), "n_positions": PAST, "n_embd": 64, "n_layer": 2, "n_head": 4}
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), trained_with)
        net = GPT2LMHeadModel(GPT2Config(**shape, **rates, bos_token_id=0, eos_token_id=0))
        optimiser = torch.optim.AdamW(net.parameters(), 3e-3)
        for _ in range(400):
            rows = codes[torch.randint(cut, (32,))]
            optimiser.zero_grad()
            logits = net(rows[:, :-1]).logits
            nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
            optimiser.step()
        net.eval()
        unseen = codes[cut + PAST :]
        unseen = unseen[torch.randperm(len(unseen))[:900]]
        x, y = unseen[:, :-1], unseen[:, -1]
        uq = calibrate(net, (x[:500], y[:500]), readout=_last, progress=False)
        x, y = x[500:], y[500:]
        p = uq.predict(x)
        measures = {"plain": _right(p.logits.softmax(1), y), "default": _right(p.probabilities, y)}
        for rate in RATES:
            draws = sample(net, x, rate, 10, readout=_last, keep_draws=True).outputs
            assert draws is not None
            thinned = draws.double().softmax(2)
            one = [_right(each, y) for each in thinned]
            measures[f"one at {rate}"] = [statistics.mean(pair[k] for pair in one) for k in range(2)]
            measures[f"mean at {rate}"] = _right(thinned.mean(0), y)
        result[f"trained with {trained_with:g}"] = measures
    return result


def _last(output: Any) -> Tensor:
    return output.logits[:, -1]  # type: ignore[no-any-return]


def _right(p: Tensor, y: Tensor) -> list[float]:
    """Return the share of right answers and the negative log-likelihood in nats."""
    nll = -p.gather(1, y[:, None]).clamp_min(1e-30).log()
    return [float((p.argmax(1) == y).double().mean()), float(nll.mean())]


def table(record: dict[str, Any]) -> str:
    """Return means over seeds: share of right next characters, and nats."""
    rows = []
    for kind in next(iter(record["runs"][0].values())):
        cells = []
        for trained_with in record["runs"][0]:
            pairs = [each[trained_with][kind] for each in record["runs"]]
            cells += [f"{statistics.mean(p[0] for p in pairs):.1%}", f"{statistics.mean(p[1] for p in pairs):.3f}"]
        rows.append([kind, *cells])
    return markdown_table(["network", "trained without dropout", "nats", "trained with 0.1", "nats"], rows)


if __name__ == "__main__":
    by_seeds("language", measured, seeds=3)
