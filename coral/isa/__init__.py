"""The instruction set of the Edge TPU ("beagle"), described once; everything else is derived from the description.

Source: docs/isa/README.md and the generated page of each instruction.
"""

# ruff: noqa: F401, I001 - the public names, by module
from coral.isa.core import Instruction
from coral.isa.families import Family, Repeat, SignalSpec, WaitSpec, WalkSpec
from coral.isa.fields import DecodeError, Field, FieldError, IsaError, Must, ScalarCounter, TileCounter, f32_bits
from coral.isa.op import NluLoad, Op, OpFormat, OpMax, OpResize, OpSum
from coral.isa.scalar import IMMEDIATE, AluFlag, AluOp, LoadMode, ScalarUnit, SfuOp, Source, StoreOp, Tag
from coral.isa.scalar import Branch, End, Halt, Infeed, Loop, Outfeed, Pop, Scalar, ScalarFence, Start
from coral.isa.stream import BY_MNEMONIC, BY_OPCODE, CLASSES, WORD_BYTES, Placed
from coral.isa.stream import decode, decode_one, encode, iter_decode
from coral.isa.tile import FenceUnit, Predicated, TileInstruction
from coral.isa.tile import MeshEast, MeshNorth, MeshSouth, MeshWest, N2w, RingRecv0, RingRecv1, RingSend, TileFence, W2n
from coral.isa.walk import Wait, Walk, signed16
