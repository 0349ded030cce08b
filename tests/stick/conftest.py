from __future__ import annotations

import pytest

from coral.stick import SoftwareStick, StickBus
from stick.fake_chip import FakeChip
from stick.wire import Wire


@pytest.fixture
def running() -> Wire:
    """A stick whose firmware runs and whose units are started, as a bare host sees it."""
    return Wire.started(SoftwareStick(firmware_required=False, chip=FakeChip()))


@pytest.fixture
def bus() -> StickBus:
    return StickBus([SoftwareStick(chip=FakeChip())])
