"""Code lines per package, as tinygrad counts them: lines with a token that is not a comment, a docstring or a newline.

Exits with 1 above the budget. The budget is raised only by a commit that says why.
"""

from __future__ import annotations

import io
import sys
import token
import tokenize
from collections import defaultdict
from pathlib import Path

BUDGET = 31_500
SILENT = {tokenize.COMMENT, tokenize.NL, token.NEWLINE, token.INDENT, token.DEDENT, token.ENCODING, token.ENDMARKER}


def code_lines(source: str) -> int:
    """Lines of ``source`` that hold code; a string that stands alone as a statement is a docstring."""
    lines: set[int] = set()
    previous = token.NEWLINE
    for t in tokenize.generate_tokens(io.StringIO(source).readline):
        starts = previous in (token.NEWLINE, token.INDENT, token.DEDENT, tokenize.NL, tokenize.COMMENT, token.ENCODING)
        if t.type not in SILENT and not (t.type == token.STRING and starts):
            lines.update(range(t.start[0], t.end[0] + 1))
        previous = t.type
    return len(lines)


def main() -> int:
    root = Path(__file__).resolve().parents[1] / "coral"
    total: defaultdict[str, int] = defaultdict(int)
    for path in sorted(root.rglob("*.py")):
        part = path.relative_to(root).parts
        total["coral/" + (part[0] if len(part) > 1 else "*.py")] += code_lines(path.read_text())
    for name, lines in sorted(total.items(), key=lambda item: -item[1]):
        print(f"{name:20s} {lines:6d}")
    print(f"{'total':20s} {sum(total.values()):6d}   of {BUDGET}")
    return int(sum(total.values()) > BUDGET)


if __name__ == "__main__":
    sys.exit(main())
