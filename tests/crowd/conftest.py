"""A small counter of synthetic scenes, calibrated once for all tests."""

import pytest

from counters import network
from latedrop_crowd.calibration import CrowdCalibration, calibrate_counter
from latedrop_crowd.layouts import CrowdSet
from latedrop_crowd.mcnn import Trained
from latedrop_crowd.scenes import make_scenes


@pytest.fixture(scope="session")
def scenes() -> CrowdSet:
    return make_scenes(6, 12, 4, shape=(72, 96))


@pytest.fixture(scope="session")
def trained() -> Trained:
    return Trained(network(), None, {"set": "scenes"})


@pytest.fixture(scope="session")
def free(trained: Trained, scenes: CrowdSet) -> CrowdCalibration:
    """Of the whole frame, without a region of interest."""
    return calibrate_counter(trained, scenes, progress=False)
