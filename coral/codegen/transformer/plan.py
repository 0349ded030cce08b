"""Where everything of a decoder lies: tiles, rows of wide memory, bytes of narrow memory.

Source: docs/transformer.md, Placement.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from coral.codegen.errors import CodegenError, ShapeError
from coral.codegen.machine import GROUP, OUTPUT_FIFO_ROW, ROW_BYTES, TILES, WORD_BYTES, ceil_div, mask_of, round_up
from coral.codegen.transformer.graph import ONE_COLUMNS, Transformer

NARROW_BYTES = 192 * 1024
INPUT_FIFO_ROW = OUTPUT_FIFO_ROW - 2
CONSTANT_ROWS = 7
"""Identity; plus and minus one; four selections."""
FFN_GROUPS = 3
"""Groups of 64 hidden units that a tile takes of a layer at most, as long as others have room."""


@dataclass(frozen=True)
class Form:
    """How a decoder becomes a program.

    ``spread``: every layer over many tiles, else one tile per layer; None: the latter if it fits. ``loop``: the layers
    are one loop of the scalar core (only one tile per layer). ``keep``: memory keeps keys and values from call to call,
    else the host sends them again. ``report``: new keys and values go to the host all the same. ``logits``: the program
    ends with the classifier's codes.
    """

    spread: bool | None = None
    loop: bool = False
    keep: bool = False
    report: bool = False
    logits: bool = False

    @property
    def reports(self) -> bool:
        """Whether keys and values of a position are outputs."""
        return self.report or not self.keep


@dataclass(frozen=True)
class Share:
    """``count`` heads, outputs or hidden units, from ``first`` on, on a tile whose parameters begin at ``row``."""

    tile: int
    row: int
    first: int
    count: int


Shares = tuple[Share, ...]


def fc_rows(outputs: int, inputs: int, header: int = 1) -> int:
    """Rows of a matrix on a tile: headers, then one row per group of 64 outputs and four inputs."""
    return ceil_div(outputs, GROUP) * (header + inputs // WORD_BYTES)


@dataclass(frozen=True)
class Layout:
    """The tiles of one layer."""

    heads: Shares
    outputs: Shares
    ffn: Shares
    local: int
    """Index of the layer among those whose keys and values are on the same tiles."""

    @property
    def constants(self) -> int:
        """In a loop, row of three multipliers (scores, exponentials, product), in front of the queries' matrix."""
        return self.heads[0].row


class Plan:
    """Placement of a model in a form. ShapeError, with the numbers, if it does not fit."""

    def __init__(self, model: Transformer, form: Form) -> None:
        self.model, self.form, self.g = model, form, model.geometry
        problem: ShapeError | None = None
        for spread in (False, True) if form.spread is None else (form.spread,):
            try:
                self._arrange(spread)
                return
            except ShapeError as error:
                problem = problem if problem and form.loop else error
        assert problem is not None
        raise problem

    def _arrange(self, spread: bool) -> None:
        layers = len(self.model.blocks)
        self.spread = spread
        if self.form.loop and not self.model.own_tables:
            raise ShapeError(f"{self.model.name}: a loop over layers needs tables of our own for SiLU and reciprocal")
        if self.form.loop and spread:
            raise ShapeError(f"{self.model.name}: a loop over layers needs one tile per layer")
        if not spread and layers > TILES:
            raise ShapeError(f"{self.model.name}: {layers} layers, one tile for each allows {TILES}")
        self._divide()
        self._narrow()
        self._scratch()
        if self.floor < 0:
            raise ShapeError(f"{self.model.name}: buffers take {-self.floor} rows more than a tile has")
        self.layouts = self._spread_layouts() if spread else self._tile_layouts()
        self.used = max(self.fill)
        if self.used > self.floor:
            raise ShapeError(
                f"{self.model.name}: parameters end at row {self.used}, rows from {self.floor} on are overwritten"
            )

    def _divide(self) -> None:
        """How many tiles share a layer's heads, outputs and hidden units."""
        g = self.g
        group = g.heads // g.kv_heads
        if not self.spread:
            self.head_tiles, self.output_tiles = 1, 1
        else:
            fits = [n for n in range(1, TILES + 1) if g.heads % n == 0]
            even = [n for n in fits if (g.heads // n) % group == 0 or group % (g.heads // n) == 0]
            self.head_tiles = max(even)
            self.output_tiles = min(TILES, ceil_div(g.dim, GROUP))
        self.heads = g.heads // self.head_tiles
        self.kv_heads = max(1, self.heads // group)
        self.group = self.heads // self.kv_heads
        self.outputs = round_up(ceil_div(g.dim, self.output_tiles), WORD_BYTES)
        self.output_tiles = ceil_div(g.dim, self.outputs)
        self.units = min(FFN_GROUPS * GROUP, g.hidden) if self.spread else g.hidden
        self.local_layers = len(self.model.blocks) if self.spread else 1

    # narrow memory

    def _narrow(self) -> None:
        g, end = self.g, 0

        def take(size: int) -> int:
            nonlocal end
            start, end = end, end + round_up(size, 16)
            return start

        heads, one = self.heads, ONE_COLUMNS
        self.pitch = round_up(g.context, GROUP)
        self.attended = take(g.dim + self.outputs)
        self.x_share = self.attended + g.dim
        self.product = take(g.hidden + self.outputs)
        self.x2_share = self.product + g.hidden
        self.x = take(g.dim) if self.spread else self.x_share
        self.x2 = take(g.dim) if self.spread else self.x2_share
        self.own_attended = take(heads * g.head_size) if self.spread else self.attended
        self.own_product = take(self.units) if self.spread else self.product
        self.normal, self.root = take(g.dim), take(WORD_BYTES * 2)
        self.qk, self.q = take((heads + self.kv_heads) * g.head_size), take(heads * g.head_size)
        self.scores, self.maxima, self.exps = (take(heads * self.pitch) for _ in range(3))
        self.largest = take(heads * WORD_BYTES)
        self.numerators, self.inverses = take(2 * heads * (g.head_size + one)), take(2 * heads * one)
        self.silu, self.h3, self.diagonal = take(self.units), take(self.units), take(WORD_BYTES * self.units)
        self.squares = self.inverses if self.model.own_tables else take(2 * heads * one)
        self.logits = take(GROUP * self.logit_groups)
        self.k_bytes, self.v_bytes = self.kv_heads * g.head_size, self.kv_heads * (g.head_size + one)
        self.k_pitch = self.k_bytes * self.pitch
        self.v_pitch = round_up(self.v_bytes * round_up(g.context, WORD_BYTES), 16)
        self.keys, self.values = take(self.k_pitch * self.local_layers), take(self.v_pitch * self.local_layers)
        self.narrow_bytes = end
        if end > NARROW_BYTES:
            raise ShapeError(f"{self.model.name}: {end} bytes of buffers, keys and values, a tile has {NARROW_BYTES}")

    @property
    def split_values(self) -> bool:
        """The ones of values have rows of their own, in front of the channels': both together have too many columns."""
        return self.g.head_size + ONE_COLUMNS > GROUP

    @property
    def channel_row(self) -> int:
        """Row of the channels of a head's values behind its first."""
        return self.v_rows_per_head // 2 if self.split_values else 0

    # wide memory, from the top

    def _scratch(self) -> None:
        g, floor = self.g, INPUT_FIFO_ROW

        def take(rows: int) -> int:
            nonlocal floor
            floor -= rows
            return floor

        words, quads = g.dim // WORD_BYTES, g.quads(g.context)
        self.output_packets = ceil_div(self.outputs, ROW_BYTES)
        self.norm_rows = next(n for n in range(1, words + 1) if words % (4 * n) == 0 and words // n <= GROUP)
        attended = self.head_tiles * ceil_div(self.heads * g.head_size, ROW_BYTES)
        hidden = ceil_div(g.hidden, GROUP) * ceil_div(self.units, ROW_BYTES) if self.spread else 0
        self.arrivals = take(max(self.output_tiles * self.output_packets, attended, hidden))
        self.rotation = take(g.head_size // WORD_BYTES)
        self.packed = take(max(ceil_div(n, ROW_BYTES) for n in (self.outputs, self.heads * g.head_size, self.units)))
        self.scratch = take(max(words + self.norm_rows, quads * self.heads, self.units // WORD_BYTES))
        self.numerator_rows = take(self.heads)
        self.k_rows_per_head = g.head_size // WORD_BYTES * ceil_div(g.context, GROUP)
        self.v_rows_per_head = quads * (1 + self.split_values)
        layer_rows = self.kv_heads * (self.k_rows_per_head + self.v_rows_per_head)
        self.append = self.form.keep and (not self.spread or layer_rows * self.local_layers <= self._spare(floor))
        kept = self.local_layers if self.append else 1
        self.k_rows = take(kept * self.kv_heads * self.k_rows_per_head)
        self.v_rows = take(kept * self.kv_heads * self.v_rows_per_head)
        self.floor = floor

    def _spare(self, floor: int) -> int:
        """Rows of a tile that stay free if the parameters are spread evenly."""
        rows = self.output_tiles * self.output_rows + self.head_tiles * self.head_rows
        rows += ceil_div(self.g.hidden, GROUP) * self.ffn_rows(GROUP)
        return floor - CONSTANT_ROWS - ceil_div(rows * len(self.model.blocks) * 21, TILES * 20)

    def key_row(self, local: int) -> int:
        """First row of a layer's keys."""
        return self.k_rows + (self.kv_heads * self.k_rows_per_head * local if self.append else 0)

    def value_row(self, local: int) -> int:
        """First row of a layer's values."""
        return self.v_rows + (self.kv_heads * self.v_rows_per_head * local if self.append else 0)

    # parameters, from row 0

    @property
    def qk_outputs(self) -> int:
        """Channels of a tile's queries and keys."""
        return (self.heads + self.kv_heads) * self.g.head_size

    @property
    def head_rows(self) -> int:
        """Rows of a layer's queries, keys and values on a tile; three more hold multipliers in a loop."""
        g = self.g
        return 3 * self.form.loop + fc_rows(self.qk_outputs, g.dim) + fc_rows(self.v_bytes, g.dim, 2)

    @property
    def output_rows(self) -> int:
        """Rows of a layer's wo and w2 on a tile."""
        g, n = self.g, self.outputs
        return fc_rows(n, g.dim + n) + fc_rows(n, g.hidden + n)

    @property
    def wo_rows(self) -> int:
        """Rows of the largest share of wo, behind which w2 begins."""
        return fc_rows(self.outputs, self.g.dim + self.outputs)

    def ffn_rows(self, units: int) -> int:
        """Rows of w1 and w3 for that many hidden units."""
        return 2 * fc_rows(units, self.g.dim)

    @property
    def logit_groups(self) -> int:
        """Groups of 64 words that a tile computes."""
        head = self.model.classifier
        return 0 if head is None or not self.form.logits else ceil_div(len(head.weights), GROUP * TILES)

    @property
    def logit_tiles(self) -> range:
        """Tiles with words of the classifier."""
        head = self.model.classifier
        return range(
            0 if head is None or not self.logit_groups else ceil_div(len(head.weights), GROUP * self.logit_groups)
        )

    def _tile_layouts(self) -> tuple[Layout, ...]:
        row = CONSTANT_ROWS
        heads, outputs = row, row + self.head_rows
        ffn = outputs + self.output_rows
        self.logit_row = ffn + self.ffn_rows(self.g.hidden)
        self.fill = [self.logit_row + self.logit_rows] * TILES
        g = self.g
        return tuple(
            Layout((Share(t, heads, 0, g.heads),), (Share(t, outputs, 0, g.dim),), (Share(t, ffn, 0, g.hidden),), 0)
            for t in range(len(self.model.blocks))
        )

    @property
    def logit_rows(self) -> int:
        """Rows of a tile's part of the classifier."""
        return fc_rows(GROUP * self.logit_groups, self.g.dim)

    def _spread_layouts(self) -> tuple[Layout, ...]:
        g, layers = self.g, len(self.model.blocks)
        self.logit_row = CONSTANT_ROWS
        self.fill = [CONSTANT_ROWS + self.logit_rows] * TILES

        def claim(tiles: int, rows: int) -> tuple[list[int], int]:
            chosen = sorted(sorted(range(TILES), key=lambda t: (self.fill[t], t))[:tiles])
            start = max(self.fill[t] for t in chosen)
            for t in chosen:
                self.fill[t] = start + rows * layers
            return chosen, start

        outs, out_row = claim(self.output_tiles, self.output_rows)
        heads, head_row = claim(self.head_tiles, self.head_rows)
        layouts = []
        for k in range(layers):
            o = [
                Share(t, out_row + k * self.output_rows, i * self.outputs, min(self.outputs, g.dim - i * self.outputs))
                for i, t in enumerate(outs)
            ]
            h = [Share(t, head_row + k * self.head_rows, i * self.heads, self.heads) for i, t in enumerate(heads)]
            layouts.append(Layout(tuple(h), tuple(o), self._claim_ffn(), k))
        return tuple(layouts)

    def _claim_ffn(self) -> Shares:
        """Hidden units of a layer to the emptiest tiles."""
        left, first = self.g.hidden, 0
        taken: list[tuple[int, int, int]] = []
        for t in sorted(range(TILES), key=lambda t: (self.fill[t], t)):
            room = (self.floor - self.fill[t]) // self.ffn_rows(GROUP) * GROUP
            count = min(left, self.units, room)
            if count > 0:
                taken.append((count, self.fill[t], t))
                self.fill[t] += self.ffn_rows(count)
                left -= count
        if left:
            raise ShapeError(
                f"{self.model.name}: {left} of {self.g.hidden} hidden units of a layer find no room; tiles are filled "
                f"to rows {min(self.fill)}..{max(self.fill)} of {self.floor}"
            )
        shares = []
        for count, row, t in sorted(taken, key=lambda item: (-item[0], item[1:])):
            shares.append(Share(t, row, first, count))
            first += count
        return tuple(shares)

    def held(self, layer: int, name: str, position: int) -> tuple[Shares, int, tuple[tuple[int, int], ...]]:
        """Where a stage's result lies: shares of the layer, byte address, nest of (stride, count) bytes of a share that
        counts as one. ``name`` as in the bit model's stages. CodegenError for other names."""
        layout, size, words = self.layouts[layer], self.g.head_size, 4 * self.g.quads(position + 1)
        keys = self.keys + self.k_pitch * layout.local + self.k_bytes * position
        values = self.values + self.v_pitch * layout.local + self.v_bytes * position
        found: dict[str, tuple[Shares, int, tuple[tuple[int, int], ...]]] = {
            "normal": (layout.heads, self.normal, ((1, self.g.dim),)),
            "qk": (layout.heads, self.qk, ((1, self.qk_outputs),)),
            "v": (layout.heads, values, ((1, self.v_bytes),)),
            "q": (layout.heads, self.q, ((1, self.heads * size),)),
            "k": (layout.heads, keys, ((1, self.k_bytes),)),
            "scores": (layout.heads, self.scores, ((1, words), (self.pitch, self.heads))),
            "weights": (layout.heads, self.exps, ((1, words), (self.pitch, self.heads))),
            "attention": (layout.heads, self.own_attended, ((1, self.heads * size),)),
            "x2": (layout.outputs, self.x2_share, ()),
            "normal2": (layout.ffn, self.normal, ((1, self.g.dim),)),
            "a": (layout.ffn, self.silu, ()),
            "h3": (layout.ffn, self.h3, ()),
            "m": (layout.ffn, self.own_product, ()),
            "y": (layout.outputs, self.x_share, ()),
        }
        if name not in found:
            raise CodegenError(f"no stage is called {name!r}; there are {', '.join(found)}")
        return found[name]

    @cached_property
    def kv_tiles(self) -> dict[tuple[int, int], int]:
        """(first key/value head, first layer) of every set of caches -> tiles that hold it, in the order of the host's
        streams; a set has ``kv_heads`` heads and ``local_layers`` layers."""
        found: dict[tuple[int, int], int] = {}
        group = self.g.heads // self.g.kv_heads
        for layer in range(0, len(self.layouts), self.local_layers):
            for share in self.layouts[layer].heads:
                key = (share.first // group, layer)
                found[key] = found.get(key, 0) | 1 << share.tile
        return found

    @cached_property
    def head_mask(self) -> int:
        """Tiles with heads of any layer."""
        return mask_of({s.tile for layout in self.layouts for s in layout.heads})

    @cached_property
    def output_mask(self) -> int:
        """Tiles with outputs of any layer."""
        return mask_of({s.tile for layout in self.layouts for s in layout.outputs})
