#!/usr/bin/env python3
"""Replays seeds of the simulation: ``tests/simulation/simulate.py SEED...``, or ``FIRST-LAST``; -v prints the trace.

-q prints failing seeds only, one line each with the command that replays it.
"""

import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).parent
AGAIN = ".venv/bin/python tests/simulation/simulate.py"
for folder in (HERE, HERE.parent / "pool", HERE.parent / "storage", HERE.parent, HERE.parents[1]):
    sys.path.insert(0, str(folder))

from scenario import simulate  # noqa: E402


def main(arguments: list[str]) -> int:
    """Run the seeds. Return the number of failures."""
    verbose = "-v" in arguments
    failures = 0
    for argument in arguments:
        if argument.startswith("-"):
            continue
        first, _, last = argument.partition("-")
        for seed in range(int(first), int(last or first) + 1):
            began = time.perf_counter()
            try:
                result = simulate(seed, verbose=verbose)
            except Exception as error:
                failures += 1
                if "-q" in arguments:
                    what = " ".join(f"{type(error).__name__}: {error}".split())
                    print(f"seed {seed}: {what[:300]}; again: {AGAIN} {seed}", flush=True)
                else:
                    traceback.print_exc()
                continue
            if verbose:
                print("".join(result.log))
            if "-q" not in arguments:
                spent = time.perf_counter() - began
                print(f"seed {seed}: {result}, {spent:.3f} s", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
