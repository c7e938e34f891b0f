"""What frames a calibration knows: their size, their brightness, and, through the count's terms, their features.

A frame's strangeness is the largest of three numbers: the leverage of its features beside the reference frames, 1
where the usual ends (see `latedrop.terms`); how far its brightness is from the middle of what was seen; and the square
of how many times larger or smaller it is. Inside of what was seen the last two are 0, so that frames like those of the
validation have the strangeness that is on record of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from torch import Tensor

from latedrop.records import Limits, record

__all__ = ["STRANGE", "Usual"]

STRANGE = 2.0
"""From this strangeness on a frame is called strange; the variance grows from 1 on."""
_WIDER = 0.5  # of the range of brightness: what lies outside of it by less is still usual
_LEAST = 0.02
_DARK = 0.25  # of the darkest brightness that is usual (of the distance to white for the brightest): no picture
_FLAT = 0.02  # standard deviation of pixels, in [0, 1], below which there is nothing in a picture
_Pixels: TypeAlias = Annotated[int, Limits(1)]
_Share: TypeAlias = Annotated[float, Limits(0, 1)]


@record
@dataclass(frozen=True)
class Usual:
    """What frames were seen.

    Attributes:
        size: `(H, W)` in pixels as the network sees them; None where they differ.
        darkest: mean of the darkest frame that is usual, in [0, 1].
        brightest: of the brightest one.
    """

    size: tuple[_Pixels, _Pixels] | None
    darkest: _Share
    brightest: _Share

    @classmethod
    def of(cls, images: Iterable[Tensor]) -> Usual:
        """What frames `(..., H, W)` are; their range of brightness made half as wide again on both sides."""
        sizes, means = set(), []
        for image in images:
            sizes.add((int(image.shape[-2]), int(image.shape[-1])))
            means.append(float(image.float().mean()))
        more = max(_WIDER * (max(means) - min(means)), _LEAST)
        return cls(sizes.pop() if len(sizes) == 1 else None, max(0.0, min(means) - more), min(1.0, max(means) + more))

    def strangeness(self, image: Tensor) -> tuple[float, tuple[str, ...]]:
        """Of size and brightness of a frame `(..., H, W)`: the larger one, 0 where usual, and what is strange."""
        found, words = 0.0, []
        height, width = image.shape[-2:]
        if self.size is not None and (height, width) != self.size:
            h, w = self.size
            found = STRANGE * max(height / h, h / height, width / w, w / width) ** 2
            words.append(f"{height} x {width} pixels, not {h} x {w}")
        mean = float(image.float().mean())
        middle, half = (self.darkest + self.brightest) / 2, max((self.brightest - self.darkest) / 2, 1e-6)
        apart = abs(mean - middle) / half
        if apart > 1:
            words.append(f"brightness {mean:.2f}, usually {self.darkest:.2f} to {self.brightest:.2f}")
            found = max(found, STRANGE, apart)
        return found, tuple(words)

    def uncountable(self, image: Tensor) -> str:
        """Why a frame `(..., H, W)` cannot be counted at all, in words; empty where it can."""
        pixels = image.float()
        mean, spread = float(pixels.mean()), float(pixels.std())
        usually = f"brightness {mean:.2f}, usually {self.darkest:.2f} to {self.brightest:.2f}"
        if mean < _DARK * self.darkest:
            return f"too dark: {usually}"
        if 1 - mean < _DARK * (1 - self.brightest):
            return f"too bright: {usually}"
        return f"nothing in the picture: its pixels differ by {spread:.3f}" if spread < _FLAT else ""
