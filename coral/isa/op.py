"""The compute unit's instructions: multiply-accumulate, maximum, sum, resize, and the non-linear unit's table."""

from __future__ import annotations

from coral.isa.families import Repeat, SignalSpec, WaitSpec, WalkSpec
from coral.isa.fields import Field, Must, TileCounter
from coral.isa.tile import TileInstruction


class OpFormat(TileInstruction):
    """What the four 17-word compute instructions share: main loops, four walks, signals, waits, operand widths."""

    words = 17
    unit = "op"
    loops = Repeat(
        62, 14, 8, "loop_cnt{}", "iterations of main loop {}, minus one (0 is the innermost)", "iterations-1", less=1
    )
    loop_last_cnt = Field(
        174, 14, "iterations of loop 0, minus one, in the final pass of loop_last_dim", "iterations-1"
    )
    loop_last_dim = Field(188, 3, "loop whose final iteration shortens loop 0; 0: none", "dimension")
    inp = WalkSpec("in", 191, 8, 18, 19, 18, 3, 3, "byte", "narrow memory read (activations)")
    out = WalkSpec("out", 574, 8, 18, 19, 18, 3, 3, "byte", "narrow memory write (results)")
    par = WalkSpec("par", 957, 8, 14, 15, 14, 3, 3, "64 B", "wide memory read (parameters, second operand)")
    psum = WalkSpec("psum", 1260, 8, 14, 15, 14, 3, 3, "64 B", "wide memory read-modify-write (int32 partial sums)")
    sig_av = SignalSpec(1563, 4, "AVDATA", "out")
    sig_par = SignalSpec(1568, 4, "PARAMETERS", "par")
    sig_psum = SignalSpec(1573, 4, "PARTIAL_SUMS", "psum")
    wait_records = WaitSpec(1578, 6, 5, 3, False, TileCounter)
    r1824 = Must(1824, 19)
    acc_chain = Field(1843, 1, "1: the reduction spans several steps; no effect found", "flag", mark="U")
    acc_on = Field(1844, 1, "1 in every program; no effect found", "flag", default=1, mark="U")
    acc_init = Field(1845, 1, "1: accumulations start at zero; 0: they continue the partial sums at psum", "flag")
    act16 = Field(1846, 1, "activations are 16 bits wide", "flag")
    par16 = Field(1847, 1, "parameters are 16 bits wide (two byte lanes)", "flag")
    r1848 = Must(1848, 2)
    lane_off = Field(1850, 3, "bit i: multiplier i+1 of the four per column is off", "bitmap")
    par_zp_rows = Field(1853, 1, "1: weight zero points come per channel from the zp rows instead of w_zp", "flag")
    w_zp = Field(1854, 16, "zero point subtracted from parameters")
    in_zp = Field(1870, 16, "zero point subtracted from activations")
    zp_last_row = Field(1886, 12, "last row of the ring of zero-point rows", "256 B row")
    zp_row_step = Field(1898, 12, "rows between the zero-point rows of consecutive channel groups", "256 B row")
    zp_first_row = Field(1910, 12, "first zero-point row (64 int32, one per channel)", "256 B row")
    r1922 = Must(1922, 1)
    group_loop = Field(
        1923, 3, "main loop over output-channel groups; out_ch_last applies in its final iteration", "loop"
    )
    reduce_mask = Field(1926, 8, "bit k: main loop k accumulates", "bitmap")
    out_ch_last = Field(1934, 6, "channels of the last output group, minus one", "channels-1")
    out_ch = Field(1940, 6, "channels of an output group, minus one", "channels-1")
    nlu_en = Field(1946, 1, "1: results pass through the non-linear unit", "flag")
    nlu_range_reduce = Field(1947, 1, "1: argument m*4^e with m in [1,4), result scaled by 2^-e", "flag")
    out16 = Field(1948, 1, "results are 16 bits wide", "flag")
    mult = Field(1949, 32, "requantisation multiplier", "f32", kind="f32")


class _Requantise(OpFormat):
    """The output stage of 0x01, 0x02 and 0x03."""

    clamp_max = Field(1981, 32, "upper clamp, before the output zero point is added", "f32", kind="f32")
    clamp_min = Field(2013, 32, "lower clamp, before the output zero point is added", "f32", kind="f32")
    acc_offset = Field(2045, 32, "added to the accumulator before the multiplier", kind="int")
    out_zp = Field(2077, 16, "output zero point, added after clamping and rounding")
    bias_en = Field(2093, 1, "1: add the int32 bias of the scaling store", "flag")
    scale_en = Field(2094, 1, "1: multiply by the per-channel float32 of the scaling store instead of mult", "flag")
    nlu_odd = Field(2095, 2, "3: table for |x|, sign restored (TANH); 1 and 2 never seen", mark="I")
    r2097 = Must(2097, 79)


class Op(_Requantise):
    """Multiply-accumulate, requantise, copy: out = requantise(sum (in - in_zp) * (par - w_zp) + bias)."""

    opcode = 0x01
    mnemonic = "op"


class OpMax(_Requantise):
    """Maximum over the par stream (max pooling, the maximum of a softmax): out = requantise(max par)."""

    opcode = 0x02
    mnemonic = "op_max"


class OpSum(_Requantise):
    """Sum of the par stream (SUM, MEAN, the denominator of a softmax): out = requantise(sum (par - w_zp))."""

    opcode = 0x03
    mnemonic = "op_sum"


class OpResize(OpFormat):
    """Bilinear or nearest-neighbour resize of 4-byte words; only 2x upsampling was ever seen."""

    opcode = 0x05
    mnemonic = "op_resize"
    rs_x_loop = Field(1981, 3, "main loop that is the output x coordinate", "loop")
    rs_x_nearest = Field(1984, 1, "1: nearest neighbour in x", "flag")
    r1985 = Must(1985, 4)
    rs_x_start = Field(1989, 8, "source x of output 0, in quarter pixels", "1/4 pixel")
    rs_x_step = Field(1997, 16, "source x step per output, in quarter pixels", "1/4 pixel")
    rs_y_loop = Field(2013, 3, "main loop that is the output y coordinate", "loop")
    rs_y_nearest = Field(2016, 1, "1: nearest neighbour in y", "flag")
    r2017 = Must(2017, 4)
    rs_y_start = Field(2021, 8, "source y of output 0, in quarter pixels", "1/4 pixel")
    rs_y_step = Field(2029, 16, "source y step per output, in quarter pixels", "1/4 pixel")
    rs_pos_stride = Field(2045, 32, "distance of neighbouring source positions in x", "byte")
    rs_row_stride = Field(2077, 16, "distance of source rows", "byte")
    rs_nearest = Field(2093, 1, "1: nearest neighbour", "flag")
    r2094 = Must(2094, 82)


class NluLoad(TileInstruction):
    """Loads the non-linear unit: 8 segments of a quartic c0 + c1 x + ... + c4 x^4, and the 7 breakpoints."""

    opcode = 0x19
    words = 13
    mnemonic = "nlu_load"
    unit = "op"
    coefficients = Repeat(62, 32, 40, "c{1}_{2}", "coefficient; c<segment>_<power>", "f32", kind="f32")
    breakpoints = Repeat(1342, 32, 7, "brk{}", "breakpoint between segments {} and the next", "f32", kind="f32")
    table_mode = Field(1566, 32, "3 in every program examined; meaning unknown", mark="U")
    r1598 = Must(1598, 66)
