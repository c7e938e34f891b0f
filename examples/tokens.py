# %% [markdown]
"""A transformer encoder on tokens: inputs as a dict, with padding, and an interval for every sequence.

A sequence holds up to twelve tokens; its value is the sum of the tokens' worths, plus a bonus where a token repeats
its neighbour. The dict's keys are the names of `forward`'s arguments, as a tokenizer's output would have them.
"""

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import latedrop

# %%
torch.manual_seed(0)
LENGTH, WORDS = 12, 20
WORTH = torch.cat([torch.zeros(1), torch.randn(WORDS - 1)])


# %%
def sequences(count: int) -> tuple[dict[str, Tensor], Tensor]:
    tokens = torch.randint(1, WORDS, (count, LENGTH))
    padding = torch.arange(LENGTH) >= torch.randint(3, LENGTH + 1, (count, 1))
    tokens = tokens.masked_fill(padding, 0)
    repeats = ((tokens[:, 1:] == tokens[:, :-1]) & ~padding[:, 1:]).sum(1)
    value = WORTH[tokens].sum(1) + 2 * repeats + 0.3 * torch.randn(count)
    return {"tokens": tokens, "padding": padding}, value


# %%
class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, 32), nn.Parameter(0.1 * torch.randn(LENGTH, 32))
        layer = nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 1)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        hidden = self.encoder(self.embed(tokens) + self.place, src_key_padding_mask=padding)
        return self.head(hidden.masked_fill(padding[..., None], 0).sum(1))[:, 0]


# %%
net, (x_train, y_train) = Encoder(), sequences(2048)
optimiser = torch.optim.Adam(net.parameters(), lr=2e-3)
for rows in 7 * torch.arange(2048).split(128):
    optimiser.zero_grad()
    batch = {name: value[rows] for name, value in x_train.items()}
    nn.functional.mse_loss(net(**batch), y_train[rows]).backward()
    optimiser.step()

# %%
uq = latedrop.calibrate(net, sequences(200), method=latedrop.Sampling(rates=[0.01, 0.05], draws=30), progress=False)
print(uq.calibration.sites)
x, y = sequences(500)
p = uq.predict(x)
held = latedrop.metrics.coverage(p.mean, p.variance, y, level=0.9)
rmse = latedrop.metrics.rmse(p.mean, None, y)
print(f"the 90 % interval holds {held:.1%} of {len(y)} fresh sequences")
print(f"RMSE {rmse:.2f}, spread of the values {y.std():.2f}")
length = (~x["padding"]).sum(1)
print(f"mean std {p.std[length <= 5].mean():.2f} for up to 5 tokens, {p.std[length >= 10].mean():.2f} for 10 and more")

# %% [markdown]
# What to see: long sequences have about twice the standard deviation of short ones.

# %%
figure, ax = plt.subplots(figsize=(7, 4), layout="constrained")
ax.boxplot([p.std[length == n].numpy() for n in range(3, LENGTH + 1)], positions=range(3, LENGTH + 1))
ax.set(xlabel="tokens of a sequence", ylabel="predicted standard deviation")
Path("output").mkdir(exist_ok=True)
figure.savefig("output/tokens.png", dpi=160)
