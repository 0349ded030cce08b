"""TFLite graphs of the corpus as networks; just enough for the models that the tests use."""

from __future__ import annotations

import numpy as np

from coral import numerics
from coral.codegen import network as nw
from coral.evaluate.operands import CODE_OFFSETS, Operand
from coral.evaluate.products import channel_quantisation
from coral.package.graph import Graph, Operator

SKIPPED = {"RESHAPE", "SQUEEZE", "SOFTMAX", "QUANTIZE"}


class Importer:
    """Builds a network from the operators between the tensors ``first`` and ``last`` (by number)."""

    def __init__(self, graph: Graph, first: int, last: int) -> None:
        self.graph, self.tensors, self.stages = graph, {}, []
        self.alias: dict[int, str] = {}
        self.tensor(first)
        for op in graph.operators:
            if self.alias.keys() & set(op.inputs):
                self.operator(op)
            if last in op.outputs:
                break
        self.network = nw.Network(
            graph.name or "model", self.tensors, (self.alias[first],), tuple(self.stages), (self.alias[last],)
        )

    def tensor(self, number: int) -> str:
        if number not in self.alias:
            t = self.graph.tensors[number]
            _, y, x, c = [*(1,) * (4 - len(t.shape)), *t.shape]
            self.alias[number] = t.name
            self.tensors[t.name] = nw.Tensor(t.name, y, x, c, t.zero_point + CODE_OFFSETS[t.dtype], t.scale)
        return self.alias[number]

    def operator(self, op: Operator) -> None:
        if op.name in SKIPPED:
            self.alias[op.outputs[0]] = self.alias[op.inputs[0]]
            return
        x, y = self.tensor(op.inputs[0]), self.tensor(op.outputs[0])
        a, o = self.tensors[x], self.tensors[y]
        act = op.options.get("fused_activation_function", "NONE")
        clamps = numerics.clamps(o.scale, o.zero_point, act)
        if op.name in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"):
            self.stages.append(self.layer(op, x, y, clamps))
        elif op.name in ("AVERAGE_POOL_2D", "MEAN"):
            kernel = (a.y, a.x) if op.name == "MEAN" else (op.options["filter_height"], op.options["filter_width"])
            stride = (1, 1) if op.name == "MEAN" else (op.options["stride_h"], op.options["stride_w"])
            mult = float(numerics.average_multiplier(a.scale, kernel[0] * kernel[1], o.scale, newer=True))
            self.stages.append(nw.AveragePool((x,), y, clamps, mult, nw.Window(kernel, stride)))
        elif op.name in ("ADD", "SUB"):
            b = self.tensor(op.inputs[1])
            w = numerics.add_weights(a.scale, self.tensors[b].scale)
            mult = float(numerics.add_multiplier(a.scale, w[0], o.scale))
            w = (w[0], -w[1]) if op.name == "SUB" else w
            offset = -(w[0] * a.zero_point + w[1] * self.tensors[b].zero_point)
            self.stages.append(nw.Add((x, b), y, clamps, w, offset, mult))
        else:
            raise NotImplementedError(op.name)

    def layer(self, op: Operator, x: str, y: str, clamps: tuple[float, float]) -> nw.Stage:
        a, o = self.tensors[x], self.tensors[y]
        depthwise = op.name == "DEPTHWISE_CONV_2D"
        t = self.graph.tensors[op.inputs[1]]
        w = Operand(t, t.data)
        scales, zeros = channel_quantisation(w, 3 if depthwise else 0)
        mult = numerics.multiplier(a.scale, scales, o.scale)
        mult = mult if np.ndim(mult) else float(mult)
        w_zp = int(np.unique(zeros)[0])
        bias = self.graph.tensors[op.inputs[2]].data if len(op.inputs) > 2 and op.inputs[2] >= 0 else None
        if op.name == "FULLY_CONNECTED":
            return nw.Dense((x,), y, clamps, w.codes, bias, w_zp, mult)
        kernel, stride = w.array.shape[1:3], (op.options["stride_h"], op.options["stride_w"])
        dilation = (op.options.get("dilation_h_factor", 1), op.options.get("dilation_w_factor", 1))
        same = op.options["padding"] == "SAME"
        window = nw.Window(kernel, stride, dilation=dilation)
        window = nw.same((a.y, a.x), kernel, stride, dilation) if same else window
        codes = w.codes
        if depthwise:
            if codes.shape[3] == a.c:
                return nw.Depthwise((x,), y, clamps, codes[0], bias, w_zp, mult, window)
            assert a.c == 1
            codes = codes.transpose(3, 1, 2, 0)
        return nw.Conv((x,), y, clamps, codes, bias, w_zp, mult, window)


def body(graph: Graph) -> tuple[nw.Network, int, int]:
    """Network from the graph's input to its output, or to what SOFTMAX reads; numbers of both tensors."""
    last = next((op.inputs[0] for op in graph.operators if op.name == "SOFTMAX"), graph.outputs[0])
    first = graph.inputs[0]
    return Importer(graph, first, last).network, first, last
