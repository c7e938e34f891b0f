"""Images that are turned, noisy or blurred, at five strengths; and images of one set in the shape of another."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, conv2d, grid_sample, interpolate, pad

__all__ = ["SHIFTS", "STRENGTHS", "as_shape", "shifted"]

STRENGTHS = (1, 2, 3, 4, 5)
_DEGREES, _NOISE, _BLUR = 15.0, 0.1, 0.5
_SIDE = 28  # of the images whose blur is counted in pixels


def turned(x: Tensor, strength: int, generator: torch.Generator) -> Tensor:
    """By 15 degrees for each strength, to either side by chance; what comes from outside is black."""
    angle = math.radians(_DEGREES * strength)
    side = torch.randint(0, 2, (len(x),), generator=generator) * 2.0 - 1
    c, s, o = torch.full_like(side, math.cos(angle)), side * math.sin(angle), torch.zeros_like(side)
    matrix = torch.stack([torch.stack([c, -s, o], 1), torch.stack([s, c, o], 1)], 1)
    return grid_sample(x, affine_grid(matrix, list(x.shape), align_corners=False), align_corners=False)


def noisy(x: Tensor, strength: int, generator: torch.Generator) -> Tensor:
    """Normal noise, 0.1 for each strength, of pixels from 0 to 1."""
    return (x + _NOISE * strength * torch.randn(x.shape, generator=generator)).clamp(0, 1)


def blurred(x: Tensor, strength: int, generator: torch.Generator) -> Tensor:
    """By a Gaussian of half a pixel for each strength, in images of 28 pixels."""
    width = _BLUR * strength * x.shape[-1] / _SIDE
    reach = max(1, math.ceil(3 * width))
    line = torch.exp(-torch.arange(-reach, reach + 1).double().square() / (2 * width**2)).to(x)
    line = line / line.sum()
    rows = x.flatten(0, 1)[:, None]
    rows = conv2d(pad(rows, (reach, reach, 0, 0), mode="replicate"), line.reshape(1, 1, 1, -1))
    rows = conv2d(pad(rows, (0, 0, reach, reach), mode="replicate"), line.reshape(1, 1, -1, 1))
    return rows.reshape(x.shape)


SHIFTS: dict[str, Callable[[Tensor, int, torch.Generator], Tensor]] = {
    "rotation": turned,
    "noise": noisy,
    "blur": blurred,
}


def shifted(x: Tensor, seed: int) -> dict[str, Tensor]:
    """The images under every shift at every strength, by names such as `rotation-3`."""
    return {
        f"{name}-{strength}": shift(x, strength, torch.Generator().manual_seed(seed + strength))
        for name, shift in SHIFTS.items()
        for strength in STRENGTHS
    }


def as_shape(x: Tensor, shape: torch.Size) -> Tensor:
    """Images `(N, c, h, w)` with the channels, height and width of others: grey where these are, resized smoothly."""
    channels, *size = shape
    if x.shape[1] != channels:
        x = x.mean(1, keepdim=True).expand(-1, channels, -1, -1)
    if list(x.shape[2:]) == size:
        return x.contiguous()
    return interpolate(x, size=size, mode="bilinear", antialias=True, align_corners=False).clamp(0, 1)
