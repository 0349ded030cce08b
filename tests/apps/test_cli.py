"""The command line as a user types it: exit codes, errors as sentences, pipes, and the instruction tools end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from apps.conftest import Command as Coral
from coral import __version__, isa

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def coral(run: Coral) -> Coral:
    """Runs ``coral ARGUMENTS`` in this process."""
    return run


def process(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A small sound program."""
    body = [isa.TileFence(seq=0, tile_mask=1), isa.Op(seq=1, mult=0.5), isa.Halt(code=4)]
    words = sum(i.words for i in body)
    path = tmp_path / "small.coral"
    path.write_bytes(isa.encode([isa.Start(body_bits=128 * words), *body, isa.End()]))
    return path


def test_version_and_help_without_heavy_imports(coral: Coral) -> None:
    assert coral("version").stdout == f"tinycoral {__version__}\n"
    shown = coral("--help")
    assert shown.returncode == 0
    for command in ("disasm", "asm", "isa", "info", "firmware", "version"):
        assert f"  {command} " in shown.stdout
    script = (
        "import sys, coral.cli; print([m for m in ('numpy', 'tinygrad', 'rich.table', 'usb1') if m in sys.modules])"
    )
    assert process(sys.executable, "-c", script).stdout == "[]\n"


def test_usage_errors_exit_with_2(coral: Coral) -> None:
    for arguments in (("nosuch",), ("disasm",), ("disasm", "/nonexistent.coral"), ("isa", "check"), ("asm", "x")):
        result = coral(*arguments)
        assert result.returncode == 2, arguments
        assert "Usage" in result.stderr


def test_disassembled_and_assembled_again_it_is_the_same_file(coral: Coral, program: Path, tmp_path: Path) -> None:
    text, again = tmp_path / "small.s", tmp_path / "again.coral"
    result = coral("disasm", program)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == "# bitstream 0: small.coral, 336 bytes"
    assert result.stdout.splitlines()[3] == "op seq=1 mult=0.5  # 2"
    text.write_text(result.stdout)
    result = coral("asm", text, "-o", again)
    assert (result.returncode, result.stdout) == (0, f"{again}: 5 instructions, 336 bytes\n")
    assert again.read_bytes() == program.read_bytes()


def test_errors_are_sentences_and_exit_with_1(coral: Coral, program: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "bad.s", tmp_path / "out.coral"
    text.write_text("start\nhalt cod=4\n")
    result = coral("asm", text, "-o", out)
    assert result.returncode == 1
    assert result.stderr == "coral: line 2, column 6: halt has no field 'cod'; did you mean code?\n"
    assert not out.exists()
    text.write_text("# nothing\n")
    assert "holds no instruction" in coral("asm", text, "-o", out).stderr
    text.write_text("start\nend\nstart\nend\n")
    assert "holds 2 bitstreams; take one at a time" in coral("asm", text, "-o", out).stderr
    result = coral("disasm", program, "--only", 1)
    assert (result.returncode, result.stderr) == (1, "coral: small.coral has 1 bitstreams (0..0), there is no 1\n")
    program.write_bytes(bytes(16))
    result = coral("disasm", program)
    assert (result.returncode, result.stderr) == (1, "coral: word 0: unknown opcode 0x00\n")
    result = coral("asm", program, "-o", out)
    assert result.returncode == 1
    assert "line 1, column 1: there is no instruction" in result.stderr
    text.write_text("halt\n")
    result = coral("asm", text, "-o", tmp_path / "no" / "such" / "folder")
    assert (result.returncode, "Traceback" in result.stderr) == (1, False)


def test_a_closed_pipe_is_quiet(corpus: Path) -> None:
    path = next((corpus / "vision").glob("mobilenet_v2*_edgetpu.tflite"))
    result = process("bash", "-c", f"{sys.executable} -m coral disasm {path} | head -2")
    assert result.stderr == ""
    assert len(result.stdout.splitlines()) == 2


def test_isa_check_reports_as_text_and_as_json(coral: Coral, program: Path, tmp_path: Path) -> None:
    result = coral("isa", "check", program)
    assert result.returncode == 0, result.stdout
    assert "       5  instructions" in result.stdout
    assert result.stdout.endswith("all is well\n")
    (tmp_path / "broken_edgetpu.tflite").write_bytes(b"no model")
    data = bytearray(program.read_bytes())
    data[16 + 12] |= 1  # a bit that nothing names
    (tmp_path / "bit.coral").write_bytes(data)
    result = coral("isa", "check", tmp_path, "--json")
    found = json.loads(result.stdout)
    assert result.returncode == 1
    assert (found["ok"], found["files"], found["unreadable_files"]) == (False, 3, 1)
    assert (found["programs"], found["bitstreams"], found["unnamed_bits"]) == (2, 2, 1)
    assert any("broken_edgetpu.tflite" in problem for problem in found["problems"])
    result = coral("isa", "check", tmp_path)
    assert result.returncode == 1
    assert "unknown bits 96" in result.stdout


def test_isa_check_without_any_program(coral: Coral, tmp_path: Path) -> None:
    result = coral("isa", "check", tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("coral: no *_edgetpu.tflite or *.coral in")


@pytest.mark.slow
def test_isa_check_of_the_corpus(coral: Coral, corpus: Path) -> None:
    result = coral("isa", "check", corpus, "--json")
    found = json.loads(result.stdout)
    assert result.returncode == 0
    counts = ("files", "distinct_files", "programs", "bitstreams", "bitstreams_of_distinct_files", "instructions")
    assert [found[name] for name in counts] == [43, 41, 62, 62, 60, 25_325]
    zeros = ("round_trip_failures", "unnamed_bits", "sequence_errors", "length_errors", "unreadable_files")
    assert not any(found[name] for name in zeros)


@pytest.mark.slow
def test_every_program_of_the_corpus_survives_disasm_and_asm(corpus: Path, tmp_path: Path) -> None:
    from coral.apps.asm import asm
    from coral.isa.text import disassemble
    from coral.package.bitstreams import bitstreams_of, find_files

    for path in find_files([corpus]):
        for stream in bitstreams_of(path):
            (tmp_path / "text").write_text(disassemble(stream.data))
            asm(tmp_path / "text", tmp_path / "again")
            assert (tmp_path / "again").read_bytes() == stream.data, stream.label
