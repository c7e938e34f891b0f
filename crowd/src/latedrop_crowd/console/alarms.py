"""When a limit is exceeded: green, red, and amber for "cannot tell", decided by the probability that it is.

A zone turns red when it is at least `RAISE` sure that there are too many people, green when it is as sure that there
are not. What lies between is amber. Once red it stays so until that is less likely than not, and a change must last for
some seconds: neighbouring frames err alike, but a single one may be odd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from latedrop.errors import ArgumentError

__all__ = ["Alarm", "Colour", "Rule"]

Colour = Literal["green", "amber", "red"]
_KEEP = 0.5  # of being too many: above it, red stays red


@dataclass(frozen=True)
class Rule:
    """How sure, and for how long.

    Attributes:
        sure: probability from which on a zone turns red; below one minus it, green.
        hold: seconds that a change must last.
    """

    sure: float = 0.9
    hold: float = 2.0

    def __post_init__(self) -> None:
        if not 0.5 < self.sure < 1:
            raise ArgumentError(f"expected --sure above 0.5 and below 1; found {self.sure}.")
        if not 0 <= self.hold <= 3600:
            raise ArgumentError(f"expected --hold from 0 to 3600 seconds; found {self.hold}.")

    def wanted(self, probability: float, now: Colour | None) -> Colour:
        """The colour that a probability asks for, given the present one."""
        if probability >= self.sure or (now == "red" and probability >= _KEEP):
            return "red"
        calm = 1 - self.sure + 1e-9
        # From green one leaves later than one comes back to it.
        if probability <= calm or (now == "green" and probability <= min(2 * calm, _KEEP)):
            return "green"
        return "amber"


class Alarm:
    """The state of one zone's limit."""

    def __init__(self, rule: Rule, colour: Colour | None = None) -> None:
        self.rule, self.colour = rule, colour
        self._other: Colour | None = None
        self._since = 0.0

    def update(self, probability: float, time: float) -> Colour | None:
        """Look at one frame; the new colour where it changes, else None."""
        wanted = self.rule.wanted(probability, self.colour)
        if wanted == self.colour:
            self._other = None
            return None
        if self.colour is not None:
            if wanted != self._other:
                self._other, self._since = wanted, time
            if time - self._since < self.rule.hold:
                return None
        self.colour, self._other = wanted, None
        return wanted

    @property
    def coming(self) -> Colour | None:
        """The colour that frames ask for, where it has not lasted long enough to show."""
        return self._other
