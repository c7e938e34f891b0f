"""What a training depends on besides its frames, and what to start from for each set."""

from __future__ import annotations

from dataclasses import dataclass

from latedrop.errors import ArgumentError
from latedrop_crowd.mcnn import STRIDE

__all__ = ["RECOMMENDED", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What a network depends on, besides its frames.

    Attributes:
        epochs: passes over the training frames.
        minutes: where given, as many epochs as fit into this time, instead of `epochs`.
        batch: frames per step.
        lr: largest learning rate of Adam.
        crop: side in pixels of a random square, a multiple of 4; None: whole frames.
        rate: of embedded dropout; 0: none.
        seed: of weights, order, crops, flips, jitter and masks.
        jitter: how far contrast (as a share) and brightness (by half of it) may move.
        flip: mirror half of the frames.
        average: how much of the averaged weights each step keeps.
        precision: `"bf16"` for a GPU, where it is faster; `"fp32"`.
    """

    epochs: int = 200
    minutes: float | None = None
    batch: int = 8
    lr: float = 1e-3
    crop: int | None = None
    rate: float = 0.0
    seed: int = 0
    jitter: float = 0.2
    flip: bool = True
    average: float = 0.99
    precision: str = "fp32"

    def __post_init__(self) -> None:
        limits = {
            "epochs": (self.epochs >= 1, "at least 1 epoch"),
            "minutes": (self.minutes is None or self.minutes > 0, "more than 0 minutes"),
            "batch": (self.batch >= 1, "at least 1 frame in a batch"),
            "lr": (self.lr > 0, "a learning rate above 0"),
            "crop": (self.crop is None or (self.crop >= 16 and self.crop % STRIDE == 0), "a multiple of 4 from 16 on"),
            "rate": (0 <= self.rate < 1, "a rate from 0 to below 1"),
            "seed": (0 <= self.seed < 2**63, "a seed from 0 to 2**63 - 1"),
            "jitter": (0 <= self.jitter < 1, "a jitter from 0 to below 1"),
            "average": (0 <= self.average < 1, "a share from 0 to below 1"),
            "precision": (self.precision in ("bf16", "fp32"), "bf16 or fp32"),
        }
        for name, (good, expected) in limits.items():
            if not good:
                raise ArgumentError(f"expected {expected} as {name}; found {getattr(self, name)!r}. Change --{name}.")


RECOMMENDED: dict[str, Settings] = {
    "mall": Settings(epochs=50, batch=4),
    "ucsd": Settings(epochs=50),
    "pets": Settings(epochs=50, batch=4),
    "shanghaitech-a": Settings(epochs=600, crop=256),
    "shanghaitech-b": Settings(epochs=400, crop=512),
    "own": Settings(epochs=200),
    "scenes": Settings(epochs=40, lr=3e-3, crop=96),
}
"""Settings to start from, by set."""
