"""A model as a graph of Python objects: which layers it holds, and copies of it with layers exchanged.

The user's model is never changed. A copy shares everything with it (tensors above all) except the containers on the
way to an exchanged layer: objects, lists, tuples, dicts, bound methods, ``functools.partial``, functions whose closure
holds a layer, and ``TinyJit`` wrappers, which start afresh. Source: docs/quantize.md, "Copies of the model".
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from tinygrad import nn
from tinygrad.engine.jit import _TinyJit
from tinygrad.tensor import Tensor
from tinygrad.uop.ops import UOp

from coral.quantize.expressions import QuantizeError
from coral.quantize.layers import QLayer

_OPAQUE = (Tensor, UOp, np.ndarray, type, types.ModuleType, types.BuiltinFunctionType, str, bytes, int, float, complex)


def _is_layer(item: Any) -> bool:
    return isinstance(item, (nn.Linear, nn.Conv2d, nn.BatchNorm, QLayer)) or type(item).__module__ == nn.__name__


def _children(item: Any) -> Iterator[tuple[Any, Any]]:
    """(key, child) of everything that item refers to and a copy of item would have to exchange."""
    if isinstance(item, _OPAQUE) or item is None or _is_layer(item):
        return
    if isinstance(item, (list, tuple)):
        yield from enumerate(item)
    elif isinstance(item, dict):
        yield from item.items()
    elif isinstance(item, types.FunctionType):
        for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # a variable that is not assigned yet
                continue
    elif isinstance(item, types.MethodType):
        yield "__self__", item.__self__
    elif isinstance(item, functools.partial):
        yield from (("func", item.func), *enumerate(item.args), *item.keywords.items())
    elif isinstance(item, _TinyJit):
        yield "fxn", item.fxn
    else:
        yield from getattr(item, "__dict__", {}).items()


class ModelGraph:
    """All objects reachable from a model.

    ``layers`` maps the dotted name under which a layer was found first (as ``nn.state.get_state_dict`` names it) to the
    layer: classes of ``tinygrad.nn`` or derived from its Linear, Conv2d or BatchNorm, and QLayers, each object once.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        self.layers: dict[str, Any] = {}
        self._items: dict[int, Any] = {}
        self._parents: dict[int, list[int]] = {}
        stack: list[tuple[str, Any]] = [("", root)]
        while stack:
            name, item = stack.pop()
            if id(item) in self._items:
                continue
            self._items[id(item)] = item
            if _is_layer(item):
                self.layers[name or "model"] = item
            found = [(key, child) for key, child in _children(item) if not isinstance(child, _OPAQUE)]
            for _, child in found:
                self._parents.setdefault(id(child), []).append(id(item))
            stack.extend((f"{name}.{key}".lstrip("."), child) for key, child in reversed(found))

    def substitute(self, replacements: Mapping[int, Any], *, keep_jits: bool = True) -> Any:
        """A copy of the root in which each object with ``id(object)`` in replacements is exchanged.

        :param keep_jits: False takes ``TinyJit`` wrappers around exchanged layers off, so that every call runs Python
        :raises QuantizeError: a class on the way has a ``TinyJit`` as a method: its capture belongs to all instances
        """
        dirty, stack = set(replacements), list(replacements)
        while stack:
            fresh = [parent for parent in self._parents.get(stack.pop(), ()) if parent not in dirty]
            dirty.update(fresh)
            stack.extend(fresh)
        return _Copier(dirty, dict(replacements), keep_jits)(self.root)


class _Copier:
    def __init__(self, dirty: set[int], memo: dict[int, Any], keep_jits: bool) -> None:
        self.dirty, self.memo, self.keep_jits = dirty, memo, keep_jits

    def __call__(self, item: Any) -> Any:
        if id(item) in self.memo:
            return self.memo[id(item)]
        if id(item) not in self.dirty:
            return item
        if isinstance(item, tuple):
            parts = [self(part) for part in item]
            result = item._make(parts) if hasattr(item, "_make") else type(item)(parts)  # type: ignore[attr-defined]
        elif isinstance(item, types.MethodType):
            result = types.MethodType(item.__func__, self(item.__self__))
        elif isinstance(item, functools.partial):
            keywords = {key: self(value) for key, value in item.keywords.items()}
            result = functools.partial(self(item.func), *map(self, item.args), **keywords)
        elif isinstance(item, _TinyJit):
            inner = self(item.fxn)
            result = _TinyJit(inner, prune=item.prune) if self.keep_jits else inner
        elif isinstance(item, types.FunctionType):
            return self._function(item)
        else:
            return self._container(item)
        self.memo[id(item)] = result
        return result

    def _function(self, item: types.FunctionType) -> types.FunctionType:
        cells = tuple(types.CellType() if self._holds_dirty(cell) else cell for cell in item.__closure__ or ())
        result = types.FunctionType(item.__code__, item.__globals__, item.__name__, item.__defaults__, cells)
        result.__kwdefaults__ = item.__kwdefaults__
        self.memo[id(item)] = result
        for old, new in zip(item.__closure__ or (), cells, strict=True):
            if new is not old:
                new.cell_contents = self(old.cell_contents)
        return result

    def _holds_dirty(self, cell: types.CellType) -> bool:
        try:
            return id(cell.cell_contents) in self.dirty
        except ValueError:
            return False

    def _container(self, item: Any) -> Any:
        for base in type(item).__mro__:
            for name, member in vars(base).items():
                if isinstance(member, _TinyJit):
                    raise QuantizeError(
                        f"{type(item).__name__}.{name} is decorated with TinyJit: its captured kernels belong to every "
                        f"instance of the class. Wrap the quantised model instead: TinyJit(qmodel)"
                    )
        result = self.memo[id(item)] = copy.copy(item)
        target = result if isinstance(item, (list, dict)) else vars(result)
        for key, child in _children(item):
            if id(child) in self.dirty:
                target[key] = self(child)
        return result
