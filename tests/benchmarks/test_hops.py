"""Functions that a call enters are counted once each, and alike every time."""

import sys
from pathlib import Path

import pytest

import latedrop
from benchmarks.hops import cases, entered


def test_functions_of_a_folder_are_counted_once() -> None:
    def leaf() -> int:
        return 0

    def start() -> list[int]:
        return [leaf() for _ in range(3)]

    here = Path(__file__).parent
    assert {code.co_name for code in entered(start, here)} == {"start", "leaf"}
    assert entered(start) == set()
    before = sys.getprofile()
    with pytest.raises(ZeroDivisionError):
        entered(lambda: 1 // leaf(), here)
    assert sys.getprofile() is before


@pytest.mark.filterwarnings("ignore::latedrop.LatedropWarning")
def test_a_call_is_followed_alike_every_time() -> None:
    run = cases()["predict, sample, CNN"]
    codes = entered(run)
    assert codes == entered(run)
    assert latedrop.Predictor.predict.__code__ in codes
