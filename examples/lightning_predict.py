# %% [markdown]
"""A Lightning module: trained by a `Trainer`, calibrated, and predicted with uncertainty by `Trainer.predict`.

The trainer puts the module in eval mode before it predicts, which would switch dropout layers off. Here the dropout is
injected while each batch is predicted, so that this does not matter, and the module stays as it is.
"""

# %%
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import latedrop
from latedrop import plots
from latedrop.adapters.lightning import predict_callback

# %%
torch.manual_seed(0)
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


# %%
def waves(count: int) -> DataLoader:
    x = 2 * torch.rand(count, 2) - 1
    y = (3 * x[:, :1]).sin() * x[:, 1:] + 0.1 * torch.randn(count, 1)
    return DataLoader(TensorDataset(x, y), batch_size=50)


# %%
class Waves(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


# %%
module, test = Waves(), waves(1000)
pl.Trainer(max_epochs=20, accelerator="cpu", **QUIET).fit(module, waves(1000))

# %%
uq = latedrop.calibrate(module, waves(300), method=latedrop.FirstOrder(floor=True))
trainer = pl.Trainer(accelerator="cpu", callbacks=[predict_callback(uq, level=0.9)], **QUIET)
batches = trainer.predict(module, test)  # one dict per batch: mean, std, low, high

# %%
low, high = (torch.cat([batch[name] for batch in batches]) for name in ("low", "high"))
y = test.dataset.tensors[1]
inside = ((low <= y) & (y <= high)).float().mean()
print(f"{len(batches)} batches with {', '.join(batches[0])}")
print(f"the 90 % interval holds {inside:.1%} of {len(y)} fresh rows")

# %% [markdown]
# What to see: each dot is a fresh row at its true value; about nine of ten lie inside the band.

# %%
mean = torch.cat([batch["mean"] for batch in batches])
ax = plots.intervals(mean, mean, {0.9: (low, high)}, target=y, xlabel="predicted", ylabel="true")
Path("output").mkdir(exist_ok=True)
ax.figure.savefig("output/lightning_predict.png", dpi=160)
