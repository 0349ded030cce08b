"""Finding layers in any model and exchanging them in a copy; no tensor is computed here."""

from __future__ import annotations

import functools
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
from tinygrad import Tensor, TinyJit, nn

from coral.quantize.expressions import QuantizeError
from coral.quantize.model_graph import ModelGraph

Pair = namedtuple("Pair", "left right")


class Block:
    def __init__(self) -> None:
        self.fc = nn.Linear(2, 2)

    def forward(self, x: str) -> str:
        return self.fc(x)  # type: ignore[arg-type, return-value]


class Everything:
    def __init__(self) -> None:
        self.direct = nn.Linear(2, 2)
        self.blocks = [Block(), Tensor.relu, Block()]
        self.table = {"head": Block().forward, 3: (Block(), "text")}
        self.pair = Pair(Block(), 7)
        inner = Block()
        self.closure = lambda x: inner.fc(x)
        self.partial = functools.partial(lambda layer, x: layer(x), nn.Linear(2, 2))
        self.jit = TinyJit(Block().forward)
        self.parent = self
        self.norm = nn.BatchNorm(2)
        self.unrelated = {"a": [1, 2]}


NAMES = [
    "direct", "blocks.0.fc", "blocks.2.fc", "table.head.__self__.fc", "table.3.0.fc", "pair.0.fc", "closure.inner.fc",
    "partial.0", "jit.fxn.__self__.fc", "norm",
]  # fmt: skip


def test_every_place_is_found_in_order() -> None:
    assert list(ModelGraph(Everything()).layers) == NAMES


def test_copies_exchange_layers_everywhere_and_share_the_rest() -> None:
    model = Everything()
    graph = ModelGraph(model)
    before = {name: id(layer) for name, layer in graph.layers.items()}
    new = graph.substitute({id(layer): (lambda x, name=name: f"{name}({x})") for name, layer in graph.layers.items()})
    assert new.direct("x") == "direct(x)"
    assert new.blocks[0].fc("x") == "blocks.0.fc(x)"
    assert new.blocks[1] is Tensor.relu
    assert new.table["head"]("x") == "table.head.__self__.fc(x)"
    assert new.table[3][0].fc("x") == "table.3.0.fc(x)"
    assert new.table[3][1] == "text"
    assert type(new.pair) is Pair
    assert new.pair.left.fc("x") == "pair.0.fc(x)"
    assert new.pair.right == 7
    assert new.closure("x") == "closure.inner.fc(x)"
    assert new.partial("x") == "partial.0(x)"
    assert type(new.jit) is type(model.jit)
    assert new.jit.fxn("x") == "jit.fxn.__self__.fc(x)"
    assert new.parent is new
    assert new.unrelated is model.unrelated
    assert {name: id(layer) for name, layer in ModelGraph(model).layers.items()} == before


def test_jits_come_off_on_request_and_only_where_a_layer_is_exchanged() -> None:
    model = Everything()
    other = model.other = TinyJit(lambda x: x)  # type: ignore[attr-defined]
    graph = ModelGraph(model)
    new = graph.substitute({id(graph.layers["jit.fxn.__self__.fc"]): str.upper}, keep_jits=False)
    assert new.jit("x") == "X"
    assert new.other is other
    assert new.blocks is model.blocks


def test_one_layer_under_two_names_is_one_layer() -> None:
    shared = nn.Linear(2, 2)
    graph = ModelGraph([shared, {"again": shared}])
    assert list(graph.layers) == ["0"]
    new = graph.substitute({id(shared): "new"})
    assert new == ["new", {"again": "new"}]


def test_a_layer_can_be_the_model() -> None:
    layer = nn.Linear(2, 2)
    graph = ModelGraph(layer)
    assert list(graph.layers) == ["model"]
    assert graph.substitute({id(layer): "new"}) == "new"


def test_recursive_closures_and_unassigned_variables() -> None:
    layer = nn.Linear(2, 2)

    def outer() -> Any:
        def countdown(n: int) -> Any:
            return layer("end") if n == 0 else countdown(n - 1)  # type: ignore[arg-type]

        def uses_later() -> Any:
            return later

        result = countdown, uses_later
        if len(result) > 2:
            later = 1
        return result

    functions = outer()
    new = ModelGraph(functions).substitute({id(layer): str.upper})
    assert new[0](3) == "END"
    assert new[1] is functions[1]


@dataclass(frozen=True)
class Frozen:
    fc: Any


def test_frozen_dataclasses() -> None:
    layer = nn.Linear(2, 2)
    assert ModelGraph(Frozen(layer)).substitute({id(layer): "new"}) == Frozen("new")


class Jitted:
    def __init__(self) -> None:
        self.fc = nn.Linear(2, 2)

    @TinyJit
    def __call__(self, x: Tensor) -> Tensor:
        return self.fc(x)


def test_a_jit_of_the_class_is_refused() -> None:
    model = Jitted()
    with pytest.raises(QuantizeError, match=r"Jitted\.__call__ is decorated with TinyJit.*TinyJit\(qmodel\)"):
        ModelGraph([model]).substitute({id(model.fc): "new"})
