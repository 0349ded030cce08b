"""A language model whose every token is one program of the Edge TPU; each result is compared with NumPy's:

MOCKCORAL=1 DEV=CORAL python examples/stories_chip.py               the simulated stick; DEV=CORAL alone: a real one
... CORAL_BOLD=1                                                    keys and values stay on the chip, layers are a loop

Without --unchecked, a result that differs from the bit model in one byte ends it with the position and the byte.
"""

from __future__ import annotations

from stories import console, one_story, opened, tell

from coral.apps.stories.chip import ChipEngine


def main() -> None:
    """One story."""
    parser = one_story("A language model writes a story, one program of the chip per token.")
    parser.set_defaults(engine="chip")
    parser.add_argument("--unchecked", action="store_true", help="do not compare with the bit model")
    options = parser.parse_args()
    model, engine = opened(options, 1)
    if isinstance(engine, ChipEngine):
        engine.check = not options.unchecked
        programs = [part.program for part in engine.parts]
        sent = sum(len(stream.data) for program in programs for stream in program.execution(1).bitstreams)
        form = programs[0].form
        kept = "kept on the chip" if form.keep else "sent with every call"
        layers = "a loop" if form.loop else "unrolled"
        console.print(f"keys and values {kept}, layers {layers}, {sent:,} bytes of instructions per token")
    tell(options, model, engine)
    if isinstance(engine, ChipEngine) and engine.check:
        console.print("every result was that of the bit model")


if __name__ == "__main__":
    main()
