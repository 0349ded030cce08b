"""The device as tinygrad meets it: interfaces, memory, host renderers, workers, debug lines."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tinygrad import Device, Tensor, dtypes
from tinygrad.device import Buffer
from tinygrad.helpers import Context, Target

from coral import CoralError
from coral.backend import CORALDevice, DeviceUnavailable, HostCompilerMissing, hints, renderers, selection, stats

ADD = "from tinygrad import Tensor; print((Tensor([1, 2, 3]) + 1).tolist())"


def _stub_devices(monkeypatch: pytest.MonkeyPatch, open_runtime: Callable) -> None:
    module = types.ModuleType("coral.devices")
    module.open_runtime = open_runtime  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "coral.devices", module)


class _Runtime:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


# ---- interfaces


def test_missing_stick_is_reported_at_opening_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_plugged_in(kind: str, index: int) -> None:
        raise CoralError(f"no {kind} stick number {index}.")

    _stub_devices(monkeypatch, nothing_plugged_in)
    monkeypatch.delenv("MOCKCORAL", raising=False)
    with pytest.raises(DeviceUnavailable, match=r"CORAL:3: no usb stick number 3\. Plug.*coral doctor.*MOCKCORAL=1"):
        CORALDevice("CORAL:3")


def test_usb_is_opened_at_once_and_closed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    _stub_devices(monkeypatch, lambda kind, index: opened.append((kind, index)) or _Runtime())
    monkeypatch.setenv("MOCKCORAL", "0")
    device = CORALDevice("CORAL")
    assert opened == [("usb", 0)]
    device.finalize()
    assert device.iface.runtime.closed


@pytest.mark.parametrize("how", ["MOCKCORAL=1", "DEV=SIM+CORAL"])
def test_simulated_stick_is_built_by_the_first_chip_program(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    opened = []
    _stub_devices(monkeypatch, lambda kind, index: opened.append((kind, index)) or _Runtime())
    monkeypatch.setenv("MOCKCORAL", "1" if "MOCK" in how else "")
    with Context(DEV="SIM+CORAL" if "SIM" in how else "CPU"):
        device = CORALDevice("CORAL:2")
    assert opened == []
    device.finalize()
    assert opened == []
    assert device.chip is device.chip
    assert opened == [("sim", 2)]
    device.finalize()
    assert device.iface.runtime.closed


def test_unknown_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with Context(DEV="SIMM+CORAL"), pytest.raises(RuntimeError, match="no interface 'SIMM', did you mean: 'SIM'"):
        CORALDevice("CORAL")


def test_fresh_process_without_a_stick(python) -> None:
    """No stick is plugged into a test machine: the sentence must be the last line, and nothing may have run."""
    result = python(ADD, DEV="CORAL")
    assert result.returncode == 1
    assert "[2, 3, 4]" not in result.stdout
    last_line = result.stderr.strip().splitlines()[-1]
    assert last_line.startswith("coral.backend.errors.DeviceUnavailable: CORAL: ")
    assert "MOCKCORAL=1" in last_line


@pytest.mark.parametrize(
    "environment", [{"DEV": "CORAL", "MOCKCORAL": "1"}, {"DEV": "SIM+CORAL:1"}, {"DEV": "SIM+CORAL:X86"}]
)
def test_host_work_needs_nothing_of_the_simulator(python, environment: dict[str, str]) -> None:
    """``SIM+CORAL:1`` names a renderer "1", which tinygrad must refuse; the others compute."""
    loaded = (
        "import sys; rooms = ('chip', 'stick', 'driver', 'codegen', 'runtime'); "
        "print([room for room in rooms if f'coral.{room}' in sys.modules])"
    )
    result = python(f"{ADD}; {loaded}", **environment)
    if environment["DEV"].endswith(":1"):
        assert "CORAL has no renderer '1'" in result.stderr
    else:
        assert result.stdout.splitlines() == ["[2, 3, 4]", "[]"], result.stderr


# ---- memory


def test_buffers_are_read_and_written_in_place(coral_device) -> None:
    buffer = Buffer("CORAL", 10, dtypes.uint8, preallocate=True)
    view = buffer.as_memoryview(force_zero_copy=True)
    view[:] = bytes(range(10))
    assert bytes(buffer.view(4, dtypes.uint8, 3).ensure_allocated().as_memoryview(force_zero_copy=True)) == bytes(
        [3, 4, 5, 6]
    )
    assert (buffer._buf.size, buffer.view(4, dtypes.uint8, 3).ensure_allocated()._buf.va_addr) == (
        10,
        buffer._buf.va_addr + 3,
    )


def test_copies_between_devices(coral_device) -> None:
    values = np.arange(1000, dtype=np.float32)
    tensor = Tensor(values, device="CORAL").realize()
    assert np.array_equal(tensor.to("PYTHON").numpy(), values)
    assert np.array_equal(tensor.numpy(), values)
    assert np.array_equal(Tensor(values, device="PYTHON").to("CORAL").realize()[5:10].numpy(), values[5:10])


def test_file_to_device(coral_device, tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    file.write_bytes(bytes(range(100)))
    assert Tensor(file, dtype=dtypes.uint8).to("CORAL").tolist() == list(range(100))


def test_external_memory(coral_device) -> None:
    outside = np.arange(6, dtype=np.int32)
    tensor = Tensor.from_blob(outside.ctypes.data, (6,), dtype=dtypes.int32, device="CORAL")
    assert (tensor + 1).tolist() == [1, 2, 3, 4, 5, 6]


def test_a_freed_buffer_stays_readable_through_its_views(coral_device) -> None:
    buffer = Buffer("CORAL", 1 << 20, dtypes.uint8, preallocate=True)
    view = buffer.as_memoryview(force_zero_copy=True)
    view[:3] = b"abc"
    del buffer
    coral_device.allocator.free_cache()
    assert bytes(view[:3]) == b"abc"


# ---- host renderers


def test_renderers_pickle(coral_device) -> None:
    renderer = pickle.loads(pickle.dumps(coral_device.renderer))
    assert type(renderer) is type(coral_device.renderer)
    assert renderer.target == coral_device.renderer.target


@pytest.mark.parametrize("cc", ["no-such-compiler", "gcc", "false"])
def test_clang_that_is_none(monkeypatch: pytest.MonkeyPatch, cc: str) -> None:
    monkeypatch.setenv("CC", cc)
    with pytest.raises(HostCompilerMissing, match=f"'{cc}' is not one that runs here: install the package clang"):
        renderers.CORALClangRenderer(Target("CORAL", arch="x86_64,native"))


def test_without_compilers_the_machine_code_renderer_serves(python) -> None:
    program = f"from tinygrad import Device; print(type(Device['CORAL'].renderer).__name__); {ADD}"
    result = python(program, DEV="CORAL", MOCKCORAL="1", CC="no-such-compiler", LLVM_PATH=__file__)
    assert result.stdout.splitlines() == ["CORALX86Renderer", "[2, 3, 4]"], result.stderr


def test_no_renderer_at_all_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an ARM machine without clang and libLLVM."""
    monkeypatch.setenv("MOCKCORAL", "1")
    monkeypatch.setenv("CC", "no-such-compiler")

    def no_library(self, target: Target) -> None:
        raise HostCompilerMissing("no libLLVM")

    monkeypatch.setattr(renderers.CORALLLVMRenderer, "__init__", no_library)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(HostCompilerMissing, match=r"Install the package clang .*no-such-compiler.*no libLLVM.*x86_64"):
        CORALDevice("CORAL:7")


def test_named_renderer_that_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOCKCORAL", "1")
    monkeypatch.setenv("CC", "no-such-compiler")
    with Context(DEV=[Target("CORAL", "CLANG")]), pytest.raises(HostCompilerMissing, match="install the package clang"):
        CORALDevice("CORAL")


@pytest.mark.parametrize("name", ["CLANG", "LLVM", "X86"])
def test_every_host_renderer_gives_the_same_bytes_around_a_layer(chip, name: str) -> None:
    """Quantise, two layers, dequantise, and some float work, against numpy's float32."""
    from coral.quantize.expressions import dequantise_expression, qlinear_expression, quantise_expression

    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(5, 48)).astype(np.float32), rng.integers(0, 256, (48, 48), dtype=np.uint8)
    with Context(DEV=[Target("CORAL", name)], NOOPT=1):
        try:
            assert name in type(Device["CORAL"].renderer).__name__.upper()
        except HostCompilerMissing as missing:
            pytest.skip(f"{name}: {missing}")
        codes = quantise_expression(Tensor(x, device="CORAL").realize(), 0.03, 120)
        weights = Tensor(w, device="CORAL").realize()
        for _ in range(2):
            codes = qlinear_expression(codes, weights, None, 120, 128, 0.002, 120, 255, 120)
        got = dequantise_expression(codes, 0.5, 120).numpy()
    want = np.clip(np.rint(x * np.float32(1 / np.float32(0.03))), -120, 135) + 120
    for _ in range(2):
        acc = ((want.astype(np.int64) - 120) @ (w.astype(np.int64) - 128).T).astype(np.float32)
        want = np.clip(np.rint(acc * np.float32(0.002)), 0, 135) + 120
    assert np.array_equal(got, (want - 120).astype(np.float32) * np.float32(0.5))
    assert (stats().chip_programs, stats().chip_layers, stats().host_programs) == (1, 2, 2)


def test_bfloat16_where_clang_has_none(coral_device) -> None:
    """Emulated or native, the numbers are the same; clang 14 would refuse the source."""
    values = Tensor([1.0, 2.5, -3.25], device="CORAL").cast(dtypes.bfloat16) * 2
    assert values.cast(dtypes.float32).tolist() == [2.0, 5.0, -6.5]


# ---- selection in its surroundings

LAYERS = """
import numpy as np
from tinygrad import Tensor
from coral.quantize.expressions import qlinear_expression
from coral.backend import stats
import tinygrad.engine.worker as worker

class Runtime:
    def linear(self, spec, x, w, b, key=None):
        return np.full((x.shape[0], spec.n), int(spec.mult * 2), np.uint8)
    closed = False
    def close(self): pass

if __name__ == "__main__":
    from tinygrad import Device
    Device["CORAL"].iface.runtime = Runtime()
    x, w = Tensor.empty(4, 32, dtype="uint8"), Tensor.empty(32, 32, dtype="uint8")
    for i in range(1, 4):
        x = qlinear_expression(x, w, None, 3, 4, i / 2, 0, 255, 5)
    y = (x.float() * 0.5 + 1).contiguous().sin().realize()
    print(stats().chip_programs, stats().host_programs, x.numpy().max(), worker.worker_pool is not None)
"""


def test_worker_processes_compile_beside_chip_programs(python, tmp_path: Path) -> None:
    """Four programs of one schedule are compiled by spawned workers, which get the hook with the renderer's class."""
    file = tmp_path / "program.py"
    file.write_text(LAYERS)
    result = python(
        f"import runpy; runpy.run_path({str(file)!r}, run_name='__main__')",
        DEV="CORAL",
        MOCKCORAL="1",
        CORAL_DEBUG="1",
        CORAL_FUSE="0",
        PARALLEL="2",
    )
    assert result.returncode == 0, result.stderr
    chip_programs, host_programs, value, pool = result.stdout.split()
    assert (chip_programs, value, pool) == ("3", "3", "True")
    lines = [line for line in result.stderr.splitlines() if line.startswith("coral: ")]
    assert len(lines) == 3 + int(host_programs)
    assert sum(line.startswith("coral: chip coral_linear_4_32_32_32: identical to Linear") for line in lines) == 3


def test_debug_line_of_a_host_kernel_names_the_first_hint_that_failed(
    chip, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CORAL_DEBUG", "1")
    (Tensor.empty(11, 13, dtype=dtypes.uint8, device="CORAL") + 3).realize()
    reason = "neither a rounded value nor a clamp or maximum of codes; computes ADD; predicted 20 µs on the host"
    assert f"coral: host E_143: {reason}\n" in capfd.readouterr().err
    monkeypatch.setenv("CORAL_DEBUG", "0")
    (Tensor.empty(11, 17, dtype=dtypes.uint8, device="CORAL") + 3).realize()
    assert "coral:" not in capfd.readouterr().err


def test_other_devices_never_see_the_selection(chip, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(hints, "read", refuse)
    assert (Tensor([1, 2], device="PYTHON") * 2).tolist() == [2, 4]


def test_selection_that_breaks_warns_and_leaves_the_kernel_to_the_host(chip, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(hints, "read", broken)
    with pytest.warns(UserWarning, match=r"selection failed.*boom"):
        assert (Tensor.empty(7, 19, device="CORAL") * 0 + 3).sum().item() == 7 * 19 * 3
    assert stats().chip_programs == 0


def test_failed_self_test_warns_once_at_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOCKCORAL", "1")
    monkeypatch.setattr(hints, "read", lambda *_: hints.need(False, "lowered in another way"))
    with pytest.warns(UserWarning, match=r"every kernel will run on the host; tinycoral is made for tinygrad 0\.14\.0"):
        CORALDevice("CORAL")


def test_opening_passes_the_self_test(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    monkeypatch.setenv("MOCKCORAL", "1")
    CORALDevice("CORAL")
    assert list(recwarn) == []


def test_installing_twice_wraps_once() -> None:
    import tinygrad.codegen

    before = tinygrad.codegen.do_to_program
    selection.install()
    assert tinygrad.codegen.do_to_program is before


def test_errors_of_the_chip_reach_the_user(chip, monkeypatch: pytest.MonkeyPatch) -> None:
    from coral.quantize.expressions import qlinear_expression

    class Stuck(CoralError):
        pass

    def hang(*_: object, **__: object) -> None:
        raise Stuck("the stick hangs: replug it")

    monkeypatch.setattr(chip, "linear", hang)
    x = Tensor.empty(2, 8, dtype=dtypes.uint8, device="CORAL")
    w = Tensor.empty(3, 8, dtype=dtypes.uint8, device="CORAL")
    with pytest.raises(Stuck, match="replug"):
        qlinear_expression(x, w, None, 1, 2, 0.5, 0, 255, 3).realize()
    assert Device["CORAL"].chip is chip
