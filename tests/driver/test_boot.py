"""Firmware download as the driver does it: sequence, verification, retries, errors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from stick.fake_chip import FakeChip, execution_program

from coral import driver
from coral.driver import dfu
from coral.driver.errors import BadFirmware
from coral.stick import Effect, Fault, FaultPlan, Kind, SoftwareStick, StickBus, stand_in_firmware
from driver.bench import check, make_bus, open_on


class Logging(SoftwareStick):
    """Counts class requests."""

    def __init__(self, **options: Any) -> None:
        self.dfu_requests: Counter[tuple[int, int]] = Counter()
        self.blocks: list[tuple[int, int]] = []
        super().__init__(chip=FakeChip(), **options)

    def control(
        self, request_type: int, request: int, value: int, index: int, data_or_length: Any, *, first: bool = True
    ) -> bytes | None:
        if request_type & 0x60 == 0x20:
            self.dfu_requests[request_type, request] += 1
            if request == 1:
                self.blocks.append((value, len(data_or_length)))
        return super().control(request_type, request, value, index, data_or_length)


def test_googles_image_takes_44_blocks_and_is_read_back(data) -> None:
    image = (data / "firmware" / "apex_latest_single_ep.bin").read_bytes()
    simulated = Logging()
    driver.open_stick(StickBus([simulated]), firmware=image).close()
    assert simulated.blocks == [*((b, 256) for b in range(42)), (42, 31), (43, 0)]
    assert simulated.dfu_requests == {(0x21, 1): 44, (0xA1, 3): 44, (0xA1, 2): 129}


def test_reenumeration_takes_its_time() -> None:
    bus = make_bus(reenumeration_s=2.0)
    stick = open_on(bus)
    check(stick, execution_program("A64 O64 !"))
    assert bus.sticks[0].clock.now() == pytest.approx(2.0, abs=0.1)


def test_no_firmware_says_what_to_do() -> None:
    with pytest.raises(driver.NoFirmware, match="coral firmware install --from-libedgetpu"):
        open_on(make_bus(), firmware=None)
    open_on(make_bus(firmware_required=False), firmware=None).close()


def test_hash_is_checked_unless_told_otherwise() -> None:
    bus = make_bus()
    with pytest.raises(BadFirmware, match="expected are 10783 bytes with sha256 3b07311b"):
        driver.open_stick(bus, firmware=stand_in_firmware())
    assert bus.sticks[0].faults.seen.total() == 0, "nothing was sent"


def test_an_image_that_does_not_boot_is_reported_within_its_deadline() -> None:
    bus = make_bus()
    with pytest.raises(driver.DfuFailed, match="did not come back"):
        open_on(bus, firmware=b"other" * 100)
    assert bus.sticks[0].clock.now() < 11
    bus.sticks[0].plug()
    open_on(bus).close()


@pytest.mark.parametrize("ordinal", [1, 2, 40, 88, 89, 217])
@pytest.mark.parametrize(("effect", "times"), [(Effect.STALL, 3), (Effect.TIMEOUT, 1), (Effect.SHORT, 1)])
def test_a_failed_request_starts_the_download_again(ordinal: int, effect: Effect, times: int) -> None:
    plan = FaultPlan(Fault(Kind.CONTROL, ordinal, effect, times=times))
    stick = open_on(make_bus(fault_plan=plan))
    check(stick, execution_program("A64 O64 !"))
    assert not plan.unfired


def test_three_attempts_then_replug() -> None:
    plan = FaultPlan(Fault(Kind.CONTROL, 50, Effect.STALL, times=1000))
    bus = make_bus(fault_plan=plan)
    with pytest.raises(driver.DfuFailed, match=r"in 3 attempts .* unplug the stick"):
        open_on(bus)
    assert bus._owners == {}


def test_a_rom_that_stores_a_wrong_byte_is_found_out() -> None:
    bus = make_bus()
    machine = bus.sticks[0].dfu
    original = machine._download

    def corrupting(block: int, data: bytes) -> bytes:
        result = original(block, data)
        machine.ram[300] = 0
        return result

    machine._download = corrupting  # pyright: ignore[reportAttributeAccessIssue]
    assert stand_in_firmware()[300] != 0
    with pytest.raises(driver.DfuFailed, match="differs from the image at byte 300 of 10783"):
        open_on(bus)


def test_unplugged_during_the_download() -> None:
    plan = FaultPlan(Fault(Kind.CONTROL, 60, Effect.DISCONNECT))
    bus = make_bus(fault_plan=plan)
    with pytest.raises(driver.StickGone, match="left the bus"):
        open_on(bus)
    with pytest.raises(driver.NoStick):
        open_on(bus)
    bus.sticks[0].plug()
    open_on(bus).close()


CONFIGURATION = bytes.fromhex("09021b000101008031 090400000 0fe010200 092107000000011001".replace(" ", ""))


def test_configuration_descriptor() -> None:
    assert dfu.dfu_interface(CONFIGURATION) == (0, 256)
    assert dfu.dfu_interface(CONFIGURATION[:18]) == (0, 256), "no functional descriptor: the ROM's block size"


@pytest.mark.parametrize(
    ("configuration", "message"),
    [
        (CONFIGURATION[:20], "damaged at byte 18 of 20"),
        (CONFIGURATION[:9] + b"\0" + CONFIGURATION[10:], "damaged at byte 9"),
        (CONFIGURATION[:9], "no firmware download interface"),
        (b"", "no firmware download interface"),
    ],
)
def test_damaged_configuration_descriptors(configuration: bytes, message: str) -> None:
    with pytest.raises(driver.DfuFailed, match=message):
        dfu.dfu_interface(configuration)
