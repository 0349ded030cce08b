"""Finding and opening: every refusal says what to do."""

from __future__ import annotations

import errno
import sys

import pytest

from coral import driver
from coral.driver.errors import UDEV_RULE
from coral.stick import StickBus
from driver.bench import make_bus, open_on


def test_listing_and_choosing() -> None:
    bus = make_bus(11)
    bus.sticks[3].application = True
    found = driver.list_sticks(bus)
    assert [stick.path for stick in found] == [f"1-{n}" for n in range(1, 12)], "by number, not by text"
    assert [stick.running for stick in found].index(True) == 3
    assert driver.find(bus, 10).path == driver.find(bus, "1-11").path == "1-11"


def test_no_stick() -> None:
    with pytest.raises(driver.NoStick, match=r"Plug a Coral USB Accelerator in.*DEV=SIM"):
        open_on(StickBus([]))
    with pytest.raises(driver.NoStick, match="there is no stick 2; plugged in are: 0 at 1-1, 1 at 1-2"):
        open_on(make_bus(2), index=2)


class Refusing:
    """A device that refuses to be opened a number of times."""

    def __init__(self, device, number: int, times: int) -> None:
        self._device, self.number, self.left = device, number, times

    def __getattr__(self, name: str):
        return getattr(self._device, name)

    def open(self):
        if self.left:
            self.left -= 1
            raise OSError(self.number, "refused")
        return self._device.open()


class RefusingBus(StickBus):
    number, times = errno.EBUSY, 0

    def devices(self):
        return [Refusing(device, self.number, self.times) for device in super().devices()]


def refusing(number: int, times: int) -> RefusingBus:
    bus = RefusingBus(make_bus(firmware_required=False).sticks)
    bus.number, bus.times = number, times
    return bus


def test_busy_is_waited_for_five_seconds() -> None:
    bus = refusing(errno.EBUSY, 20)
    open_on(bus).close()
    assert 1.9 < bus.sticks[0].clock.now() < 2.5
    bus = refusing(errno.EBUSY, 1000)
    with pytest.raises(driver.StickBusy, match="claimed by a program that does not use this driver's lock"):
        open_on(bus)
    assert 4.9 < bus.sticks[0].clock.now() < 5.3


def test_no_permission_gives_the_udev_rule_at_once() -> None:
    bus = refusing(errno.EACCES, 1)
    with pytest.raises(driver.PermissionDenied) as caught:
        open_on(bus)
    assert UDEV_RULE in str(caught.value)
    assert "1a6e" in UDEV_RULE
    assert "9302" in UDEV_RULE
    assert bus.sticks[0].clock.now() == 0


@pytest.mark.parametrize(
    ("platform", "remedy"), [("win32", "Zadig"), ("darwin", "virtual machine"), ("freebsd", "USB devices")]
)
def test_other_systems_have_other_remedies(platform: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    message = str(driver.PermissionDenied("1-1", "denied"))
    assert remedy in message
    assert "udev" not in message


def test_permission_of_a_device_that_has_just_appeared_may_come_late() -> None:
    bus = RefusingBus(make_bus().sticks)
    boot = bus.sticks[0].reset

    def resetting() -> bool:
        bus.number, bus.times = errno.EACCES, 5
        return boot()

    bus.sticks[0].reset = resetting  # pyright: ignore[reportAttributeAccessIssue]
    open_on(bus).close()


@pytest.mark.parametrize(("number", "error"), [(errno.ENODEV, driver.StickGone), (errno.EIO, driver.DriverError)])
def test_other_refusals(number: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="1-1"):
        open_on(refusing(number, 1))
