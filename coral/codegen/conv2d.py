"""A k x k convolution of a one-channel image as Google's compiler 16.0 writes it; networks have a form of their own.

Every tile computes a block of the output from its own block of the input and what its neighbours send. Source:
docs/codegen.md, section Convolution of an image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from coral import isa
from coral.codegen import blocks, stream
from coral.codegen.builder import N2W_UNIT, V16, Builder, counter_mask
from coral.codegen.errors import CodegenError, ShapeError
from coral.codegen.fc import INPUT, OUTPUT, RESIDENT_TOKEN, FcQuant
from coral.codegen.machine import (
    ALL_TILES,
    COLUMNS,
    OUTPUT_FIFO_ROW,
    ROW_BYTES,
    ROW_UNITS,
    ROW_WORDS,
    TILES,
    WIDE_ROWS,
    WORD_BYTES,
)
from coral.isa import TileCounter, Wait, Walk
from coral.package.program import Base, Bitstream, DmaHint, InstructionHint, InterruptHint, Kind, Layer, Layout, Program

SLOT_BYTES, IDENTITY_WORDS, HEADER_GAP = 256, 68, 32
"""A staging slot; identity row and a row of zeros; rows between the header rows and the weights' FIFO."""
INPUT_FIFO_ROW = WIDE_ROWS - 4
LANES = 16


@dataclass(frozen=True)
class ImageConv:
    """[h, w, 1] -> [h, w, outputs], windows of kernel x kernel, SAME, stride 1; weights with a zero point per output.

    ``rows_above``: wide rows at the top that something else uses. ShapeError for sizes of another form.
    """

    h: int
    w: int
    kernel: int
    outputs: int
    quant: FcQuant
    rows_above: int = 0

    def __post_init__(self) -> None:
        border, slots = self.kernel // 2, 2 * SLOT_BYTES + WORD_BYTES * IDENTITY_WORDS
        fits = (
            (self.kernel % 2, f"kernel {self.kernel}, an odd one is needed"),
            (0 < border <= min(self.rows, self.columns), f"kernel {self.kernel} reaches past a neighbour's block"),
            (self.h % 4 == 0 and self.w % 16 == 0 and self.w <= ROW_BYTES, f"{self.h} x {self.w}: needed are multiples"
             f" of 4 and 16, and at most {ROW_BYTES} columns"),
            (self.rows * self.w % ROW_BYTES == 0 and self.rows * self.w > ROW_BYTES, f"{self.rows} x {self.w} bytes for"
             f" four tiles, needed are several times {ROW_BYTES}"),
            (self.outputs % 4 == 0 and 0 < self.outputs <= LANES, f"{self.outputs} outputs, allowed are 4, 8, 12, 16"),
            (self.result > max(slots, self.block - 1), f"{self.result} bytes of results on a tile, for this form they"
             f" must be more than {max(slots, self.block)}"),
        )  # fmt: skip
        if problems := [text for fine, text in fits if not fine]:
            raise ShapeError(f"convolution of an image: {'; '.join(problems)}")

    @property
    def rows(self) -> int:
        """Rows of a tile's own block."""
        return self.h // 4

    @property
    def columns(self) -> int:
        """Columns of a tile's own block."""
        return self.w // COLUMNS

    @property
    def pitch(self) -> int:
        """Words of a row of a tile's block of the input, one per position."""
        return self.columns + self.kernel - 1

    @property
    def block(self) -> int:
        """Bytes of that block."""
        return WORD_BYTES * self.pitch * (self.rows + self.kernel - 1)

    @property
    def result(self) -> int:
        """Bytes of a tile's results, which lie in front of the input's block."""
        return self.rows * self.columns * self.outputs

    @property
    def taps(self) -> int:
        """Weight rows."""
        return self.kernel * self.kernel

    @property
    def fifo_row(self) -> int:
        """First row of the weights' FIFO."""
        return WIDE_ROWS - self.rows_above - 2 * self.taps

    def blob(self, weights: np.ndarray, w_zp: np.ndarray) -> bytes:
        """Parameters: ``weights`` uint8 [outputs, kernel, kernel] and their zero points int32 [outputs]."""
        if weights.shape != (self.outputs, self.kernel, self.kernel) or weights.dtype != np.uint8:
            raise CodegenError(f"weights are {weights.dtype} {weights.shape}")
        if w_zp.shape != (self.outputs,) or w_zp.dtype != np.int32:
            raise CodegenError(f"zero points are {w_zp.dtype} {w_zp.shape}")
        rows = np.zeros((1 + self.taps, LANES, WORD_BYTES), np.uint8)
        rows[0, : self.outputs] = w_zp.view(np.uint8).reshape(-1, WORD_BYTES)
        rows[1:, : self.outputs] = w_zp[:, None]
        rows[1:, : self.outputs, 0] = weights.reshape(self.outputs, -1).T
        return rows.tobytes()

    def caching(self, blob: bytes) -> Program:
        """Program that loads ``blob`` to tile 0, which sends it to all at every call."""
        rows = 1 + self.taps
        if len(blob) != rows * LANES * WORD_BYTES:
            raise CodegenError(f"parameters are {len(blob)} bytes long, {rows * LANES * WORD_BYTES} are needed")
        b = Builder(V16, caching=True)
        b.prologue()
        b.parameter_dma(len(blob))
        blocks.pop_parameters(b, len(blob))
        b.emit(isa.RingRecv0, tile_mask=1, dst=Walk(0, [1], [rows]))
        blocks.infeed_parameters(b, 0, len(blob), 1, 1)
        b.epilogue()
        hints = (InstructionHint(), DmaHint(Base.PARAMETER, 0, len(blob)), InterruptHint())
        return Program(Kind.PARAMETER_CACHING, (b.finish(),), hints, parameters=blob, token=RESIDENT_TOKEN)

    @cached_property
    def execution(self) -> Program:
        """Program that computes one image."""
        q, size = self.quant, self.result * TILES
        transfers = (DmaHint(Base.INPUT, 0, self.h * self.w, INPUT), DmaHint(Base.OUTPUT, 0, size, OUTPUT, out=True))
        layout = Layout(
            tuple(COLUMNS * (y // self.rows) for y in range(self.h)),
            tuple(x // self.columns for x in range(self.w)),
            tuple(range(0, size, self.result)),
            tuple(self.outputs * (x % self.columns) for x in range(self.w)),
            tuple(y % self.rows for y in range(self.h)),
            (self.columns * self.outputs,) * self.w,
        )
        return Program(
            Kind.EXECUTION_ONLY,
            (self._bitstream(),),
            (InstructionHint(), *transfers, InterruptHint()),
            inputs=(Layer(INPUT, self.h * self.w, self.h, self.w, 1, q.in_zp, q.in_scale),),
            outputs=(Layer(OUTPUT, size, self.h, self.w, self.outputs, q.out_zp, q.out_scale, layout=layout),),
            token=RESIDENT_TOKEN,
            narrow_bytes_per_tile=self.result + self.block,
        )

    def _bitstream(self) -> Bitstream:
        b = stream.opened(V16)
        self._identity(b)
        self._spread(b, range(self.rows - 1))
        stream.receive(b, self.h * self.w)
        self._distribute(b)
        b.drain()
        self._spread(b, range(self.rows - 1, self.rows))
        b.reset()
        self._exchange(b)
        b.handshake()
        self._multiply(b)
        b.handshake()
        words = self.outputs // WORD_BYTES
        levels = [(1, words), (words, self.columns), (words * self.columns, self.rows)]
        b.output_address(OUTPUT)
        blocks.pack_walk(b, ALL_TILES, Walk(0, [s for s, n in levels if n > 1], [n for _, n in levels if n > 1]))
        b.output_dma(self.result * TILES)
        for tile in range(TILES):
            blocks.outfeed(b, self.result)
            blocks.ring_send(b, 1 << tile, self.result)
        b.output_wait(parameters=True)
        b.epilogue()
        return b.finish()

    def _identity(self, b: Builder) -> None:
        """A row whose column c passes on byte c of a word, and a row of zeros, by fills of narrow memory."""
        word = 2 * SLOT_BYTES // WORD_BYTES
        for byte in range(WORD_BYTES):
            place = Walk(word + byte, [1], [1], nz_mask=0)
            b.emit(isa.MeshNorth, tile_mask=ALL_TILES, dst=place, fill_en=1, fill_value=1 << 8 * byte)
        b.emit(isa.MeshNorth, tile_mask=ALL_TILES, dst=Walk(word + WORD_BYTES, [1], [ROW_WORDS]), fill_en=1)
        b.drain()
        rows = Walk(OUTPUT_FIFO_ROW, [1], [2])
        b.emit(isa.N2w, tile_mask=ALL_TILES, src=Walk(word, [1], [IDENTITY_WORDS]), dst=rows, pack_level=1)
        b.fence(units=N2W_UNIT)

    def _distribute(self, b: Builder) -> None:
        """Image rows to four tiles each, every tile dropping what comes before its columns."""
        b.fence(counter_mask([TileCounter.WIDE_TO_NARROW]), units=0)
        words, packets = self.w // WORD_BYTES, self.rows * self.w // ROW_BYTES
        fifo = Walk(INPUT_FIFO_ROW, [0], [packets], slot_level=0, slot_stride=1)
        for column in range(COLUMNS):
            dropped = column * self.columns // WORD_BYTES
            skip = {"skip_en": 1, "skip_level": 1, "skip_cnt": dropped - 1, "skip_end": dropped - 1} if dropped else {}
            last = {"last_dim": 1, "last_cnt": words - dropped - 1} if dropped else {}
            slots = {"slot_level": 1, "slot_stride": SLOT_BYTES // WORD_BYTES}
            b.emit(
                isa.W2n,
                tile_mask=0x1111 << column,
                src=fifo,
                dst=Walk(0, [1, 0], [words, self.rows], **slots, **last),
                sig_dst=0,
                waits=[Wait(TileCounter.RING_READ_A, 1, level=0), Wait(TileCounter.AVDATA, -1, level=1, side=1)],
                unpack_level=2,
                **skip,
            )
        for row in range(4):
            free = Wait(TileCounter.WIDE_TO_NARROW, -ROW_WORDS, level=0, step=ROW_WORDS, side=1)
            b.emit(isa.RingRecv0, tile_mask=0xF << 4 * row, dst=fifo, sig_dst=0, waits=[free])
            blocks.infeed_input(b, row * self.rows * self.w, self.rows * self.w, 0xF << 4 * row)

    def _spread(self, b: Builder, rows: range) -> None:
        """Image rows out of the staging slots into the block, a byte into every word."""
        words, several = self.w // WORD_BYTES, len(rows) > 1
        first, border = rows[0], self.kernel // 2
        row = WORD_BYTES * self.pitch
        loops = [1, self.columns, 1, len(rows)] if several else [1, self.columns]
        arrived = words if several else first * words + self.columns // WORD_BYTES
        target = self.result + row * (border + first) + WORD_BYTES * border
        image = row * (self.rows + self.kernel - 1)
        counts = [1, self.columns, len(rows)] if several else [1, self.columns]
        out = [1, self.columns, 1, *([len(rows)] if several else []), 1]
        blocks.word_op(
            b,
            ALL_TILES,
            loops,
            inp=Walk(
                first % 2 * SLOT_BYTES,
                [1, 1, self.w, 0][: 3 + several],
                [1, self.columns, 1, len(rows)][: 3 + several],
                slot_level=3,
                slot_stride=SLOT_BYTES,
            ),
            out=Walk(target, [WORD_BYTES, WORD_BYTES, row, *([row] if several else []), image][: len(out)], out),
            par=Walk(ROW_UNITS * OUTPUT_FIFO_ROW, [1, 0, 0][: len(counts)], counts),
            psum=Walk(0, [1, 0, 0][: len(counts)], counts, nz_mask=0, slot_level=1, slot_stride=ROW_UNITS),
            sig_av=3,
            waits=[Wait(TileCounter.WIDE_TO_NARROW, arrived, level=3, step=words)],
            lane_off=0b111,
            group_loop=3,
            reduce_mask=0b1,
            clamp_min=-math.inf,
            clamp_max=math.inf,
        )

    def _exchange(self, b: Builder) -> None:
        """Borders of the neighbours' blocks; outside the image the zero point. Columns follow rows, over all rows."""
        border, pitch, first = self.kernel // 2, self.pitch, self.result // WORD_BYTES
        own = first + border * pitch + border
        fill = {"fill_en": 1, "fill_value": self.quant.in_zp * 0x01010101}
        rows, columns = (self.columns, border), (border, self.rows + 2 * border)
        below, right = first + (border + self.rows) * pitch + border, first + border + self.columns
        halves = (
            (isa.MeshNorth, own, below, rows), (isa.MeshSouth, below - border * pitch, own - border * pitch, rows),
            (isa.MeshWest, first + border, right, columns), (isa.MeshEast, right - border, first, columns),
        )  # fmt: skip
        arrived = [Wait(TileCounter.MESH_NORTH_IN, 1, level=2), Wait(TileCounter.MESH_SOUTH_IN, 1, level=2)]
        for mesh, source, target, counts in halves:
            vertical = mesh in (isa.MeshNorth, isa.MeshSouth)
            groups = (0x000F, 0x0FF0, 0xF000) if vertical else (0x1111, 0x6666, 0x8888)
            towards_zero = mesh in (isa.MeshNorth, isa.MeshWest)
            for place, tiles in enumerate(groups):
                sends, gets = (place > 0, place < 2) if towards_zero else (place < 2, place > 0)
                walks = {"src": Walk(source, [1, pitch], counts)} if sends else {}
                waits = arrived if sends and not vertical else []
                dst = Walk(target, [1, pitch], counts)
                b.emit(mesh, tile_mask=tiles, dst=dst, sig_dst=2, waits=waits, **walks, **({} if gets else fill))

    def _multiply(self, b: Builder) -> None:
        """Weights from tile 0 into everybody's FIFO, and the op."""
        fifo, header, q = self.fifo_row, self.fifo_row - 2 - HEADER_GAP, self.quant
        columns, positions, pitch = self.outputs, self.rows * self.columns, WORD_BYTES * self.pitch
        b.emit(
            isa.RingRecv1,
            tile_mask=ALL_TILES,
            dst=Walk(fifo, [1], [self.taps], slot_level=1, slot_stride=self.taps),
            hdr_en=1,
            hdr_level=1,
            hdr_first_row=header,
            hdr_last_row=header + 1,
            hdr_bias=1,
            sig_dst=1,
            waits=[Wait(TileCounter.PARAMETERS, -1, level=1, side=1)],
        )
        taps = [(WORD_BYTES, self.kernel), (pitch, self.kernel)]
        places = [(WORD_BYTES, 1), (WORD_BYTES, self.columns), (pitch, self.rows)]
        b.emit(
            isa.Op,
            tile_mask=ALL_TILES,
            loops=[self.taps, positions],
            inp=Walk(self.result, [s for s, _ in (*taps, *places)], [n for _, n in (*taps, *places)]),
            out=Walk(0, [WORD_BYTES, columns, columns], [columns // WORD_BYTES, positions, 1]),
            par=Walk(
                ROW_UNITS * fifo,
                [ROW_UNITS, 0],
                [self.taps, positions],
                slot_level=2,
                slot_stride=ROW_UNITS * self.taps,
            ),
            psum=Walk(0, [0, 0], [self.taps, positions], slot_level=1, slot_stride=ROW_UNITS),
            sig_av=2,
            sig_par=2,
            waits=[Wait(TileCounter.RING_READ_B, 1, level=2)],
            acc_chain=1,
            acc_init=1,
            par_zp_rows=1,
            zp_first_row=header,
            zp_last_row=header + 1,
            zp_row_step=1,
            group_loop=2,
            reduce_mask=0b1,
            out_ch=columns - 1,
            out_ch_last=columns - 1,
            mult=q.mult,
            in_zp=q.in_zp,
            out_zp=q.out_zp,
            clamp_min=q.clamp_min,
            clamp_max=q.clamp_max,
        )
        b.emit(
            isa.RingSend,
            tile_mask=1,
            src=Walk(0, [1], [1 + self.taps]),
            sig_ring=0,
            waits=[Wait(TileCounter.RING_PRODUCER_B, 0, level=1)],
            to_consumer1=1,
            dest_mask=ALL_TILES,
        )
