"""Engines by name on a device, with what the device knows: bytes, predicted times, where weights lie.

Source: docs/stories.md, Engines.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad.device import Device

from coral import CoralError
from coral.apps.stories.blocks import BlocksEngine, placed
from coral.apps.stories.chip import ChipEngine, ChipSession
from coral.apps.stories.confirmed import ahead_confirmed, confirmed_form
from coral.apps.stories.download import address, downloaded, located
from coral.codegen.transformer import Form, Transformer, fitting, step
from coral.codegen.transformer.model import logits
from coral.devices import shared_stick
from coral.llm import checkpoint, tokenizer
from coral.llm.blocks import Blocks
from coral.llm.calibrate import observe, quantise
from coral.llm.checkpoint import Checkpoint
from coral.llm.engine import Engine, Session, TinygradEngine, Usage, Weights, calibration_stories, quantised
from coral.llm.fetch import PUBLIC, TOKENIZERS, check_hash
from coral.llm.model import Llama
from coral.llm.tokenizer import Tokenizer

ENGINES = ("float", "matmul", "blocks", "chip", "bits")
"""float: all on the host. matmul: every matrix product a uint8 layer, on the chip where the device has one. blocks:
the same in fewer calls, the feed-forward part as one. chip: a token is one program of the chip. bits: the chip's
arithmetic of that program, in NumPy on the host."""
CHIP_VOCABULARY = 1024
"""Up to so many words the classifier is part of the token's program; above, it is float on the host."""
ROOT = Path(__file__).resolve().parents[3]


class StoriesError(CoralError):
    """Files, engines or devices for stories that are not there; the message says which are."""


@dataclass(frozen=True)
class Model:
    """A checkpoint and its words."""

    name: str
    checkpoint: Checkpoint
    tokenizer: Tokenizer


def load_model(named: str | Path | None = None, words: Path | None = None, sha256: str = "") -> Model:
    """A checkpoint and its tokenizer.bin. ``named``: a file, an address, or a public model (``fetch.PUBLIC``), which is
    downloaded unless it is there. ``sha256``: of the checkpoint.

    Defaults: stories260K.bin of ``$STORIES_DIR`` or ../shared/data/stories; beside the checkpoint, tok<vocabulary>.bin,
    tokenizer<vocabulary>.bin or tokenizer.bin. StoriesError, FetchError, CheckpointError and TokenizerError, OSError.
    """
    folder = Path(os.environ.get("STORIES_DIR") or ROOT.parent / "shared" / "data" / "stories")
    url = address(named)
    path = located(url, folder, sha256) if url else Path(named or folder / "stories260K.bin")
    if not path.is_file():
        raise StoriesError(
            f"there is no checkpoint {path}. Give one of the llama2.c format (--checkpoint FILE), the name of a public "
            f"one ({', '.join(PUBLIC)}), which is downloaded, or the folder of stories260K.bin and tok512.bin in "
            "STORIES_DIR"
        )
    if sha256 and not url:
        check_hash(path, sha256)
    ck = checkpoint.load(path)
    size = ck.config.vocabulary
    names = [f"tok{size}.bin", f"tokenizer{size}.bin", "tokenizer.bin"]
    found = [file for place in (path.parent, folder) for name in names if (file := place / name).is_file()]
    if words is None and not found:
        if not url or size not in TOKENIZERS:
            raise StoriesError(
                f"no tokenizer of {size} words beside {path} ({', '.join(names)}); name one: --tokenizer"
            )
        downloaded(TOKENIZERS[size], words := path.with_name(names[0]), check=lambda file: tokenizer.load(file, size))
    return Model(path.stem, ck, tokenizer.load(words or found[0], size))


def open_engine(name: str, model: Model, device: str | None = None) -> Engine:
    """An engine of ``ENGINES`` on a tinygrad device (default: DEV's). StoriesError; errors of the device."""
    place = device or Device.DEFAULT
    if name not in ENGINES:
        raise StoriesError(f"there is no engine {name!r}, only {', '.join(ENGINES)}")
    if name in ("chip", "bits"):
        return _whole(name, model, place)
    if name == "blocks":
        runtime = Device[place].chip if place.startswith("CORAL") else None  # pyright: ignore[reportAttributeAccessIssue]
        return BlocksEngine(name, Blocks(model.checkpoint, calibration_stories(model.checkpoint)), runtime)
    decoder = Llama(model.checkpoint, place)
    if name == "float":
        return TinygradEngine(name, decoder)
    return MatmulEngine(name, quantised(decoder, calibration_stories(model.checkpoint)))


def _whole(name: str, model: Model, place: str) -> Engine:
    ck = model.checkpoint
    classifier = ck.config.vocabulary <= CHIP_VOCABULARY
    ranges, form = observe(ck, calibration_stories(ck)), Form(logits=classifier)
    decoder = fitting(quantise(ck, ranges, model.name, classifier=classifier), form)
    if name == "bits":
        return BitEngine(name, ck, decoder, form)
    if not place.startswith("CORAL"):
        raise StoriesError(f"engine 'chip' needs a stick or the simulated one, not {place}; 'bits' computes the same")
    kind = "sim" if _simulated(place) else "usb"
    form = confirmed_form(decoder, logits=classifier, simulated=kind == "sim")
    stick = shared_stick(kind, int(place.partition(":")[2] or 0))
    ahead = ahead_confirmed(simulated=kind == "sim")
    engine = ChipEngine(name, ck, decoder, stick, form, ahead=ahead)
    if engine.streamed_bytes or engine.config != ck.config:
        warnings.warn(
            f"{model.name}: {len(engine.parts)} programs per token, {engine.streamed_bytes:,} bytes of parameters sent "
            f"with each; context {engine.config.context} of {ck.config.context} words",
            stacklevel=3,
        )
    return engine


class BitEngine(ChipEngine):
    """The results of :class:`~coral.apps.stories.chip.ChipEngine`, by its bit model."""

    def __init__(self, name: str, ck: Checkpoint, model: Transformer, form: Form) -> None:
        self.name, self.checkpoint, self.model, self.form = name, ck, model, form
        self.config = replace(ck.config, context=model.geometry.context)

    def compute(self, session: ChipSession, x: np.ndarray, position: int) -> np.ndarray:
        """See there."""
        y = step(self.model, x, session.cache, position)
        return logits(self.model, y) if self.form.logits else y

    def usage(self) -> Usage:
        """No chip takes part."""
        return Usage()

    def weights(self) -> list[Weights]:
        """No chip takes part."""
        return []


class Both:
    """One engine for single stories, another for several at once, on the same device."""

    def __init__(self, single: Engine, several: Engine) -> None:
        self.single, self.several, self.name, self.config = single, several, single.name, single.config
        self._last = single

    def _for(self, rows: int) -> Engine:
        return self.single if rows == 1 else self.several

    def session(self, rows: int) -> Session:
        """See :class:`~coral.llm.engine.Engine`."""
        self._last = self._for(rows)
        return self._last.session(rows)

    def session_bytes(self, rows: int) -> int:
        """See :class:`~coral.llm.engine.Engine`."""
        return self._for(rows).session_bytes(rows)

    def usage(self) -> Usage:
        """Of both."""
        return self.single.usage().plus(self.several.usage())

    def weights(self) -> list[Weights]:
        """Of the one that began a story last."""
        return self._last.weights()


class MatmulEngine(TinygradEngine):
    """The uint8 model, with what its device tells about the chip."""

    @property
    def _chip(self) -> Any:
        device = Device[self.model.device]
        return getattr(device, "chip", None)

    def compiled(self, rows: int) -> Any:
        """As the engine of plain tinygrad; layers go to the chip even where the host would be faster, unless
        CORAL_PLACE says otherwise."""
        chosen = "CORAL_PLACE" in os.environ
        os.environ.setdefault("CORAL_PLACE", "chip")
        try:
            return super().compiled(rows)
        finally:
            if not chosen:
                del os.environ["CORAL_PLACE"]

    def usage(self) -> Usage:
        """See :class:`~coral.llm.engine.Engine`. All of the process's calls on this device count."""
        if self._chip is None:
            return Usage()
        from coral.backend import stats

        chip = self._chip.stats
        return Usage(chip.calls, chip.to_chip_bytes, chip.output_bytes, chip.predicted_seconds, stats().chip_seconds)

    def weights(self) -> list[Weights]:
        """See :class:`~coral.llm.engine.Engine`."""
        if self._chip is None:
            return []
        names = {_address(layer.weight_codes): name for name, layer in self._layers()}
        return placed(self._chip, lambda key: next((names[n] for n in _integers(key) if n in names), None))

    def _layers(self) -> Iterator[tuple[str, Any]]:
        for number, block in enumerate(self.model.blocks):
            parts = {"qkv": block.qkv.linear, "wo": block.wo, "w1 w3": block.w13.linear, "w2": block.w2}
            yield from ((f"{number} {part}", layer) for part, layer in parts.items())
        yield "classifier", self.model.classifier


def _address(tensor: Any) -> int:
    return tensor.uop.base.buffer.ensure_allocated()._buf.va_addr


def _integers(key: Any) -> Iterator[int]:
    if isinstance(key, int):
        yield key
    elif isinstance(key, tuple):
        for part in key:
            yield from _integers(part)


def where(device: str | None = None) -> str:
    """What the device is, in words."""
    place = device or Device.DEFAULT
    if not place.startswith("CORAL"):
        return f"this computer's processor ({place}); no Edge TPU"
    return "simulated stick (software, no hardware)" if _simulated(place) else "Coral USB Accelerator"


def _simulated(place: str) -> bool:
    from coral.backend.device import SIMIface

    return isinstance(getattr(Device[place], "iface", None), SIMIface)
