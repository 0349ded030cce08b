"""Layer by layer: the network generator's instructions and parameters beside Google's, as tables for docs/network.md.

python tools/layer_identity.py ../shared/corpus [--layers] [name ...]

A layer's instructions are those from behind the last op of the layer before to its own last op: fences, halo, ring and
FIFO of its weights, ops. Ops are told apart by zero points and multiplier, which both sides must have exactly.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np

from coral import isa
from coral.codegen import network as nw
from coral.codegen.machine import WORD_BYTES, round_up
from coral.compiler import compile_models
from coral.package.program import Kind
from coral.package.tflite_file import read_edgetpu

Key = tuple[float, ...]
PASS: Key = (0, 0, 1.0)
"""A copy by an identity row: no layer of the model."""
UNIT = 64


@dataclass
class Run:
    """The instructions of one layer on one side."""

    key: Key
    body: list[isa.Instruction]

    @property
    def words(self) -> int:
        return sum(type(i).words for i in self.body)

    @property
    def ops(self) -> list[isa.Op]:
        return [i for i in self.body if isinstance(i, isa.Op) and key_of(i) == self.key]

    @property
    def fences(self) -> int:
        return sum(isinstance(i, isa.TileFence) for i in self.body)


@dataclass(frozen=True)
class Row:
    """One layer on both sides; ``found`` of ``rows`` of its parameters are also in Google's."""

    kind: str
    size: str
    google: Run
    ours: Run
    rows: int
    found: int

    @property
    def form(self) -> str:
        return f"{self.kind} {'1x1' if self.size.startswith('1x1') else 'k x k'}" if self.kind == "Conv" else self.kind

    @property
    def verdict(self) -> str:
        mine, theirs = (b"".join(map(unnumbered, run.body)) for run in (self.ours, self.google))
        if mine == theirs:
            return "identical"
        return "same size" if len(mine) == len(theirs) else "smaller" if len(mine) < len(theirs) else "larger"

    @property
    def arithmetic(self) -> bool:
        """The same sums, scales, clamps and columns per step."""
        names = ("in_zp", "out_zp", "mult", "clamp_min", "clamp_max", "scale_en", "nlu_en", "out16", "act16")
        return all(getattr(self.ours.ops[0], n) == getattr(self.google.ops[0], n) for n in names)

    @property
    def reasons(self) -> str:
        a, b = self.google.ops, self.ours.ops
        found = []
        if len(a) != len(b):
            found.append(f"{len(a)} ops, one per shape of tile; ours {len(b)}")
        if a[0].out_ch != b[0].out_ch:
            found.append(f"{a[0].out_ch + 1} columns a step, ours {b[0].out_ch + 1}")
        elif a[0].values() != b[0].values():
            loops = [[getattr(i, f"loop_cnt{k}") + 1 for k in range(5)] for i in (a[0], b[0])]
            found.append("other order of loops" if loops[0] != loops[1] else "other addresses, walks or thresholds")
        if list(map(type, self.google.body)) == list(map(type, self.ours.body)):
            found.append("the same instructions in the same order")
        elif self.google.fences != self.ours.fences:
            found.append(f"{self.google.fences} fences, ours {self.ours.fences}")
        return "; ".join(found)


def key_of(op: isa.Op) -> Key:
    return op.in_zp, op.out_zp, -1.0 if op.scale_en else float(np.float32(op.mult))


def runs_of(stream: bytes) -> list[Run]:
    """A program cut behind the last op of every layer."""
    runs, body = [], []
    for i in (d.instruction for d in isa.decode(stream)):
        body.append(i)
        if isinstance(i, isa.Op) and key_of(i) != PASS:
            if runs and runs[-1].key == key_of(i):
                runs[-1].body += body
            else:
                runs.append(Run(key_of(i), body))
            body = []
    return runs


def unnumbered(i: isa.Instruction) -> bytes:
    return i.replace(seq=0).to_bytes() if "seq" in type(i).fields else i.to_bytes()


def layers_of(p: nw.NetworkProgram) -> Iterator[tuple[Key, Key, nw.Stage, str]]:
    """Stages that multiply, with the keys of our ops and of Google's, who takes equal scales of all channels as one."""
    t = p.plan.tensors
    for stage in p.plan.stages:
        mult = getattr(stage, "mult", None)
        if mult is None or not stage.inputs:
            continue
        x, y = t[stage.inputs[0]], t[stage.output]
        kernel = getattr(getattr(stage, "window", None), "kernel", (1, 1))
        zeros = 0 if isinstance(stage, nw.Add) else x.zero_point, y.zero_point
        values = set(np.ravel(np.float32(mult)).tolist())
        alike = values.pop() if len(values) == 1 else -1.0
        size = f"{kernel[0]}x{kernel[1]} {x.y}x{x.x}x{x.c} -> {y.y}x{y.x}x{y.c}"
        yield (*zeros, -1.0 if np.ndim(mult) else alike), (*zeros, alike), stage, size


def rows_found(p: nw.NetworkProgram, stage: nw.Stage, google: bytes, known: dict[int, set[bytes]]) -> tuple[int, int]:
    """(rows, those that Google's parameters hold somewhere) of a layer's header and weight rows, without padding."""
    product = p.wide.products.get(stage.output)
    if product is None:
        return 0, 0
    size = WORD_BYTES * round_up(product.columns, 16)
    if size not in known:
        known[size] = {google[k : k + size] for k in range(0, len(google), UNIT)}
    data = product.rows().reshape(-1).tobytes() if product.relay else b""
    rows = [r.tobytes()[:size] for r in product.rows()] if not product.relay else [
        data[k : k + size] for k in range(0, len(data), WORD_BYTES * product.relay)
    ]  # fmt: skip
    return len(rows), sum(row in known[size] for row in rows)


def matched(a: list[Key], b: list[Key]) -> dict[int, int]:
    """Places of the longest common part of two sequences."""
    blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    return {x + n: y + n for x, y, size in blocks for n in range(size)}


def compare(google: Path, source: Path) -> list[Row]:
    programs = {p.kind: p for p in read_edgetpu(google).package.programs}
    (compiled,) = compile_models([source])
    theirs = runs_of(programs[Kind.EXECUTION_ONLY].bitstreams[0].data)
    rows, known = [], {}
    for p in compiled.programs:
        ours, layers = runs_of(p.execution.bitstreams[0].data), list(layers_of(p))
        place = matched([layer[0] for layer in layers], [r.key for r in ours])
        match = matched([layer[1] for layer in layers], [r.key for r in theirs])
        for number, (*_, stage, size) in enumerate(layers):
            if number in place and number in match:
                found = rows_found(p, stage, programs[Kind.PARAMETER_CACHING].parameters, known)
                rows.append(Row(type(stage).__name__, size, theirs[match[number]], ours[place[number]], *found))
    return rows


HEADER = (
    "layers | identical | same size | ours smaller | ours larger | words: Google, ours | same arithmetic "
    "| all parameter rows in Google's too"
)


def counted(what: str, rows: list[Row]) -> str:
    """A line of a table."""
    counts = Counter(row.verdict for row in rows)
    words = [sum(run.words for run in runs) for runs in ([r.google for r in rows], [r.ours for r in rows])]
    cells = [what, len(rows), *(counts[v] for v in ("identical", "same size", "smaller", "larger"))]
    cells += [f"{words[0]:,}, {words[1]:,}", sum(r.arithmetic for r in rows), sum(0 < r.rows == r.found for r in rows)]
    return f"| {' | '.join(map(str, cells))} |"


def main(corpus: Path, names: list[str], details: bool) -> None:
    print(f"| model | {HEADER} |\n{'|---' * 9}|")
    listed: list[tuple[str, Row]] = []
    for google in sorted(corpus.glob("*/*_edgetpu.tflite")):
        source = google.with_name(google.name.replace("_edgetpu", ""))
        if source.exists() and (not names or any(n in source.stem for n in names)):
            rows = compare(google, source)
            print(counted(source.stem, rows), flush=True)
            listed += [(source.stem, row) for row in rows]
    print(f"\n| layers | {HEADER} |\n{'|---' * 9}|")
    for kind in sorted({row.form for _, row in listed}):
        print(counted(kind, [row for _, row in listed if row.form == kind]))
    if details:
        print(f"\n| model | layer | words: Google, ours | parameter rows | verdict | reason |\n{'|---' * 6}|")
        for name, row in listed:
            cells = [
                name,
                f"{row.kind} {row.size}",
                f"{row.google.words}, {row.ours.words}",
                f"{row.found} of {row.rows}",
            ]
            print(f"| {' | '.join([*cells, row.verdict, row.reasons])} |")


if __name__ == "__main__":
    arguments = [a for a in sys.argv[1:] if a != "--layers"]
    main(Path(arguments[0]), arguments[1:], "--layers" in sys.argv)
