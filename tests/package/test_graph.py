"""The graph reader: against the accessors of the tflite package, and figures of known models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tflite

from coral.package import PackageError
from coral.package.graph import read_model
from coral.package.tflite_file import read_edgetpu


def models(corpus: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(corpus.rglob("*.tflite"))}


def test_every_model_equals_what_the_tflite_package_reads(corpus: Path) -> None:
    files = models(corpus)
    assert len(files) == 36
    for path in files.values():
        model, data = read_model(path), path.read_bytes()
        other = tflite.Model.GetRootAs(data, 0)
        assert (len(model.graphs), model.version) == (other.SubgraphsLength(), other.Version())
        for graph, reference in zip(model.graphs, map(other.Subgraphs, range(other.SubgraphsLength())), strict=True):
            assert graph.inputs == tuple(reference.InputsAsNumpy())
            assert graph.outputs == tuple(reference.OutputsAsNumpy())
            assert len(graph.tensors) == reference.TensorsLength()
            assert len(graph.operators) == reference.OperatorsLength()
            for index, tensor in enumerate(graph.tensors):
                expected = reference.Tensors(index)
                quantization = expected.Quantization()
                assert tensor.name == expected.Name().decode()
                assert tensor.shape == tuple(expected.Shape(i) for i in range(expected.ShapeLength()))
                assert tensor.type == expected.Type()
                if quantization and quantization.ScaleLength():
                    assert tensor.scales.tobytes() == quantization.ScaleAsNumpy().tobytes()
                    assert tensor.zero_points.tolist() == quantization.ZeroPointAsNumpy().tolist()
                    assert tensor.quantized_dimension == quantization.QuantizedDimension()
                else:
                    assert len(tensor.scales) == 0
                buffer = other.Buffers(expected.Buffer())
                if buffer.DataLength():
                    assert tensor.data is not None
                    assert tensor.data.tobytes() == buffer.DataAsNumpy().tobytes()
                    assert tensor.data.shape == tensor.shape
                else:
                    assert tensor.data is None
            for index, operator in enumerate(graph.operators):
                expected = reference.Operators(index)
                code = other.OperatorCodes(expected.OpcodeIndex())
                number = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
                assert operator.name == (code.CustomCode().decode() if number == 32 else tflite.opcode2name(number))
                assert list(operator.inputs) == [expected.Inputs(i) for i in range(expected.InputsLength())]
                assert list(operator.outputs) == [expected.Outputs(i) for i in range(expected.OutputsLength())]


def test_fully_connected_of_the_dense_models(corpus: Path) -> None:
    for n in (256, 512, 1024):
        graph = read_model(corpus / "dense" / f"dense_{n}.tflite").main
        assert [operator.name for operator in graph.operators] == ["QUANTIZE", "FULLY_CONNECTED", "QUANTIZE"]
        layer = graph.operators[1]
        assert layer.options["fused_activation_function"] == "NONE"
        assert layer.options["keep_num_dims"] is False
        weights = graph.tensors[layer.inputs[1]]
        assert (weights.shape, weights.dtype, weights.quantized_dimension) == ((n, n), np.dtype("int8"), 0)
        assert weights.data is not None
        assert weights.data.shape == (n, n)
        assert not weights.data.flags.writeable
        assert graph.tensors[graph.inputs[0]].dtype == np.dtype("uint8")


def test_options_of_a_convolutional_network(corpus: Path) -> None:
    graph = read_model(corpus / "vision" / "mobilenet_v1_0.25_128_quant.tflite").main
    names = [operator.name for operator in graph.operators]
    assert (names.count("CONV_2D"), names.count("DEPTHWISE_CONV_2D")) == (15, 13)
    first = graph.operators[0].options
    assert (first["padding"], first["stride_w"], first["stride_h"]) == ("SAME", 2, 2)
    assert first["fused_activation_function"] == "RELU6"
    assert (first["dilation_w_factor"], first["dilation_h_factor"]) == (1, 1)
    weights = graph.tensors[graph.operators[0].inputs[1]]
    assert weights.shape == (8, 3, 3, 3)
    assert weights.scale > 0
    assert 0 <= weights.zero_point <= 255


def test_vector_options_and_intermediates(corpus: Path) -> None:
    graph = read_model(corpus / "vision" / "mobilenet_v2_1.0_224_quant_legacy.tflite").main
    (reshape,) = [operator for operator in graph.operators if operator.name == "RESHAPE"]
    assert reshape.options == {"new_shape": (1, 1001)}
    graph = read_model(corpus / "vision" / "movenet_single_pose_lightning_ptq_edgetpu.tflite").main
    reshapes = [operator for operator in graph.operators if operator.name == "RESHAPE"]
    assert [operator.options for operator in reshapes] == [{"new_shape": ()}] * 11
    graph = read_model(corpus / "sequence" / "keras_lstm_mnist_ptq.tflite").main
    (lstm,) = [operator for operator in graph.operators if operator.name == "UNIDIRECTIONAL_SEQUENCE_LSTM"]
    assert -1 in lstm.inputs
    assert lstm.options["fused_activation_function"] == "TANH"
    assert len(lstm.intermediates) == 5


def test_per_channel_tensors_have_no_single_scale(corpus: Path) -> None:
    graph = read_model(corpus / "vision" / "movenet_single_pose_lightning_ptq.tflite").main
    convolution = next(operator for operator in graph.operators if operator.name == "CONV_2D")
    weights = graph.tensors[convolution.inputs[1]]
    assert len(weights.scales) == weights.shape[weights.quantized_dimension] > 1
    with pytest.raises(PackageError, match=f"has {len(weights.scales)} scales or zero points, needed is one"):
        _ = weights.scale


def test_layers_equal_the_tensors_of_their_operator(corpus: Path) -> None:
    """Same scale; the layer's zero point is TFLite's + 128 for int8, + 32768 for int16; names and sizes agree."""
    offsets = {"uint8": 0, "int8": 128, "int16": 32768}
    counted = dict.fromkeys(offsets, 0)
    for path in corpus.rglob("*_edgetpu.tflite"):
        compiled = read_edgetpu(path)
        program, operator = compiled.package.execution, compiled.graph.operators[compiled.operator]
        outputs = [layer for layer in program.outputs if not layer.name.endswith("_variable_output")]
        ends = list(zip((*program.inputs, *outputs), (*operator.inputs, *operator.outputs), strict=True))
        for layer, index in ends:
            tensor = compiled.graph.tensors[index]
            assert layer.name == tensor.name
            assert np.float32(layer.scale) == np.float32(tensor.scale)
            assert tensor.dtype is not None
            assert layer.zero_point == tensor.zero_point + offsets[tensor.dtype.name]
            assert layer.y * layer.x * layer.z == np.prod(tensor.shape)
            assert layer.dtype.itemsize == tensor.dtype.itemsize
            counted[tensor.dtype.name] += 1
    assert counted == {"uint8": 41, "int8": 9, "int16": 1}


def test_host_operators_around_the_compiled_part(corpus: Path) -> None:
    compiled = read_edgetpu(corpus / "vision" / "deeplabv3_mnv2_dm05_pascal_quant_edgetpu.tflite")
    names = [operator.name for operator in compiled.graph.operators]
    assert (compiled.operator, names[0]) == (0, "edgetpu-custom-op")
    assert names[1:] == [
        "RESIZE_BILINEAR", "QUANTIZE", "CONCATENATION", "CONV_2D", "CONV_2D", "RESIZE_BILINEAR", "RESIZE_BILINEAR",
        "ARG_MAX",
    ]  # fmt: skip


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"cannot read .*nope\.tflite: No such file"):
        read_model(tmp_path / "nope.tflite")
    (tmp_path / "text.tflite").write_text("hello, this is no model")
    with pytest.raises(PackageError, match=r"text\.tflite: Model: identifier is b'o, t'"):
        read_model(tmp_path / "text.tflite")
