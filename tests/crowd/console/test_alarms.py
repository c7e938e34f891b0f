"""Colours follow the probability, with hysteresis, and a change has to last."""

from typing import Any

import pytest

from latedrop.errors import ArgumentError
from latedrop_crowd.console.zones import Alarm, Rule


@pytest.mark.parametrize(
    ("now", "colours"),
    [
        (None, {0.0: "green", 0.1: "green", 0.11: "amber", 0.5: "amber", 0.89: "amber", 0.9: "red", 1.0: "red"}),
        ("red", {0.6: "red", 0.49: "amber", 0.05: "green"}),  # stays until it is less likely than not
        ("amber", {0.6: "amber", 0.15: "amber"}),
        ("green", {0.15: "green"}),  # is left later than it is reached
    ],
)
def test_colours_of_a_probability(now: Any, colours: dict[float, str]) -> None:
    assert {p: Rule(sure=0.9).wanted(p, now) for p in colours} == colours


def test_a_single_odd_frame_changes_nothing() -> None:
    alarm = Alarm(Rule(hold=2.0))
    assert alarm.update(0.0, 0.0) == "green"  # the first frame decides at once
    assert [alarm.update(p, t) for p, t in ((1.0, 1.0), (0.0, 1.5), (1.0, 2.0), (1.0, 3.9))] == [None] * 4
    assert alarm.update(1.0, 4.0) == "red"
    assert alarm.update(1.0, 9.0) is None


def test_an_alarm_goes_on_after_a_restart() -> None:
    alarm = Alarm(Rule(hold=1.0), "red")
    assert alarm.update(0.95, 0.0) is None
    assert alarm.colour == "red"


@pytest.mark.parametrize(("sure", "hold"), [(0.5, 1), (1.0, 1), (float("nan"), 1), (0.9, -1)])
def test_wrong_rules_are_refused(sure: float, hold: float) -> None:
    with pytest.raises(ArgumentError, match="expected --"):
        Rule(sure, hold)


def test_a_change_that_has_not_lasted_is_coming() -> None:
    alarm = Alarm(Rule(hold=2.0))
    alarm.update(0.0, 0.0)
    assert alarm.coming is None
    alarm.update(0.31, 1.0)
    assert (alarm.colour, alarm.coming) == ("green", "amber")
    alarm.update(0.31, 3.1)
    assert (alarm.colour, alarm.coming) == ("amber", None)
