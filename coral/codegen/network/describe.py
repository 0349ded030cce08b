"""How a program computes a stage, in words, for reports. Source: docs/network.md, sections Tiling, Regions, Bands."""

from __future__ import annotations

from coral.codegen.network.graph import Concatenate, Interleave, Slice, Stage
from coral.codegen.network.places import collects
from coral.codegen.network.program import NetworkProgram

IN_PLACE = "lies in its place already: no instruction"


def describe(program: NetworkProgram, stage: Stage) -> str:
    """The choices that were made for a stage: a tile's part and phantoms, blocks, division of channels, streaming."""
    plan, name = program.plan, stage.output
    if isinstance(stage, Concatenate | Slice | Interleave):
        return IN_PLACE
    said = []
    if name in plan.spread:
        tiles = plan.spread_tiles(name).bit_count()
        said.append(f"outputs divided among {tiles} tiles" if tiles > 1 else "a vector on one tile")
    else:
        said.append(_part(program, stage))
        if (block := plan.blocking.get(name, (1, 1))) != (1, 1):
            said.append(f"{block[0]} x {block[1]} outputs at once")
        if (pack := plan.packing.get(name, 1)) > 1:
            said.append(f"{pack} columns at once")
    if name in plan.summed:
        said.append("sums of the tiles are added")
    elif collects(plan, stage):
        said.append("collects its input first")
    elif any(plan.needs_exchange(stage, x) for x in stage.inputs):
        said.append("halo")
    if name in program.wide.streamed:
        said.append("weights sent at every call")
    return "; ".join(said)


def _part(program: NetworkProgram, stage: Stage) -> str:
    """What a tile has of a map, and how much of what is computed there is none of it."""
    plan, name = program.plan, stage.output
    (rows, columns), map_ = plan.splits[name], plan.tensors[name]
    size = f"{rows.extent} x {columns.extent}"
    active = plan.active(name)
    said = f"{size} of {map_.y} x {map_.x} per tile" if len(active) > 1 else f"{map_.y} x {map_.x}, whole"
    real = sum(rows.real(r) * columns.real(c) for r, c in active)
    computed = rows.extent * columns.extent * len(active)
    if real < computed:
        said += f" ({1 - real / computed:.0%} phantoms)"
    if (shares := plan.shares(name)) > 1:
        said += f", channels divided among {shares}"
    if plan.images > 1:
        said += f", {plan.images} images"
    return said


__all__ = ["describe"]
