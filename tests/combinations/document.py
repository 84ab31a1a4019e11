"""Writes the abilities and their pairs in docs/reference/combinations.md from the table of pairs.

scripts/gen-combinations           write the section
scripts/gen-combinations --check   exit with 1 if the section differs from the table
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from abilities import ABILITIES, expected, pairs, runs

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "reference" / "combinations.md"
_BEGIN: Final = "<!-- begin matrix: scripts/gen-combinations writes it -->\n"
_END: Final = "<!-- end matrix -->\n"
_OUTCOMES: Final = {"slower": "slower path", "refused": "refused", "none": "no meaning"}


def section() -> str:
    """Return the abilities, the pairs with another outcome than ``works``, and the pairs without a test of both."""
    lines = ["| ability | configured by |", "|---|---|"]
    lines += [f"| {ability.title} | `{ability.key}` |" for ability in ABILITIES.values()]
    lines += ["", "Every pair works, except:", "", "| pair | outcome | reason |", "|---|---|---|"]
    for first, second in pairs():
        found = expected(first, second)
        if found.outcome != "works":
            pair = f"{ABILITIES[first].title} + {ABILITIES[second].title}"
            detail = f"`{found.detail}`" if found.outcome == "slower" else found.detail.replace(".*", "...")
            lines.append(f"| {pair} | {_OUTCOMES[found.outcome]} | {detail} |")
    lines += ["", "Pairs that work but have no test of both, only tests of each:", ""]
    lines += [f"- {ABILITIES[name].title}, with {_listed(name, others)}" for name, others in _untested()]
    return "\n".join(lines) + "\n"


def _listed(name: str, others: list[str]) -> str:
    """Return a list of abilities, or those that are not in it if they are fewer."""
    rest = [each.title for other, each in ABILITIES.items() if other != name and each.title not in others]
    return ", ".join(others) if len(others) <= len(rest) else " except ".join(["all others", ", ".join(rest)])


def _untested() -> list[tuple[str, list[str]]]:
    """Return pairs without a test of both. Each pair is listed under its ability with more such pairs."""
    left = [
        pair for pair in pairs() if expected(*pair).outcome == "works" and not runs(*pair) and not expected(*pair).test
    ]
    found = []
    while left:
        names = [name for pair in left for name in pair]
        most = max(ABILITIES, key=names.count)
        others = [ABILITIES[pair[most == pair[0]]].title for pair in left if most in pair]
        found.append((most, others))
        left = [pair for pair in left if most not in pair]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the section, or compare it with the table."""
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
