"""Instructions of the scalar core: bundles, control flow, fences, host streams."""

from __future__ import annotations

from enum import IntEnum

from coral.isa.families import Repeat, SignalSpec, WaitSpec, WalkSpec
from coral.isa.fields import Field, Must, ScalarCounter
from coral.isa.tile import Predicated


class AluOp(IntEnum):
    """``alu_op & 0x1f``; with 0x20 the second operand is the immediate."""

    NONE, ADD, SUB, AND, OR, XOR, SHL, SHR, ASR = range(9)
    EQ, NE, GT, LT, GEU, GE = range(9, 15)
    MOV, I2F, F2I, FADD, FSUB, FMUL, FMAX, FMIN = range(15, 23)


class AluFlag(IntEnum):
    """Bits of ``alu_op`` above the operation."""

    IMMEDIATE = 5


IMMEDIATE = 1 << AluFlag.IMMEDIATE
"""Flag of ``alu_op``: the second operand is ``alu_imm`` itself, not the register of that number."""


class StoreOp(IntEnum):
    """``st_op``: the store and host-DMA slot of a bundle."""

    NONE, STORE, STORE_AT, STORE_INC, PUSH, DESCRIPTOR, ISSUE = range(0, 13, 2)


class LoadMode(IntEnum):
    """``ld_mode``: the load slot of a bundle."""

    NONE, LOAD, LOAD_AT, LOAD_INC = range(4)


class SfuOp(IntEnum):
    """``sfu_op``: the special-function slot of a bundle."""

    NONE, RECIPROCAL, EXP2 = 0, 2, 3


class ScalarUnit(IntEnum):
    """Bits of a scalar fence's ``idle_mask``."""

    AVDATA_POP, PARAMETER_POP, INFEED, OUTFEED, PIPELINE = range(5)


class Source(IntEnum):
    """``stream`` of pop and infeed."""

    PARAMETERS, ACTIVATIONS, SCALAR_MEMORY = range(3)


class Tag(IntEnum):
    """Kind of a host DMA."""

    INSTRUCTIONS, INPUT, PARAMETERS, OUTPUT, INTERRUPT0 = range(5)


class Scalar(Predicated):
    """One bundle: load, store or DMA, ALU and special-function slot; all read the registers before any writes."""

    opcode = 0x20
    words = 1
    mnemonic = "scalar"
    unit = "scalar"
    ld_mode = Field(12, 2, "load: at ld_addr, at a register, or at a register that then advances", names=LoadMode)
    ld_dst = Field(14, 5, "load destination", "s-reg")
    ld_addr = Field(19, 12, "word address (mode 1), or register + increment << 5 (modes 2, 3)")
    st_op = Field(
        31, 5, "store (as the load modes), push to the host, write a descriptor word, issue it", names=StoreOp
    )
    st_addr = Field(36, 13, "word address, register + increment << 5, or descriptor word")
    st_src = Field(49, 5, "stored register", "s-reg")
    alu_op = Field(54, 6, "operation; IMMEDIATE: the second operand is alu_imm", names=AluOp, bit_names=AluFlag)
    alu_dst = Field(60, 5, "destination register; comparisons: predicate number", "reg")
    alu_src = Field(65, 5, "first operand", "s-reg")
    alu_imm = Field(70, 32, "immediate, or register number; base-address relocations patch it")
    sfu_op = Field(102, 3, "reciprocal or 2^x, float32", names=SfuOp, mark="I")
    sfu_src = Field(105, 5, "special-function operand", "s-reg")
    sfu_dst = Field(110, 5, "special-function destination", "s-reg")
    r115 = Must(115, 13)


class Halt(Predicated):
    """Ends a bitstream."""

    opcode = 0x21
    words = 1
    mnemonic = "halt"
    unit = "scalar"
    r12 = Must(12, 2)
    code = Field(14, 5, "4: program complete; 1 or 0: the next bitstream continues it", mark="I")
    r19 = Must(19, 109)


class Branch(Predicated):
    """Continues at the branch's own word + offset."""

    opcode = 0x22
    words = 1
    mnemonic = "branch"
    unit = "scalar"
    cond_en = Field(12, 1, "1: conditional", "flag")
    cond_reg = Field(13, 3, "predicate register", "p-reg")
    cond_val = Field(16, 1, "taken if p[cond_reg] == cond_val", "flag")
    offset = Field(17, 15, "words from the branch to its target", "128-bit words", kind="int")
    r32 = Must(32, 1)
    rel = Field(33, 1, "1 in every program examined; no effect known", "flag", default=1, mark="U")
    r34 = Must(34, 94)


class Loop(Predicated):
    """Runs the next ``body`` words ``count`` times."""

    opcode = 0x23
    words = 1
    mnemonic = "loop"
    unit = "scalar"
    count = Field(12, 16, "iterations", "iterations")
    body = Field(28, 12, "words of the body", "128-bit words")
    r40 = Must(40, 88)


class ScalarFence(Predicated):
    """Waits for idle scalar units, tokens of tiles and scalar counters; sets scalar counters."""

    opcode = 0x24
    words = 2
    mnemonic = "scalar_fence"
    unit = "scalar"
    tile_mask = Field(12, 16, "0xffff with token_wait or wait_mask, else 0; no effect found", "bitmap", mark="U")
    r28 = Must(28, 4)
    ctr_mask = Field(
        32, 9, "counters waited for if wait_mask has them, else set to ctr_value", "bitmap", bit_names=ScalarCounter
    )
    ctr_value = Field(41, 16, "value set", "count")
    token_wait = Field(57, 1, "1: take a token of every tile of token_tiles", "flag")
    r58 = Must(58, 15)
    token_tiles = Field(73, 16, "tiles whose token is taken", "bitmap")
    r89 = Must(89, 4)
    thresholds = Repeat(93, 16, 9, "thr{}", "threshold for scalar counter {}", "count")
    wait_mask = Field(237, 9, "counters of ctr_mask waited for: counter c >= thr<c>", "bitmap", bit_names=ScalarCounter)
    idle_mask = Field(246, 5, "units that must be idle", "bitmap", bit_names=ScalarUnit, mark="I")
    r251 = Must(251, 5)


class Pop(Predicated):
    """Takes units of a host stream into the staging buffer."""

    opcode = 0x25
    words = 2
    mnemonic = "pop"
    unit = "pop"
    stream = Field(12, 1, "activations (8-byte units) or parameters (64-byte units)", "flag", names=Source)
    buf = WalkSpec("buf", 13, 3, 15, 16, 15, 2, 2, "staging unit", "staging buffer write")
    sig_pop = SignalSpec(174, 2, "AVDATA_POP or PARAMETER_POP", "buf")
    wait_records = WaitSpec(177, 2, 4, 2, False, ScalarCounter)
    r255 = Must(255, 1)


class Infeed(Predicated):
    """Sends staging-buffer units, or words of scalar memory, as ring packets to ring consumer 0."""

    opcode = 0x26
    words = 4
    mnemonic = "infeed"
    unit = "infeed"
    stream = Field(12, 2, "parameters (64 B units), activations (8 B units) or scalar memory (words)", names=Source)
    buf = WalkSpec("buf", 14, 3, 20, 21, 20, 2, 2, "staging unit", "staging buffer or scalar memory read")
    r225 = Must(225, 83)
    smem_308 = Field(308, 2, "3 exactly with stream 2; meaning unknown", mark="U")
    r310 = Must(310, 1)
    sig_infeed = SignalSpec(311, 2, "AVDATA_INFEED, PARAMETER_INFEED or SCALAR_INFEED", "buf")
    wait_records = WaitSpec(314, 2, 4, 2, False, ScalarCounter)
    hdr_on = Field(392, 1, "1 in every program examined; no effect known", "flag", default=1, mark="U")
    r393 = Must(393, 16)
    dest_mask = Field(409, 16, "tiles that receive the packets", "bitmap")
    r425 = Must(425, 9)
    lane_words = Field(434, 4, "words per lane, minus one", "words-1")
    lanes = Field(438, 2, "lanes per packet, minus one", "lanes-1")
    r440 = Must(440, 72)


class Outfeed(Predicated):
    """Takes ring packets to the host's output DMA or to scalar memory."""

    opcode = 0x27
    words = 2
    mnemonic = "outfeed"
    unit = "outfeed"
    dst = WalkSpec("dst", 12, 3, 15, 16, 15, 2, 2, "8 B (host) or 4 B (scalar memory)", "destination")
    sig_outfeed = SignalSpec(173, 2, "RING_OUTFEED", "dst")
    wait_records = WaitSpec(176, 1, 4, 2, False, ScalarCounter)
    r215 = Must(215, 7)
    pkt_words = Field(222, 6, "words per packet, minus one", "words-1", default=63)
    to_host = Field(228, 1, "1: host DMA, 0: scalar memory", "flag")
    r229 = Must(229, 27)


class Start(Predicated):
    """First word of a bitstream."""

    opcode = 0x3E
    words = 1
    mnemonic = "start"
    unit = "scalar"
    r12 = Must(12, 7)
    body_bits = Field(19, 32, "128 * words between start and end", "bit")
    r51 = Must(51, 77)


class End(Predicated):
    """Last word of a bitstream."""

    opcode = 0x3F
    words = 1
    mnemonic = "end"
    unit = "scalar"
    r12 = Must(12, 7)
    body_bits = Field(19, 32, "128 in every program examined; no effect found", "bit", default=128, mark="U")
    r51 = Must(51, 77)
