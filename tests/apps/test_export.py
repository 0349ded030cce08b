"""Exported files: the judge computes the model's own bytes from them, and LiteRT reads and runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor, nn

import coral
from coral import numerics
from coral.apps.export import ExportError
from coral.evaluate import evaluate
from coral.package.graph import read_model

F = np.float32
RNG = np.random.default_rng(31)


def conv(*arguments: Any, **options: Any) -> nn.Conv2d:
    layer = nn.Conv2d(*arguments, **options)
    layer.weight = Tensor(F(RNG.normal(0, 0.3, layer.weight.shape))).realize()
    return layer


class Residual:
    """Strides, paddings that TFLite's SAME has and has not, depthwise, ReLU6, both pools, a sum, a mean."""

    def __init__(self) -> None:
        self.stem, self.one = conv(3, 8, 3, padding=1), conv(8, 8, 3, padding=1, groups=8)
        self.two, self.down = conv(8, 6, 3, stride=2, padding=1), conv(8, 6, 1, stride=2)
        self.head = nn.Linear(6, 5)

    def __call__(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu().max_pool2d(3, 2, padding=1)
        x = (self.two(self.one(x).relu6()) + self.down(x)).relu()
        return self.head(x.avg_pool2d(2).mean((2, 3)))


def flat() -> list[Any]:
    return [conv(1, 4, 3), Tensor.relu, Tensor.max_pool2d, lambda x: x.flatten(1), nn.Linear(4 * 4 * 3, 7)]


MODELS: list[tuple[Callable[[], Any], tuple[int, ...], bool]] = [
    (Residual, (3, 16, 16), False),
    (Residual, (3, 16, 16), True),
    (flat, (1, 10, 8), False),
    (flat, (1, 10, 8), True),
    (lambda: [nn.Linear(6, 5), Tensor.relu, nn.Linear(5, 4)], (6,), False),
]


def exported(number: int, folder: Path) -> tuple[Path, np.ndarray, np.ndarray, int]:
    """File, its input, the output that the quantised model computes, as the file's values; and what int8 has less."""
    make, shape, per_channel = MODELS[number]
    Tensor.manual_seed(number)
    model = make()
    x = F(np.random.default_rng(number).normal(0.2, 1, (4, *shape)))
    qmodel = coral.quantize(model, x, per_channel=per_channel)
    path = coral.export_tflite(qmodel, folder / "model.tflite", batch=4)
    graph = read_model(path).main
    first, last = graph.tensors[graph.inputs[0]], graph.tensors[graph.outputs[0]]
    offset = 128 if per_channel else 0
    assert first.dtype == last.dtype == (np.int8 if per_channel else np.uint8)
    real = (qmodel(Tensor(x)) if callable(qmodel) else Tensor(x).sequential(qmodel)).numpy()
    codes = [
        numerics.quantise(values, t.scale, t.zero_point + offset).astype(np.int16) - offset
        for values, t in ((x, first), (real, last))
    ]
    given = codes[0].transpose(0, 2, 3, 1) if len(shape) == 3 else codes[0]
    return path, given.astype(first.dtype), codes[1].astype(last.dtype), offset


SLOW = pytest.mark.slow


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3, 4])
def test_the_judge_computes_the_same_bytes(number: int, tmp_path: Path) -> None:
    path, x, y, _ = exported(number, tmp_path)
    (got,) = evaluate(path, {"input": x}).values()
    assert np.array_equal(got, y)
    litert: Any = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert: the file is NOT run by it")
    resolver = litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = litert.Interpreter(str(path), experimental_op_resolver_type=resolver)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], x)
    interpreter.invoke()
    theirs = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    difference = np.abs(theirs.astype(int) - y)
    assert difference.max() <= 3  # it rounds twice per layer, the differences of a few layers add up


def quantised(layers: list[Any], *shape: int, **options: Any) -> Any:
    return coral.quantize(layers, F(RNG.normal(0, 1, (4, *shape))), **options)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: [nn.Linear(3, 2)], "that coral.quantize made"),
        (lambda: quantised([nn.Linear(3, 2), Tensor.softmax], 3), "output is computed in float"),
        (lambda: quantised([nn.Linear(3, 2), Tensor.quick_gelu, nn.Linear(2, 2)], 3), "float code computes the input"),
        (lambda: quantised([conv(4, 4, 3, groups=2)], 4, 6, 6), "2 groups on 4 channels"),
        (
            lambda: [*quantised([nn.Linear(3, 3)], 3), *quantised([nn.Linear(3, 3)], 3, per_channel=True)],
            "per_channel=True or per_channel=False",
        ),
        (lambda: quantised([conv(1, 2, 3), lambda t: t.transpose(2, 3), conv(2, 1, 1)], 1, 6, 6), "permute"),
    ],
)
def test_what_has_no_form_is_named(model: Callable[[], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        coral.export_tflite(model(), tmp_path / "model.tflite")
    assert not (tmp_path / "model.tflite").exists()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"cannot write .*absent"):
        coral.export_tflite(quantised([nn.Linear(3, 2)], 3), tmp_path / "absent" / "model.tflite")
