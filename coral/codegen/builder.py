"""Collects the instructions of one program: numbering, counters, fences, scalar code, host DMAs, relocations.

The builder mirrors the sync counters: every signal of an emitted instruction is added up, every fence applied, so that
recipes take their thresholds from ``count`` instead of being told. Source: docs/codegen.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coral import isa
from coral.codegen.errors import CodegenError
from coral.codegen.machine import ALL_TILES, ROW_WORDS, TILES, ceil_div, tiles_of
from coral.isa import IMMEDIATE, AluOp, ScalarCounter, Source, StoreOp, Tag, TileCounter
from coral.package.program import Base, Bitstream, Relocation

ALL_UNITS = 0x3FF
OP_UNIT = 0x001
N2W_UNIT = 0x020
MESH_UNITS = 0x3C0
STREAM_UNITS = 0b01100
"""Scalar units (infeed, outfeed) that are idle before the compiler's ordinary scalar fences take effect."""
ALL_SCALAR_UNITS = 0b11111
INPUT_CREDIT = 0x7FFC
"""Input staging units (two halves, less 4) that the pop may fill before the infeed has sent any."""
SEQ_CACHING = 0x8000
"""First sequence number of a caching program: bit 15 is set throughout."""
FINAL = 3
HALT_FINAL = 4
WORD_BITS = 128
IMMEDIATE_BIT = 70
"""Position of a scalar bundle's immediate, which relocations patch."""


@dataclass(frozen=True)
class Style:
    """What changed between the two compiler generations whose programs are reproduced.

    ``register_moves``: a 64-bit add of offset 0 is two register moves. ``host_register``: pair (high, low) with the
    host address of activations. ``skip_level``: of a W2n that drops the beginning of its stream.
    """

    register_moves: bool
    host_register: int
    skip_level: int


V14 = Style(register_moves=False, host_register=11, skip_level=2)
V16 = Style(register_moves=True, host_register=10, skip_level=1)
SHORT = replace(V14, register_moves=True)
"""For programs of our own form."""

_MESH = {
    isa.MeshSouth: (6, TileCounter.MESH_NORTH_IN, TileCounter.MESH_SOUTH_OUT),
    isa.MeshWest: (7, TileCounter.MESH_EAST_IN, TileCounter.MESH_WEST_OUT),
    isa.MeshNorth: (8, TileCounter.MESH_SOUTH_IN, TileCounter.MESH_NORTH_OUT),
    isa.MeshEast: (9, TileCounter.MESH_WEST_IN, TileCounter.MESH_EAST_OUT),
}


def mesh_counters(mesh: type[isa.Instruction]) -> tuple[TileCounter, TileCounter]:
    """IN and OUT counter of a mesh direction."""
    return _MESH[mesh][1:]


def counter_mask(counters: Iterable[TileCounter]) -> int:
    """Bitmap of tile counters."""
    return sum(1 << c for c in counters)


ALL_COUNTERS = counter_mask(TileCounter)
RESET_COUNTERS = counter_mask(c for c in TileCounter if c < TileCounter.RING_PRODUCER_A)
"""All but the ring order counters, which go on until an output phase ends."""
RING_ORDER = (TileCounter.RING_PRODUCER_A, TileCounter.RING_PRODUCER_B)
RING_SCALAR_COUNTERS = sum(
    1 << c
    for c in (
        ScalarCounter.SCALAR_INFEED,
        ScalarCounter.PRODUCER_A,
        ScalarCounter.PRODUCER_B,
        ScalarCounter.RING_OUTFEED,
    )
)
MASK_REGISTER = 19
"""Register with the tile of the current iteration, in a loop over tiles."""
FIRST_OFFSET = 20
"""First of the scalar registers that hold how far a program of several passes is in its tensors."""
SCALAR_REGISTERS = 32
RESTART = 1 << 13
"""Counts from which a barrier sets all counters to zero: thresholds are 16 bits wide and signed."""
ALL_SCALAR_COUNTERS = (1 << len(ScalarCounter)) - 1
MESH_COUNTERS = counter_mask(c for counters in _MESH.values() for c in counters[1:])


class Builder:
    """One bitstream in the making. ``caching`` selects the numbering and registers of a parameter caching program."""

    def __init__(self, style: Style, *, caching: bool = False) -> None:
        self.style = style
        self.caching = caching
        self._instructions: list[isa.Instruction] = []
        self._relocations: list[Relocation] = []
        self._word = 1
        self._seq = SEQ_CACHING if caching else 0
        self._tile_counts = [[0] * len(TileCounter) for _ in range(TILES)]
        self._scalar_counts = [0] * len(ScalarCounter)
        self._unmirrored = False
        self._in_turn = False
        self._passes: list[int] = []
        self._looped_mask = 0
        self._work = 2 if caching else 4

    def emit(self, cls: type[isa.Instruction], **fields: Any) -> None:
        """Append an instruction; tile instructions and fences get the next sequence number."""
        if "seq" in cls.fields:
            fields["seq"] = self._seq & 0xFFFF
            self._seq += 1
        instruction = cls(**fields)
        self._count_signals(instruction)
        if self._looped_mask and fields.get("tile_mask") == self._looped_mask and "tile_mask_reg" in cls.fields:
            instruction = instruction.replace(tile_mask=0, tile_mask_indirect=1, tile_mask_reg=MASK_REGISTER)
        self._instructions.append(instruction)
        self._word += cls.words

    @property
    def words(self) -> int:
        """Instruction words so far, the start's included: where the next one will lie."""
        return self._word

    def count(self, counter: TileCounter, tiles: int) -> int:
        """Value that ``counter`` will have reached on the tiles of a mask; CodegenError if they differ."""
        values = {self._tile_counts[t][counter] for t in tiles_of(tiles)}
        if len(values) != 1:
            raise CodegenError(f"{counter.name} is {sorted(values)} on the tiles {tiles:#06x}, one value is needed")
        return values.pop()

    def _count_signals(self, i: isa.Instruction) -> None:
        match i:
            case isa.OpFormat():
                self._signal(i, "sig_av", TileCounter.AVDATA)
                self._signal(i, "sig_par", TileCounter.PARAMETERS)
            case isa.RingSend():
                self._signal(i, "sig_src", TileCounter.RING_WRITE)
                ring = TileCounter.RING_PRODUCER_B if i.to_consumer1 else TileCounter.RING_PRODUCER_A
                producer = ScalarCounter.PRODUCER_B if i.to_consumer1 else ScalarCounter.PRODUCER_A
                for _ in tiles_of(i.tile_mask):
                    self._scalar_counts[producer] += self._signal(i, "sig_ring", ring, ALL_TILES)
            case isa.RingRecv0():
                self._signal(i, "sig_dst", TileCounter.RING_READ_A)
            case isa.RingRecv1():
                self._signal(i, "sig_dst", TileCounter.RING_READ_B)
            case isa.N2w():
                self._signal(i, "sig_dst", TileCounter.NARROW_TO_WIDE)
            case isa.W2n():
                scaling = TileCounter.WIDE_TO_SCALING if i.to_scaling else TileCounter.WIDE_TO_NARROW
                self._signal(i, "sig_dst", scaling)
            case isa.MeshSouth() | isa.MeshWest() | isa.MeshNorth() | isa.MeshEast():
                came_in, went_out = mesh_counters(type(i))
                self._signal(i, "sig_dst", came_in)
                self._signal(i, "sig_src", went_out)
            case isa.Infeed() if i.stream == Source.SCALAR_MEMORY:
                self._unmirrored = True
                for counts in self._tile_counts:
                    counts[TileCounter.RING_PRODUCER_A] += ceil_div(i.walk("buf").steps, ROW_WORDS)
            case isa.TileFence():
                mask, value = i.ctr_mask, i.ctr_value
                counters = [c for c in TileCounter if mask >> c & 1]
                for t in tiles_of(i.tile_mask):
                    for c in counters:
                        self._tile_counts[t][c] = value
            case isa.ScalarFence():
                mask, waits, value = i.ctr_mask, i.wait_mask, i.ctr_value
                for c in ScalarCounter:
                    if mask >> c & 1:
                        self._scalar_counts[c] = 0 if waits >> c & 1 else value

    def _signal(self, i: isa.Instruction, name: str, counter: TileCounter, tiles: int | None = None) -> int:
        level = i.signal(name)
        if level is None:
            return 0
        walk = i.walk(type(i).signals[name].of)
        times = math.prod(walk.counts[level:]) if level else walk.steps
        for t in tiles_of(i.tile_mask if tiles is None else tiles):
            self._tile_counts[t][counter] += times
        return times

    # fences

    def scalar_fence(self, *, idle: int = STREAM_UNITS, **fields: Any) -> None:
        """A scalar fence; ``idle`` are the scalar units that must be idle."""
        if fields.get("token_wait") or fields.get("wait_mask"):
            fields["tile_mask"] = ALL_TILES
        if fields.get("token_wait"):
            fields["token_tiles"] = ALL_TILES
        self.emit(isa.ScalarFence, idle_mask=idle, **fields)

    def fence(
        self,
        counters: int = 0,
        value: int = 0,
        *,
        tiles: int = ALL_TILES,
        units: int = ALL_UNITS,
        token: bool = False,
        final: int = 0,
    ) -> None:
        """Drain ``units`` on ``tiles``, set ``counters``; with ``token`` the scalar core waits until all have."""
        self.emit(
            isa.TileFence,
            tile_mask=tiles,
            ctr_mask=counters,
            ctr_value=value,
            unit_mask=units,
            token=int(token),
            final=final,
        )
        if token:
            self.scalar_fence(token_wait=1)

    def drain(self) -> None:
        """Every unit of every tile has finished what was issued so far."""
        self.fence()

    def handshake(self) -> None:
        """As ``drain``, and the scalar core waits for it."""
        self.fence(token=True)

    def reset(self) -> None:
        """Drain and zero all counters except the ring order."""
        self.fence(RESET_COUNTERS)

    def barrier(self) -> None:
        """No tile goes on before all are idle; counters restart where they are high, uneven or not mirrored."""
        counts = [*self._tile_counts, self._scalar_counts]
        restart = self._unmirrored or max(map(max, counts)) > RESTART or any(c != counts[0] for c in counts[:TILES])
        self.handshake()
        if restart:
            self.restart()

    def separate(self) -> None:
        """As ``drain``, between layers: every counter is mirrored, low and the same on all tiles afterwards.

        A tile's own counters are set without the others. The scalar core takes part if its counters have to begin
        anew, and all wait for all only where the order of the ring does.
        """
        own = [[n for c, n in enumerate(counts) if RESET_COUNTERS >> c & 1] for counts in self._tile_counts]
        ring = [counts[c] for counts in self._tile_counts for c in RING_ORDER]
        scalar = [n for c, n in enumerate(self._scalar_counts) if RING_SCALAR_COUNTERS >> c & 1]
        if max(ring) > RESTART:
            self.handshake()
            self.restart()
            return
        anew = RESET_COUNTERS if max(map(max, own)) > RESTART or any(counts != own[0] for counts in own) else 0
        if not self._unmirrored and max(scalar) <= RESTART:
            self.fence(anew)
            return
        self.emit(isa.TileFence, tile_mask=ALL_TILES, ctr_mask=anew, unit_mask=ALL_UNITS, token=1)
        self.scalar_fence(idle=ALL_SCALAR_UNITS, ctr_mask=RING_SCALAR_COUNTERS, token_wait=1)
        self._unmirrored = False

    def restart(self) -> None:
        """All tiles' counters and the scalar core's ring counters become zero; everybody must be idle before."""
        self.emit(isa.TileFence, tile_mask=ALL_TILES, ctr_mask=ALL_COUNTERS, unit_mask=ALL_UNITS, token=1)
        self.scalar_fence(idle=ALL_SCALAR_UNITS, ctr_mask=RING_SCALAR_COUNTERS, token_wait=1)
        self._unmirrored = False
        if self._in_turn:
            self.take_turns()
            self.handshake()

    def take_turns(self) -> None:
        """The ring order counter of every tile is one less than that of the tile before: tiles that send one after the
        other in this order have the same threshold. All must be idle and the counters zero, and a handshake follows.
        """
        self._in_turn = True
        for tile in range(TILES - 1):
            self.fence(1 << TileCounter.RING_PRODUCER_A, TILES - 1 - tile, tiles=1 << tile, units=0)

    def turns(self, tiles: Sequence[int]) -> list[int]:
        """Thresholds of the ring order counter with which tiles send to consumer 0 one after the other."""
        return [self.count(TileCounter.RING_PRODUCER_A, 1 << tile) + k for k, tile in enumerate(tiles)]

    def pause(self) -> None:
        """Scalar fence that only waits for the host streams."""
        self.scalar_fence()

    def mesh_fence(self, mesh: type[isa.Instruction]) -> int:
        """Bring all tiles to the counts of the busiest relay of a mesh direction; the mask of tiles it touched.

        Tiles that already are at that count in both directions are left out, so that they need not drain.
        """
        unit, came_in, went_out = _MESH[mesh]
        value = max(counts[came_in] for counts in self._tile_counts)
        done = [t for t, c in enumerate(self._tile_counts) if c[came_in] == c[went_out] == value]
        tiles = ALL_TILES - sum(1 << t for t in done)
        self.fence(counter_mask((came_in, went_out)), value, tiles=tiles, units=1 << unit)
        return tiles

    # scalar code

    def scalar(self, op: AluOp, dst: int, src: int = 0, imm: int = 0, *, register: bool = False, **fields: Any) -> None:
        """One ALU bundle; ``register``: ``imm`` is a register number."""
        self.emit(
            isa.Scalar, alu_op=op | (0 if register else IMMEDIATE), alu_dst=dst, alu_src=src, alu_imm=imm, **fields
        )

    def _sum(self, high: int, low: int, out_high: int, out_low: int, temporary: int) -> None:
        """out := high:low + 0, as the compiler writes it: a full 64-bit add, or moves in the newer style."""
        if self.style.register_moves:
            self.scalar(AluOp.MOV, out_low, imm=low, register=True)
            self.scalar(AluOp.MOV, out_high, imm=high, register=True)
            return
        if_negative: dict[str, Any] = {"pred_en": 1, "pred_reg": 0, "pred_val": 1}
        if_carry: dict[str, Any] = {"pred_en": 1, "pred_reg": 1, "pred_val": 1}
        self.scalar(AluOp.LT, 0, low, 0)
        self.scalar(AluOp.NE, 1, low, low, register=True)
        self.scalar(AluOp.AND, temporary, low, 0x7FFFFFFF)
        self.scalar(AluOp.ADD, temporary, temporary, 0, **if_negative)
        self.scalar(AluOp.LT, 1, temporary, 0, **if_negative)
        self.scalar(AluOp.ADD, out_low, low, 0)
        self.scalar(AluOp.ADD, out_high, high, 0)
        self.scalar(AluOp.ADD, out_high, out_high, 1, **if_carry)

    def _load_address(self, first: int, second: int, base: Base | None, name: str = "", *, high_first: bool) -> None:
        """Move immediates of 0 for the two halves of a host address; the driver may patch them (base None: never)."""
        for register, high in ((first, high_first), (second, not high_first)):
            if base is not None:
                self._relocations.append(Relocation(base, high, WORD_BITS * self._word + IMMEDIATE_BIT, name))
            self.scalar(AluOp.MOV, register)

    def _start_address(self, high: int) -> None:
        """First of the two 64-bit adds of a host DMA: register pair (high, high + 1) into the work pair."""
        w = self._work
        self._sum(high, high + 1, w, w + 1, w + 2)

    def _issue(self, length_bytes: int, tag: Tag) -> None:
        """Second add, then the descriptor (address low, high, length, tag), whose stores overlap the next moves."""
        w = self._work
        low, high, length, tag_register = w + 2, w + 3, w + 4, w + 5
        self._sum(w, w + 1, high, low, w + 6)
        self.emit(isa.Scalar, st_op=StoreOp.DESCRIPTOR, st_addr=0, st_src=low)
        self.scalar(AluOp.MOV, length, imm=length_bytes, st_op=StoreOp.DESCRIPTOR, st_addr=1, st_src=high)
        self.scalar(AluOp.MOV, tag_register, imm=tag, st_op=StoreOp.DESCRIPTOR, st_addr=2, st_src=length)
        self.emit(isa.Scalar, st_op=StoreOp.DESCRIPTOR, st_addr=3, st_src=tag_register)
        self.emit(isa.Scalar, st_op=StoreOp.ISSUE)

    # frame and host DMAs

    def prologue(self) -> None:
        """First fences: all counters zero, host streams idle. An execution program also loads unused base addresses."""
        self.emit(isa.TileFence, tile_mask=ALL_TILES, ctr_mask=ALL_COUNTERS, unit_mask=ALL_UNITS, token=1)
        self.scalar_fence(idle=ALL_SCALAR_UNITS, ctr_mask=ALL_SCALAR_COUNTERS, token_wait=1)
        self._load_address(1, 0, Base.PARAMETER, high_first=False)
        if not self.caching:
            self._load_address(3, 2, Base.SCRATCH, high_first=False)

    def parameter_dma(self, length_bytes: int) -> None:
        """Host DMA of a caching program's parameters, to the address loaded by the prologue."""
        self._start_address(0)
        self._issue(length_bytes, Tag.PARAMETERS)

    def input_address(self, name: str, index: int = 0, credit: int = INPUT_CREDIT) -> None:
        """Address of input ``name``, tensor ``index`` of ``begin_passes``, and fresh credit for its pop.

        The pop itself follows, then ``input_dma``.
        """
        high = self.style.host_register
        self._load_address(high, high + 1, Base.INPUT, name, high_first=True)
        self._advance(index)
        self.scalar_fence(ctr_mask=1 << ScalarCounter.AVDATA_INFEED, ctr_value=credit)
        self.scalar_fence(ctr_mask=1 << ScalarCounter.AVDATA_POP)

    def _advance(self, tensor: int) -> None:
        """In a program of several passes: what the earlier ones transferred of the tensor is added to its address.

        No carry into the upper half: over USB addresses have no function.
        """
        if self._passes:
            low = self.style.host_register + 1
            self.scalar(AluOp.ADD, low, low, FIRST_OFFSET + tensor, register=True)

    def begin_passes(self, sizes_bytes: list[int]) -> None:
        """What follows, up to ``end_pass``, runs several times; ``sizes_bytes``: of the inputs, then of the outputs.

        CodegenError: more tensors than registers.
        """
        if FIRST_OFFSET + len(sizes_bytes) > SCALAR_REGISTERS:
            raise CodegenError(
                f"a program of several passes with {len(sizes_bytes)} tensors, there are registers for "
                f"{SCALAR_REGISTERS - FIRST_OFFSET}"
            )
        self._passes, self._top = sizes_bytes, self._word
        for tensor in range(len(sizes_bytes)):
            self.scalar(AluOp.MOV, FIRST_OFFSET + tensor)
        self._top = self._word

    def end_pass(self, passes: int) -> None:
        """Once more from the top, until there were ``passes``; all counters are as they were there."""
        self.restart()
        for tensor, size in enumerate(self._passes):
            self.scalar(AluOp.ADD, FIRST_OFFSET + tensor, FIRST_OFFSET + tensor, size)
        self.scalar(AluOp.LT, 0, FIRST_OFFSET, passes * self._passes[0])
        self.emit(isa.Branch, cond_en=1, cond_reg=0, cond_val=1, offset=self._top - self._word)

    def begin_tile_loop(self) -> None:
        """What follows, up to ``end_tile_loop``, runs for tile 0, 1, ..; all counters must be zero.

        Instructions for the mask 1 take their mask from a register.
        """
        self.scalar(AluOp.MOV, MASK_REGISTER, imm=1)
        self._looped_mask, self._top = 1, self._word

    def end_tile_loop(self, tiles: int) -> None:
        """Once more from the top, until there were ``tiles``; everybody must be idle, all counters become zero."""
        self._looped_mask = 0
        self.restart()
        self.scalar(AluOp.SHL, MASK_REGISTER, MASK_REGISTER, 1)
        self.scalar(AluOp.LT, 0, MASK_REGISTER, 1 << tiles)
        self.emit(isa.Branch, cond_en=1, cond_reg=0, cond_val=1, offset=self._top - self._word)

    def input_dma(self, length_bytes: int) -> None:
        """Host DMA of the input at the address of ``input_address``."""
        self._start_address(self.style.host_register)
        self._issue(length_bytes, Tag.INPUT)

    def output_address(self, name: str, index: int = 1) -> None:
        """Address of output ``name``, tensor ``index`` of ``begin_passes``; tiles may write before ``output_dma``."""
        high = self.style.host_register
        self._load_address(high, high + 1, Base.OUTPUT, name, high_first=True)
        self._advance(index)
        self._start_address(high)

    def output_dma(self, length_bytes: int) -> None:
        """Host DMA that takes the outfeeds that follow."""
        self._issue(length_bytes, Tag.OUTPUT)

    def output_wait(self, *, parameters: bool = False) -> None:
        """Wait until all ring sends to consumer 0 (``parameters``: to both) have happened; restart the ring order."""
        self.reset()
        rings = [(ScalarCounter.PRODUCER_A, TileCounter.RING_PRODUCER_A)]
        rings += [(ScalarCounter.PRODUCER_B, TileCounter.RING_PRODUCER_B)] if parameters else []
        sent = {f"thr{producer:d}": self._scalar_counts[producer] for producer, _ in rings}
        mask = sum(1 << producer for producer, _ in rings)
        self.scalar_fence(ctr_mask=mask, wait_mask=mask, **sent)
        self.fence(0 if self._in_turn else counter_mask(ring for _, ring in rings), token=True)

    def epilogue(self) -> None:
        """Last fence, interrupt 0 to the host, halt."""
        self.fence(token=True, final=FINAL)
        self._load_address(self._work, self._work + 1, None, high_first=True)
        self._issue(0, Tag.INTERRUPT0)
        self.emit(isa.Halt, code=HALT_FINAL)
        for _ in range(4):
            self.emit(isa.Scalar)

    def finish(self) -> Bitstream:
        """The bitstream: start, what was emitted, end."""
        start = isa.Start(body_bits=WORD_BITS * (self._word - 1))
        data = isa.encode([start, *self._instructions, isa.End()])
        return Bitstream(data, tuple(self._relocations))
