"""coral.quantize against a network written in NumPy from the published formulas, and its promises to the user."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tinygrad import Device, Tensor, TinyJit, nn
from tinygrad.helpers import Context, GlobalCounters

import coral
from coral.quantize import layers
from coral.quantize.balance import balance
from coral.quantize.expressions import QuantizeError
from coral.quantize.layers import QLinear, Quant
from coral.quantize.model_graph import ModelGraph

F = np.float32


class Numbers:
    """Scale and zero point of a range, in NumPy only."""

    def __init__(self, lo: float, hi: float) -> None:
        lo, hi = min(lo, 0.0), max(hi, 0.0)
        self.s = F((hi - lo) / 255)
        self.z = int(np.rint(-lo / float(self.s)))

    @classmethod
    def of(cls, *arrays: np.ndarray) -> Numbers:
        return cls(float(min(a.min() for a in arrays)), float(max(a.max() for a in arrays)))

    def codes(self, x: np.ndarray) -> np.ndarray:
        return (np.rint(np.clip(x * (F(1) / self.s), F(-self.z), F(255 - self.z))) + self.z).astype(np.uint8)

    def reals(self, codes: np.ndarray) -> np.ndarray:
        return (codes.astype(F) - F(self.z)) * self.s


def numpy_linear(codes: np.ndarray, layer: nn.Linear, x: Numbers, y: Numbers) -> np.ndarray:
    weight = layer.weight.numpy()
    w = Numbers.of(weight)
    acc = (codes.astype(np.int64) - x.z) @ (w.codes(weight).astype(np.int64) - w.z).T
    if layer.bias is not None:
        acc = acc + np.rint(layer.bias.numpy().astype(np.float64) / float(F(x.s * w.s))).astype(np.int64)
    steps = acc.astype(F) * F(F(x.s * w.s) * (F(1) / y.s))
    return (np.rint(np.clip(steps, F(-y.z), F(255 - y.z))) + y.z).astype(np.uint8)


def real(t: Tensor) -> np.ndarray:
    """As calibration does: every layer's result in a buffer of its own."""
    return t.contiguous().realize().numpy()


def linear(n_in: int, n_out: int, seed: int, bias: bool = True) -> nn.Linear:
    layer, rng = nn.Linear(n_in, n_out, bias=bias), np.random.default_rng(seed)
    layer.weight = Tensor(F(rng.normal(0, 0.5, (n_out, n_in))))
    if bias:
        layer.bias = Tensor(F(rng.normal(0, 0.5, n_out)))
    return layer


def inputs(*shape: int, seed: int = 0) -> Tensor:
    return Tensor(F(np.random.default_rng(seed).normal(0.3, 1, shape))).realize()


class Mlp:
    def __init__(self) -> None:
        self.l1, self.l2, self.l3 = linear(12, 8, 1), linear(8, 6, 2, bias=False), linear(6, 4, 3)
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        return self.l3(self.l2(self.l1(x.flatten(1)).relu()).maximum(0))


def numpy_mlp(model: Mlp, calibration: Tensor, x: np.ndarray) -> np.ndarray:
    """Linked layers share the range of the rectified values between them."""
    x0 = calibration.flatten(1)
    y1 = real(model.l1(x0.contiguous().realize()))
    y2 = real(model.l2(Tensor(np.maximum(y1, 0))))
    y3 = real(model.l3(Tensor(np.maximum(y2, 0))))
    q0, q1, q2, q3 = Numbers.of(x0.numpy()), Numbers(0, float(y1.max())), Numbers(0, float(y2.max())), Numbers.of(y3)
    codes = numpy_linear(q0.codes(x), model.l1, q0, q1)
    codes = numpy_linear(codes, model.l2, q1, q2)
    return q3.reals(numpy_linear(codes, model.l3, q2, q3))


def test_a_network_equals_the_numpy_network() -> None:
    model, calibration = Mlp(), inputs(64, 3, 4)
    before = [model.l1, model.l2, model.l3]
    qmodel = coral.quantize(model, calibration)
    even = balance(ModelGraph(model), [(calibration,)])[0].root
    assert np.array_equal(even(calibration).numpy(), model(calibration).numpy())
    assert [model.l1, model.l2, model.l3] == before
    assert isinstance(qmodel, Mlp)
    assert [type(layer) for layer in (qmodel.l1, qmodel.l2, qmodel.l3)] == [QLinear] * 3
    for batch in (1, 9):
        x = inputs(batch, 3, 4, seed=batch)
        expected = numpy_mlp(even, calibration, x.numpy().reshape(batch, 12))
        GlobalCounters.reset()
        got = qmodel(x).realize()
        assert GlobalCounters.kernel_count == 5  # quantise, three layers with nothing between them, dequantise
        assert np.array_equal(got.numpy(), expected)
        assert np.abs(got.numpy() - model(x).numpy()).max() < 0.05 * np.abs(expected).max()


def test_the_way_without_links_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Mlp(), inputs(5, 12, seed=4)
    qmodel = coral.quantize(model, inputs(64, 12))
    linked = qmodel(x).numpy()
    monkeypatch.setattr(layers, "codes_behind", lambda *_: None)
    assert np.array_equal(qmodel(x).numpy(), linked)
    realised = qmodel.l3(qmodel.l2(qmodel.l1(x).relu().realize()).relu().realize())
    assert np.array_equal(realised.numpy(), linked)


@pytest.mark.parametrize("device", list(dict.fromkeys([Device.DEFAULT, "PYTHON"])))
def test_every_device_gives_the_reference(device: str) -> None:
    layer = linear(12, 5, 6)
    q = QLinear.from_float(
        layer.weight.numpy(), layer.bias.numpy(), Quant.of_range(-1, 2), Quant.of_range(-3, 4), device=device
    )
    x = inputs(2, 3, 12, seed=8).numpy()
    got = q(Tensor(x, device=device))
    assert got.shape == (2, 3, 5)
    assert np.array_equal(got.numpy(), q.reference(x))
    expected = numpy_linear(Numbers(-1, 2).codes(x), layer, Numbers(-1, 2), Numbers(-3, 4))
    assert np.array_equal(got.numpy(), Numbers(-3, 4).reals(expected))


@pytest.mark.parametrize("shape", [(12,), (1, 12), (2, 2, 2, 12), (0, 12)])
def test_inputs_of_any_rank(shape: tuple[int, ...]) -> None:
    layer = linear(12, 5, 6)
    q = coral.quantize(layer, inputs(16, 12))
    x = inputs(*shape)
    assert q(x).shape == (*shape[:-1], 5)
    assert np.array_equal(q(x).numpy(), q.reference(x.numpy()).reshape(*shape[:-1], 5))


def test_wrong_width_is_refused_instead_of_reshaped() -> None:
    q = coral.quantize(linear(4, 5, 6), inputs(16, 4))
    with pytest.raises(QuantizeError, match=r"\[\.\.\., 4\], not \(2, 8\)"):
        q(inputs(2, 8))


def test_lists_of_layers_and_functions() -> None:
    stack = [linear(12, 8, 1), Tensor.relu, linear(8, 4, 2)]
    x = inputs(32, 12)
    qstack = coral.quantize(stack, x)
    assert isinstance(qstack, list)
    expected = x.sequential(qstack).numpy()
    forms: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.sequential(stack),
        TinyJit(lambda x: x.sequential(stack).realize()),
        functools.partial(lambda layers, x: x.sequential(layers), stack),
    ]
    for form in forms:
        qform = coral.quantize(form, x)
        for _ in range(3):
            assert np.array_equal(qform(x).numpy(), expected)
    assert np.abs(forms[1](x).numpy() - expected).max() < 0.1


class Repeated:
    def __init__(self) -> None:
        self.fc = linear(6, 6, 1)

    def __call__(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x) * 10) - self.fc(x)


def test_ranges_of_all_calls_and_batches_are_merged() -> None:
    batches = [inputs(8, 6, seed=s) for s in range(3)]
    model = Repeated()
    seen = [real(x) for b in batches for x in (b, model.fc(b).contiguous().realize() * 10)]
    outs = [real(model.fc(Tensor(x))) for x in seen]
    for calibration in (batches, iter(batches), [(b,) for b in batches], [b.numpy() for b in batches]):
        quant = coral.quantize(model, calibration).fc.quant
        for got, expected in ((quant.x, Numbers.of(*seen)), (quant.y, Numbers.of(*outs))):
            assert (got.scale, got.zero_point) == (float(expected.s), expected.z)


class Residual:
    def __init__(self) -> None:
        self.l1, self.l2 = linear(6, 6, 1), linear(6, 6, 2)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.l1(x)
        return self.l2(y.relu()) + y


class Realised(Residual):
    def __call__(self, x: Tensor) -> Tensor:
        y = self.l1(x)
        other = (y * 2).realize()
        return self.l2(y.relu()) + other


class ArgMax(Residual):
    def __call__(self, x: Tensor) -> Tensor:
        return self.l2(self.l1(x).relu()).argmax(1)


class TwoReaders(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.l3 = linear(6, 6, 3)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.l1(x)
        return self.l2(y.relu()) + self.l3(y)


@pytest.mark.parametrize(
    ("kind", "merged"), [(Residual, set()), (Realised, set()), (ArgMax, {"l1"}), (TwoReaders, set())]
)
def test_relu_is_merged_only_where_nothing_else_reads_the_layer(kind: type[Residual], merged: set[str]) -> None:
    model, x = kind(), inputs(64, 6)
    qmodel, report = coral.quantize(model, x, report=True)
    assert {layer.name for layer in report.layers if layer.quant is not None and layer.quant.relu} == merged
    if kind is not ArgMax:
        assert np.abs(qmodel(x).numpy() - model(x).numpy()).max() < 0.15
    lowest = qmodel.l1.quant.y
    assert (lowest.zero_point == 0) == (merged == {"l1"})


def test_a_merged_relu_with_a_shared_range_below_zero() -> None:
    """l2 reads l1 through ReLU and the model's input directly: one range for both, l1 clamped at its zero point."""

    class Model(Residual):
        def __call__(self, x: Tensor) -> Tensor:
            return self.l2(self.l1(x).relu()) + self.l2(x)

    model, x = Model(), inputs(32, 6)
    qmodel = coral.quantize(model, x)
    assert qmodel.l1.quant.relu
    assert qmodel.l1.quant.y == qmodel.l2.quant.x
    assert qmodel.l1.quant.lo == qmodel.l1.quant.y.zero_point > 0
    y1 = qmodel.l1.reference(x.numpy())
    assert y1.min() == 0
    expected = qmodel.l2.reference(y1) + qmodel.l2.reference(x.numpy())
    assert np.array_equal(qmodel(x).numpy(), expected)


def test_jits_inside_the_model_start_afresh() -> None:
    class Model(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.forward = TinyJit(self.plain)

        def plain(self, x: Tensor) -> Tensor:
            return self.l2(self.l1(x).relu()).realize()

        def __call__(self, x: Tensor) -> Tensor:
            return self.forward(x)

    model, x = Model(), inputs(4, 6)
    floats = [model(x).numpy() for _ in range(3)]
    assert model.forward.captured is not None
    qmodel = coral.quantize(model, x)
    expected = qmodel.l2.reference(qmodel.l1.reference(x.numpy()))
    for seed in range(4):
        assert np.array_equal(qmodel(x).numpy(), expected), seed
    assert qmodel.forward.captured is not None
    assert np.array_equal(model(x).numpy(), floats[0])


class Mixed:
    """Everything that must stay float, next to one layer that becomes uint8."""

    def __init__(self) -> None:
        self.good, self.unused, self.read = linear(6, 6, 1), linear(6, 6, 2), linear(6, 6, 3)
        self.norm, self.conv = nn.LayerNorm(6), nn.Conv1d(1, 1, 1)
        self.subclass = type("Doubled", (nn.Linear,), {"__call__": lambda s, x: x.linear(s.weight.T * 2)})(6, 6)
        self.biased = linear(6, 6, 4)
        self.biased.bias = Tensor(np.full(6, 1e7, F))

    def __call__(self, x: Tensor) -> Tensor:
        x = self.norm(self.good(x))
        x = self.conv(x.reshape(-1, 1, 6)).reshape(-1, 6)
        x = x.linear(self.read.weight.T) + self.read(x) + self.subclass(x)
        return self.biased(x * 1e-3)


def test_what_cannot_be_uint8_stays_float_and_is_listed_with_the_reason() -> None:
    model, x = Mixed(), inputs(16, 6)
    qmodel, report = coral.quantize(model, x, report=True)
    reasons = {layer.name: layer.reason for layer in report.layers if layer.place == "host"}
    assert reasons == {
        "unused": "not called with data by the calibration inputs",
        "read": "the model reads its attribute 'weight' itself",
        "norm": "no uint8 form of LayerNorm",
        "conv": "no uint8 form of a convolution with weights of 3 dimensions",
        "subclass": "Doubled computes something else than nn.Linear",
        "biased": reasons["biased"],
    }
    assert "does not fit int32" in reasons["biased"] or "can overflow int32" in reasons["biased"]
    assert [layer.name for layer in report.layers if layer.place == "chip"] == ["good"]
    cost = {layer.name: layer.seconds for layer in report.layers}
    assert cost["good"] == cost["unused"] == 0
    assert cost["conv"] == pytest.approx(20e-6 + (8 * 16 * 6 + 2 * 16 * 6) / 3e9)
    assert cost["biased"] == pytest.approx(20e-6 + (8 * 16 * 6 + 2 * 16 * 6 * 6) / 3e9)
    assert min(cost["norm"], cost["read"], cost["subclass"]) >= 20e-6
    assert re.search(r"norm +LayerNorm +host .* 20 µs +no uint8 form of LayerNorm", str(report))
    assert isinstance(qmodel.good, QLinear)
    assert qmodel.biased is model.biased
    assert np.isfinite(qmodel(x).numpy()).all()


def test_report() -> None:
    model, x = Mlp(), inputs(64, 12)
    qmodel, report = coral.quantize(model, x, report=True)
    l1, l2, l3 = report.layers
    assert [layer.name for layer in report.layers] == ["l1", "l2", "l3"]
    assert l1.reason == "ReLU merged"
    assert l2.reason == "ReLU merged, takes the codes of l1, channels balanced"
    assert l3.reason == "takes the codes of l2, channels balanced"
    y1 = real(model.l1(x))
    assert l1.input_range == (x.numpy().min(), x.numpy().max())
    assert l1.output_range == (0, y1.max())
    assert l1.calls == 1
    assert l1.error is not None
    difference = qmodel.l1(x).numpy().astype(float) - np.maximum(y1, 0)
    assert l1.error.largest == pytest.approx(np.abs(difference).max())
    assert l1.error.rms == pytest.approx(np.sqrt(np.mean(difference**2)))
    whole = qmodel(x).numpy().astype(float) - model(x).numpy()
    assert report.error.largest == pytest.approx(np.abs(whole).max(), rel=1e-4)
    text = str(report)
    assert len(text.splitlines()) == 5
    assert "takes the codes of l2" in text
    assert text.splitlines()[-1].startswith("model output: rms ")


def test_calibration_runs_in_inference_mode() -> None:
    stack = [lambda x: x.dropout(0.9), linear(6, 6, 1)]
    x = inputs(8, 6)
    with Context(TRAINING=1):
        quant = coral.quantize(stack, x)[1].quant
    expected = Numbers.of(x.numpy())
    assert (quant.x.scale, quant.x.zero_point) == (float(expected.s), expected.z)


def test_models_with_several_inputs_and_outputs() -> None:
    class Model(Residual):
        def __call__(self, a: Tensor, b: Tensor) -> dict[str, Any]:
            return {"sum": [self.l1(a)], "other": (self.l2(b), None), "n": 3}

    a, b = inputs(4, 6), inputs(5, 6, seed=9)
    qmodel, report = coral.quantize(Model(), [(a, b.numpy())], report=True)
    assert qmodel(a, b)["sum"][0].shape == (4, 6)
    assert report.error.rms > 0


def batches() -> Iterator[Tensor]:
    yield from ()


NAN = np.full((2, 6), np.nan, F)
HUGE = [linear(6, 2, 1)]
HUGE[0].weight = Tensor(np.full((2, 6), 9, F))


@pytest.mark.parametrize(
    ("model", "calibration", "message"),
    [
        (lambda: linear(6, 2, 1), [], "at least one input"),
        (lambda: linear(6, 2, 1), batches(), "at least one input"),
        (lambda: linear(6, 2, 1), "digits", "not str"),
        (lambda: linear(6, 2, 1), 3, "not int"),
        (lambda: linear(6, 2, 1), [[1.0] * 6], "input is list"),
        (lambda: linear(6, 2, 1), np.array(["a"]), "numeric"),
        (lambda: linear(6, 2, 1), NAN, "layer 'model' an input that is infinite or not a number"),
        (lambda: HUGE, np.full((2, 6), 3e38, F), "'0' an output"),
        (lambda: linear(6, 2, 1), np.zeros((0, 6), F), "not called with data"),
        (lambda: Tensor.relu, np.zeros((2, 6), F), "no layer of tinygrad.nn"),
        (lambda: [nn.LayerNorm(6)], np.zeros((2, 6), F), "0: no uint8 form of LayerNorm"),
        (lambda: {"a": linear(6, 2, 1)}, np.zeros((2, 6), F), "neither be called nor is it a list"),
        (lambda: linear(33026, 1, 1), np.ones((1, 33026), F), "K = 33026"),
        (
            lambda: functools.partial(lambda layer, x: [layer(x), 0][1], HUGE[0]),
            np.ones((1, 6), F),
            "returned no Tensor",
        ),
    ],
)
def test_errors(model: Callable[[], Any], calibration: Any, message: str) -> None:
    with pytest.raises(QuantizeError, match=message):
        coral.quantize(model(), calibration)


def test_quantising_twice_is_refused() -> None:
    qmodel = coral.quantize(Mlp(), inputs(8, 12))
    with pytest.raises(QuantizeError, match="'l1' is quantised already"):
        coral.quantize(qmodel, inputs(8, 12))


def test_the_public_name_is_callable_before_and_after_its_package_is_imported() -> None:
    assert callable(coral.quantize)
    api = importlib.import_module("coral.quantize.api")
    assert callable(coral.quantize)
    assert coral.quantize(Mlp(), inputs(4, 12)).l1.quant == api.quantize(Mlp(), inputs(4, 12)).l1.quant
