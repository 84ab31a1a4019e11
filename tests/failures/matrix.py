"""The failure matrix: runs all cases with real processes, counts outcomes, writes the full matrix and a summary."""

import argparse
import fnmatch
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cases_attacks
import cases_bucket
import cases_clients
import cases_dataplane
import cases_devices
import cases_engines
import cases_pages
import cases_preemption
import cases_routers
from cases import CASES, Case, Row, run_case
from outcomes import Outcome

_PARTS = (
    cases_clients, cases_devices, cases_pages, cases_preemption, cases_dataplane, cases_engines, cases_routers,
    cases_bucket, cases_attacks,
)  # fmt: skip
"""The imports of these modules register all cases in CASES."""

_JOBS = min(2 * (os.cpu_count() or 1), 8)
"""Cases mostly wait for a stall, a deadline or a start, so more cases than cores run at a time."""

_NOTABLE = (Outcome.WRONG, Outcome.HANG, Outcome.MISSED, Outcome.REFUSED)


def as_json(rows: Sequence[Row], seconds: float, seed: int) -> dict[str, Any]:
    return {
        "counts": {outcome.value: sum(row.tally.counts[outcome] for row in rows) for outcome in Outcome},
        "seed": seed,
        "seconds": round(seconds),
        "command": "make failure-matrix",
        "cases": [_as_json(row) for row in rows],
    }


def _as_json(row: Row) -> dict[str, Any]:
    reasons = {outcome: found for outcome in Outcome if (found := row.tally.examples(outcome))}
    optional = {
        "measured": {name: round(value, 3) for name, value in sorted(row.tally.most.items())},
        "not tried": row.unavailable,
        "broken": row.broken,
        "complaints": row.complaints[:5],
    }
    return {
        "fault": row.case.fault,
        "what": row.case.what,
        "engine": row.case.engine,
        "name": row.case.name,
        "repetitions": row.repetitions,
        "seconds": round(row.seconds, 1),
        "outcomes": row.tally.as_json(),
        "reasons": {outcome.value: found for outcome, found in reasons.items()},
        "example reason": next((reasons[outcome][0] for outcome in _NOTABLE if outcome in reasons), ""),
        **{name: value for name, value in optional.items() if value},
    }


def _among_kept(found: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the stored matrix with new results of some cases."""
    kept: dict[str, Any] = json.loads(path.read_text())
    new = {row["name"]: row for row in found["cases"]}
    kept["cases"] = [new.pop(row["name"], row) for row in kept["cases"]] + list(new.values())
    kept["counts"] = {
        outcome.value: sum(row["outcomes"][outcome.value] for row in kept["cases"]) for outcome in Outcome
    }
    return kept


_HEAD = """\
# The failure matrix

`make failure-matrix` makes each fault happen to real processes with several seeds, while real clients work, and
compares every answer with what was stored. `build/failure-matrix/` then has a row for each case, with reasons.

- **right**: the stored bytes, or an acknowledgement. **refused**: an error or a closed connection within the deadline.
- **missed**: a miss that the fault explains; any other is wrong.
- **wrong**: other bytes, or a lost acknowledged write. **hang**: no end within the deadline and 30 s. Both fail a run.

"""
_COUNTS = " | ".join(outcome.value for outcome in Outcome)


def as_text(found: dict[str, Any]) -> str:
    lines = [
        f"{_HEAD}{_sums(found)} {found['seconds']} s, seed {found['seed']}.",
        "",
        f"| fault | what happens | engine | times | {_COUNTS} | memory, MiB | wait, s | an example of a reason |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["cases"]:
        measured = row.get("measured", {})
        grown, waited = (measured.get(name) for name in ("memory_MiB", "longest_wait_s"))
        lines.append(
            f"| {row['fault']} | {row['what']} | {row['engine']} | {row['repetitions']} | {_counts([row])} "
            f"| {'' if grown is None else f'{grown:.0f}'} | {'' if waited is None else f'{waited:.2f}'} "
            f"| {_reason(row)} |"
        )
    lines += [
        "",
        "For attacks: growth of the server's memory, and the longest time that another client waited for an answer.",
    ]
    return "\n".join(lines) + "\n"


def as_summary(found: dict[str, Any]) -> str:
    """Return docs/reference/failure-matrix.md: a row for each kind of fault."""
    cases = Counter(row["fault"] for row in found["cases"])
    rows = [f"| {fault} | {count} |" for fault, count in cases.items()]
    return "\n".join([_HEAD + _sums(found), "", "| fault | cases |", "|---|---|", *rows]) + "\n"


def _sums(found: dict[str, Any]) -> str:
    return (
        f"Last full run: {len(found['cases'])} cases; "
        + ", ".join(f"{found['counts'][outcome.value]:,} {outcome.value}" for outcome in Outcome)
        + "."
    )


def _counts(rows: Sequence[dict[str, Any]]) -> str:
    return " | ".join(f"{sum(row['outcomes'][outcome.value] for row in rows):,}" for outcome in Outcome)


def _reason(row: dict[str, Any]) -> str:
    reason = f"not tried: {row['not tried']}" if row.get("not tried") else str(row["example reason"])
    return reason.replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases. Return 1 if a case is wrong, hangs or cannot run."""
    parser = argparse.ArgumentParser(description="Make faults happen and judge every answer.")
    parser.add_argument("names", nargs="*", help="cases, with wildcards; by default all")
    parser.add_argument("--list", action="store_true", help="list the cases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repetitions", type=int, help="repetitions of each case, instead of its own number")
    parser.add_argument("--jobs", type=int, default=_JOBS, help="cases at a time (here: %(default)s)")
    parser.add_argument(
        "--output", type=Path, help="folder for the full matrix; a run of some cases changes their rows"
    )
    parser.add_argument("--summary", type=Path, help="file for the summary; not written after a run of some cases only")
    parser.add_argument("--keep", action="store_true", help="keep the processes' files")
    options = parser.parse_args(arguments)
    chosen = [
        case
        for case in CASES
        if not options.names or any(fnmatch.fnmatch(case.name, f"{name}*") for name in options.names)
    ]
    if options.list:
        for case in chosen:
            print(f"{case.name:34} {case.fault}: {case.what}")
        return 0
    began = time.monotonic()
    place = Path(tempfile.mkdtemp(prefix="failure-matrix-"))

    def run(case: Case) -> Row:
        row = run_case(case, place, seed=options.seed, repetitions=options.repetitions)
        print(_told(row), flush=True)
        return row

    try:
        with ThreadPoolExecutor(options.jobs) as pool:
            rows = list(pool.map(run, chosen))
    finally:
        if options.keep:
            print(f"the processes' files are in {place}")
        else:
            shutil.rmtree(place, ignore_errors=True)
    found = as_json(rows, time.monotonic() - began, options.seed)
    print(json.dumps(found["counts"]), f"{found['seconds']} s")
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        if options.names and (options.output / "failure-matrix.json").exists():
            found = _among_kept(found, options.output / "failure-matrix.json")
        (options.output / "failure-matrix.json").write_text(json.dumps(found, indent=1) + "\n")
        (options.output / "failure-matrix.md").write_text(as_text(found))
    if options.summary is not None and not options.names:
        options.summary.write_text(as_summary(found))
    return int(any(row.failed for row in rows))


def _told(row: Row) -> str:
    counts = " ".join(f"{outcome.value} {row.tally.counts[outcome]}" for outcome in Outcome)
    lines = [f"{row.case.name:34} {row.seconds:5.1f} s  {counts}"]
    for outcome in _NOTABLE:
        lines += [f"    {outcome.value}: {reason}" for reason in row.tally.examples(outcome)[:3]]
    lines += [f"    ! {problem[:400]}" for problem in [row.broken, row.unavailable, *row.complaints[:3]] if problem]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
