"""Writes the matrix of docs/reference/combinations.md from the table of pairs.

scripts/gen-combinations           write the section
scripts/gen-combinations --check   exit with 1 where the section is not what the table says
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from abilities import ABILITIES, expected, pairs, runs

__all__ = ["DOCUMENT", "main", "section"]

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "reference" / "combinations.md"
_BEGIN: Final = "<!-- begin matrix: scripts/gen-combinations writes it -->\n"
_END: Final = "<!-- end matrix -->\n"
_MARKS: Final = {"works": "W", "slower": "S", "refused": "R", "none": "–"}


def section() -> str:
    """Return the matrix, and a line for each pair that does not simply work."""
    names = list(ABILITIES)
    lines = ["| | ability | " + " | ".join(str(number) for number in range(2, len(names) + 1)) + " |"]
    lines.append("|---|---|" + "---|" * (len(names) - 1))
    for row, first in enumerate(names[:-1]):
        cells = [_mark(first, second) if row < column else "" for column, second in _later(names)]
        lines.append(f"| {row + 1} | {ABILITIES[first].title}: `{ABILITIES[first].key}` | {' | '.join(cells)} |")
    last = ABILITIES[names[-1]]
    lines.append(f"| {len(names)} | {last.title}: `{last.key}` |" + " |" * (len(names) - 1))
    lines += ["", "| pair | what happens | |", "|---|---|---|"]
    for first, second in pairs():
        found = expected(first, second)
        if found.outcome != "works":
            pair = f"{ABILITIES[first].title} + {ABILITIES[second].title}"
            detail = f"`{found.detail}`" if found.outcome == "slower" else found.detail.replace(".*", "...")
            lines.append(f"| {pair} | {_MARKS[found.outcome]} | {detail} |")
    return "\n".join(lines) + "\n"


def _mark(first: str, second: str) -> str:
    found = expected(first, second)
    shown = runs(first, second) or found.test
    return _MARKS[found.outcome] if shown or found.outcome != "works" else "w"


def _later(names: Sequence[str]) -> list[tuple[int, str]]:
    return list(enumerate(names))[1:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the section, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(arguments).check
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        print(f"{DOCUMENT.name} has no section between '{_BEGIN.strip()}' and '{_END.strip()}'", file=sys.stderr)
        return 1
    wanted = f"{before}{_BEGIN}{section()}{_END}{after}"
    if check:
        if wanted != text:
            print(
                "docs/reference/combinations.md differs from its table; run scripts/gen-combinations", file=sys.stderr
            )
        return int(wanted != text)
    DOCUMENT.write_text(wanted, encoding="utf-8")
    return 0
