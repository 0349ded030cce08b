"""A web page to write stories with a language model on the Edge TPU, and OpenAI's interface:

    MOCKCORAL=1 DEV=CORAL python examples/server.py     then open http://127.0.0.1:8642/; DEV=CORAL alone: a real stick

The same as `coral serve`, which has more options. CHIP=1: a whole token is one program of the chip.
"""

from __future__ import annotations

import argparse
import os

from coral.apps.stories.serve import PORT, serve

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serves a language model.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--engine", default="chip" if os.environ.get("CHIP", "0") != "0" else "matmul")
    serve(**vars(parser.parse_args()))
