"""Where the firmware comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from coral.apps import firmware as command
from coral.driver import firmware
from coral.driver.errors import BadFirmware


@pytest.fixture
def image(data: Path) -> Path:
    return data / "firmware" / firmware.FILE_NAME


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.delenv("CORAL_FIRMWARE", raising=False)
    monkeypatch.setattr(firmware, "LIBRARY_PATTERNS", (str(tmp_path / "lib" / "libedgetpu.so*"),))
    return tmp_path


def library(folder: Path, content: bytes) -> Path:
    (folder / "lib").mkdir(exist_ok=True)
    path = folder / "lib" / "libedgetpu.so.1.0"
    path.write_bytes(content)
    return path


def test_nothing_is_found_on_a_bare_system() -> None:
    assert firmware.find() is None


def test_order_of_places(home: Path, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = library(home, b"\x7fELF" + bytes(1000) + b"GUC-Ver:" + bytes(50) + image.read_bytes() + bytes(999))
    assert firmware.find() == (image.read_bytes(), str(found))
    installed = firmware.install(image.read_bytes())
    assert installed == home / "share" / "tinycoral" / firmware.FILE_NAME
    assert firmware.find() == (image.read_bytes(), str(installed))
    monkeypatch.setenv("CORAL_FIRMWARE", str(image))
    assert firmware.find() == (image.read_bytes(), f"CORAL_FIRMWARE={image}")


def test_a_library_without_the_image_has_none(home: Path, image: Path) -> None:
    damaged = bytearray(image.read_bytes())
    damaged[100] ^= 1
    assert firmware.search_library(library(home, bytes(5000) + bytes(damaged))) is None
    assert firmware.search_library(library(home, b"GUC-Ver:")) is None
    assert firmware.search_library(home / "absent") is None


def test_other_files_are_refused_with_both_hashes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = home / "wrong.bin"
    wrong.write_bytes(bytes(10783))
    with pytest.raises(
        BadFirmware, match=r"wrong\.bin is not the stick's firmware .* 10783 bytes with sha256 [0-9a-f]"
    ):
        firmware.read_file(wrong)
    with pytest.raises(BadFirmware, match="absent cannot be read: No such file"):
        firmware.read_file(home / "absent")
    monkeypatch.setenv("CORAL_FIRMWARE", str(wrong))
    with pytest.raises(BadFirmware):
        firmware.find()


def test_download(image: Path, home: Path) -> None:
    assert firmware.download(image.as_uri()) == image.read_bytes()
    wrong = home / "wrong.bin"
    wrong.write_bytes(b"404: Not Found")
    with pytest.raises(BadFirmware, match=r"wrong\.bin is not the stick's firmware"):
        firmware.download(wrong.as_uri())
    with pytest.raises(BadFirmware, match=r"cannot be downloaded from .* `coral firmware install FILE`"):
        firmware.download((home / "absent").as_uri())


def test_command(image: Path, home: Path, capsys: pytest.CaptureFixture) -> None:
    command.status()
    assert "coral firmware install" in capsys.readouterr().out
    command.install(image)
    command.status(as_json=True)
    assert '"installed": true' in capsys.readouterr().out
    firmware.data_file().unlink()
    library(home, image.read_bytes())
    command.install(from_libedgetpu=True)
    assert firmware.data_file().read_bytes() == image.read_bytes()


def test_command_needs_exactly_one_source(image: Path) -> None:
    with pytest.raises(BadFirmware, match="give exactly one of FILE, --from-libedgetpu, --download"):
        command.install()
    with pytest.raises(BadFirmware, match="exactly one"):
        command.install(image, download=True)
    with pytest.raises(BadFirmware, match="no installed libedgetpu has the image"):
        command.install(from_libedgetpu=True)
