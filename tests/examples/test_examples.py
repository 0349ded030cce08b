"""The examples as a user runs them: in a process of their own, on the simulated stick."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

EXAMPLES = ROOT / "examples"


def run(script: str, **environment: str) -> str:
    """Standard output of ``examples/<script>``, without colours."""
    return run_with(script, **environment)


def run_with(*command: str, **environment: str) -> str:
    """The same with arguments."""
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100", **environment}
    done = subprocess.run(
        [sys.executable, *command], cwd=EXAMPLES, env=env, capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_digits_on_the_simulated_stick() -> None:
    out = run("digits.py", MOCKCORAL="1", DEV="CORAL")
    scores = re.search(r"float ([\d.]+)%, uint8 ([\d.]+)%", out)
    assert scores
    floats, codes = map(float, scores.groups())
    assert floats > 95
    assert abs(floats - codes) <= 0.6
    assert "the host computes the same bytes" in out
    assert re.search(r"layers in chip programs\s*│\s*12 in 6 ", out)
    assert re.search(r"chip calls / images or rows in them\s*│\s*6 / 360 ", out)
    assert "predicted" in out
    assert "SIMULATED stick" in out


def test_mnist_names_a_folder_without_the_files(tmp_path: Path) -> None:
    env = {**os.environ, "MNIST_DIR": str(tmp_path), "DEV": "CPU"}
    done = subprocess.run(
        [sys.executable, "mnist.py"], cwd=EXAMPLES, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert str(tmp_path) in done.stderr
    assert "t10k-images" in done.stderr


def test_cifar_names_a_folder_without_the_files(tmp_path: Path) -> None:
    env = {**os.environ, "CIFAR_DIR": str(tmp_path), "DEV": "CPU"}
    done = subprocess.run(
        [sys.executable, "cifar.py"], cwd=EXAMPLES, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert str(tmp_path) in done.stderr
    assert "data_batch_1.bin" in done.stderr


@pytest.mark.slow
def test_mnist_trains_once_and_takes_a_smaller_network(tmp_path: Path, data: Path) -> None:
    env = {"DEV": "CPU", "MNIST_DIR": str(data / "mnist"), "XDG_CACHE_HOME": str(tmp_path)}
    first = run_with("mnist.py", "--mlp", "--images", "200", **env)
    again = run_with("mnist.py", "--mlp", "--images", "200", **env)
    scores = [re.search(r"float ([\d.]+)%, uint8 ([\d.]+)%", out) for out in (first, again)]
    assert scores[0]
    assert scores[1]
    assert scores[0].groups() == scores[1].groups()
    assert float(scores[0].group(1)) > 90
    assert "mnist_mlp.safetensors" in again
    assert "mnist_mlp.safetensors" not in first


MLP_ON_MNIST = """
import sys
import numpy as np
import mnist, mlp
import coral
from coral.backend import stats
from tinygrad import Tensor
from tinygrad.helpers import DEV

Tensor.manual_seed(0)
data = mnist.load()
model = mlp.MLP(784, 128, 64, 10)
mlp.train(model, data, steps=600, batch=128)
floats = mlp.logits(model, data.test_x, batch=500)
quantised = coral.quantize(model, data.train_x[:256])
codes = mlp.logits(quantised, data.test_x, batch=500)
assert (stats().chip_rows, stats().chip_layers, stats().chip_programs) == (2000, 12, 4), stats()
for layer in quantised.layers:
    layer.weight_codes, layer.bias_codes = layer.weight_codes.to("CPU"), layer.bias_codes.to("CPU")
DEV.value = "CPU"
cpu = mlp.logits(quantised, data.test_x, batch=500)
np.savez(sys.argv[1], floats=floats, codes=codes, cpu=cpu, labels=data.test_y)
"""


@pytest.mark.skipif(shutil.which("clang") is None, reason="DEV=CPU needs clang: apt-get install clang")
@pytest.mark.slow
def test_mnist_is_as_good_in_uint8_and_the_same_on_chip_and_cpu(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "scores.npz"
    env = {**os.environ, "MOCKCORAL": "1", "DEV": "CORAL", "MNIST_DIR": str(data / "mnist"), "NO_COLOR": "1"}
    command = [sys.executable, "-c", MLP_ON_MNIST, str(out)]
    done = subprocess.run(command, cwd=EXAMPLES, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    found = np.load(out)
    floats, codes = ((found[k].argmax(1) == found["labels"]).mean() for k in ("floats", "codes"))
    assert len(found["labels"]) == 2000
    assert floats > 0.94
    assert codes >= floats - 0.003
    np.testing.assert_array_equal(found["codes"], found["cpu"])


TRAIN = """
import sys
import mnist, mlp
from tinygrad import Tensor

Tensor.manual_seed(0)
data, model, steps = mnist.as_images(mnist.load()), mnist.Model(), int(sys.argv[1])
mlp.trained(model, f"mnist_{steps}", lambda: mlp.train(model, data, steps=steps, batch=128, lr=1e-3), again=False)
"""

CNN_ON_CHIP = """
import sys
import numpy as np
import mnist, mlp
import coral
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from coral.backend import reset_stats, stats
from tinygrad import Device, Tensor, TinyJit
from tinygrad.helpers import DEV

out, steps, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
data, model = mnist.as_images(mnist.load()), mnist.Model()
mlp.trained(model, f"mnist_{steps}", lambda: sys.exit("no weights"), again=False)
images, found = data.test_x[:count], {"labels": data.test_y[:count]}
quantised, report = coral.quantize(model, data.train_x[:256], report=True)
print(report)
for batch in (1, 32, 128):
    forward = TinyJit(lambda x: quantised(x).realize())
    parts = []
    for start in range(0, count, batch):
        reset_stats()
        rows = images[start : start + batch]
        filled = np.concatenate([rows, np.zeros((batch - len(rows), 1, 28, 28), np.uint8)])
        parts.append(forward(Tensor(filled).realize()).numpy()[: len(rows)])
        counted = stats()
        assert (counted.chip_programs, counted.chip_layers, counted.host_programs) == (1, 7, 2), (batch, counted)
    found[f"chip{batch}"] = np.concatenate(parts)
chip = Device["CORAL"].chip.stats
assert chip.uploads <= 3, chip
print(chip)

coral.export_tflite(quantised, out + ".tflite")
lite = Interpreter(out + ".tflite", experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES)
lite.allocate_tensors()
source, target = lite.get_input_details()[0]["index"], lite.get_output_details()[0]["index"]
found["lite"] = np.empty((count, 10), np.uint8)
for k, image in enumerate(images):
    lite.set_tensor(source, image.transpose(1, 2, 0)[None])
    lite.invoke()
    found["lite"][k] = lite.get_tensor(target)[0]

for layer in quantised.layers:
    if hasattr(layer, "weight_codes"):
        for name in ("weight_codes", "bias_codes", "multipliers"):
            if (tensor := getattr(layer, name)) is not None:
                setattr(layer, name, tensor.to("CPU"))
DEV.value = "CPU"
floats = mnist.Model()
mlp.trained(floats, f"mnist_{steps}", lambda: sys.exit("no weights"), again=False)
found["cpu"] = mlp.logits(quantised, images, batch=200, jit=True)
found["floats"] = mlp.logits(floats, images, batch=200, jit=True)
np.savez(out, **found)
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Callable[[int], dict[str, str]]:
    """Trains beautiful_mnist once per number of steps; the environment in which the weights are found. They are kept in
    $CORAL_WEIGHTS if that is set: 150 steps take ten minutes and more.
    """
    cache = Path(os.environ.get("CORAL_WEIGHTS") or tmp_path_factory.mktemp("weights"))

    def train(steps: int) -> dict[str, str]:
        env = {"MNIST_DIR": str(data / "mnist"), "XDG_CACHE_HOME": str(cache), "NO_COLOR": "1"}
        if not (cache / "tinycoral" / f"mnist_{steps}.safetensors").is_file():
            command = [sys.executable, "-c", TRAIN, str(steps)]
            subprocess.run(command, cwd=EXAMPLES, env={**os.environ, **env, "DEV": "CPU"}, check=True, timeout=7200)
        return env

    return train


@pytest.mark.skipif(shutil.which("clang") is None, reason="DEV=CPU needs clang: apt-get install clang")
@pytest.mark.slow
@pytest.mark.parametrize(("steps", "images"), [(3, 64), (150, 2000)])
def test_beautiful_mnist_is_one_chip_program_per_call(
    tmp_path: Path, weights: Callable[[int], dict[str, str]], steps: int, images: int
) -> None:
    """Batch 1, 32, 128 under TinyJit: one program for all seven layers, logits those of DEV=CPU for every image.

    If trained, as good as in float, and the exported file gives the same classes in LiteRT.
    """
    out = tmp_path / "scores.npz"
    env = {**os.environ, **weights(steps), "MOCKCORAL": "1", "DEV": "CORAL"}
    command = [sys.executable, "-c", CNN_ON_CHIP, str(out), str(steps), str(images)]
    done = subprocess.run(command, cwd=EXAMPLES, env=env, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    found = np.load(out)
    assert len(found["labels"]) == images
    for batch in (1, 32, 128):
        np.testing.assert_array_equal(found[f"chip{batch}"], found["cpu"])
    floats, codes = ((found[k].argmax(1) == found["labels"]).mean() for k in ("floats", "cpu"))
    same = (found["lite"].argmax(1) == found["cpu"].argmax(1)).mean()
    print(done.stdout, f"float {floats:.2%}, uint8 {codes:.2%}, LiteRT has the same class for {same:.2%}")
    assert not re.search(r"^\S+ +\w+ +host ", done.stdout, re.MULTILINE)
    if images == 2000:
        assert floats > 0.96
        assert codes >= floats - 0.003
        assert same >= 0.995


SPEEDY = """
import sys
import numpy as np
import cifar
import coral
from coral.backend import reset_stats, stats
from tinygrad import Device, Tensor, TinyJit
from tinygrad.helpers import DEV

Tensor.manual_seed(0)
widths, steps = tuple(map(int, sys.argv[2].split(","))), int(sys.argv[3])
data = cifar.random(80)
images, model = data.train_x[:8], cifar.SpeedyConvNet(widths)
before = model.groups[2].conv2.weight.numpy()
if steps:
    cifar.train(model, data, steps, 16)
assert (model.groups[2].conv2.weight.numpy() != before).any() == bool(steps)
quantised = coral.quantize(model, images)
forward = TinyJit(lambda x: quantised(x).realize())
for number in range(4):
    reset_stats()
    chip = forward(Tensor(images[number : number + 2]).realize()).numpy()
    counted, runtime = stats(), Device["CORAL"].chip.stats
    assert (counted.chip_programs, counted.chip_layers, counted.host_fallbacks) == (8, 11, 0), counted
    assert (runtime.uploads, runtime.evictions, runtime.repacks) == (8, 0, 0), runtime
layers = [quantised.whiten, *(c for g in quantised.groups for c in (g.conv1, g.conv2)), quantised.linear]
for layer in layers:
    for name in ("weight_codes", "bias_codes", "multipliers"):
        if (tensor := getattr(layer, name)) is not None:
            setattr(layer, name, tensor.to("CPU"))
DEV.value = "CPU"
cpu = quantised(Tensor(images[3:5]).realize()).numpy()
np.savez(sys.argv[1], chip=chip, cpu=cpu)
"""


@pytest.mark.skipif(shutil.which("clang") is None, reason="DEV=CPU needs clang: apt-get install clang")
@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 4], ids=["random", "trained"])
@pytest.mark.parametrize("widths", ["8,16,32", "64,256,512"])
def test_speedy_conv_net_is_on_the_chip(tmp_path: Path, widths: str, steps: int) -> None:
    """Seven convolutions, three pools and the linear layer are chip programs, uploaded once, all resident; CPU's bytes.

    GELU stands between them, so they are eight programs and not one.
    """
    out = tmp_path / "scores.npz"
    env = {**os.environ, "MOCKCORAL": "1", "DEV": "CORAL", "NO_COLOR": "1"}
    command = [sys.executable, "-c", SPEEDY, str(out), widths, str(steps)]
    done = subprocess.run(command, cwd=EXAMPLES, env=env, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    found = np.load(out)
    np.testing.assert_array_equal(found["chip"], found["cpu"])
