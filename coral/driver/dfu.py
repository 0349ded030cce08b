"""Host side of the firmware download. Source: docs/usb.md (DFU 1.1 as the boot ROM speaks it)."""

from __future__ import annotations

from coral.driver.errors import DfuFailed, StickGone, TransferFailed
from coral.driver.link import Link

DNLOAD, UPLOAD, GETSTATUS, CLRSTATUS = 1, 2, 3, 4
OUT, IN = 0x21, 0xA1
IDLE, DOWNLOAD_IDLE = 2, 5
DEFAULT_BLOCK_BYTES = 256
MAX_UPLOAD_BLOCKS = 512
CONFIGURATION_BYTES = 521


def dfu_interface(configuration: bytes) -> tuple[int, int]:
    """(interface number, block size in bytes) out of a configuration descriptor; raises DfuFailed."""
    interface, block, position = None, DEFAULT_BLOCK_BYTES, 0
    while position < len(configuration):
        length = configuration[position]
        part = configuration[position : position + length]
        if length < 2 or len(part) < length:
            raise DfuFailed(f"the configuration descriptor is damaged at byte {position} of {len(configuration)}")
        if part[1] == 4 and length >= 9 and part[4] == 0 and part[5:7] == b"\xfe\x01":
            interface = part[2]
        if part[1] == 0x21 and length >= 9:
            block = int.from_bytes(part[5:7], "little") or DEFAULT_BLOCK_BYTES
        position += length
    if interface is None:
        raise DfuFailed("the stick is in boot mode but offers no firmware download interface")
    return interface, block


def read_interface(link: Link) -> tuple[int, int]:
    """Asks the device for its configuration; see ``dfu_interface``."""
    return dfu_interface(link.control_in(0x80, 6, 0x0200, 0, CONFIGURATION_BYTES))


def download(link: Link, image: bytes, *, interface: int, block_bytes: int, attempts: int = 3) -> None:
    """Sends ``image`` and reads it back; raises DfuFailed when that does not succeed in ``attempts`` tries."""
    reason = ""
    for attempt in range(attempts):
        try:
            if attempt:
                link.counters.faults["firmware download"] += 1
                link.control_out(OUT, CLRSTATUS, 0, interface, b"")
            _send(link, image, interface, block_bytes)
            _verify(link, image, interface, block_bytes)
        except StickGone:
            raise
        except (DfuFailed, TransferFailed) as error:
            reason = str(error)
        else:
            return
    raise DfuFailed(
        f"the firmware could not be loaded in {attempts} attempts (last: {reason}); unplug the stick, plug it in again"
    )


def _send(link: Link, image: bytes, interface: int, block_bytes: int) -> None:
    blocks = [image[start : start + block_bytes] for start in range(0, len(image), block_bytes)]
    for number, block in enumerate([*blocks, b""]):
        link.control_out(OUT, DNLOAD, number & 0xFFFF, interface, block)
        answer = link.control_in(IN, GETSTATUS, 0, interface, 6)
        wanted = DOWNLOAD_IDLE if block else IDLE
        if len(answer) != 6 or answer[0] or answer[4] != wanted:
            raise DfuFailed(
                f"block {number} of {len(blocks)}: the answer is {answer.hex() or 'empty'}, expected are bStatus 0 "
                f"and state {wanted} (docs/usb.md)"
            )


def _verify(link: Link, image: bytes, interface: int, block_bytes: int) -> None:
    # The ROM returns its whole memory; it is read to the short block so that it falls back to idle.
    read = bytearray()
    for number in range(MAX_UPLOAD_BLOCKS):
        block = link.control_in(IN, UPLOAD, number, interface, block_bytes)
        read += block
        if len(block) < block_bytes:
            break
    if read[: len(image)] != image:
        wrong = next((i for i, (a, b) in enumerate(zip(read, image, strict=False)) if a != b), len(read))
        raise DfuFailed(f"the firmware read back differs from the image at byte {wrong} of {len(image)}")
