"""A loop that kills a real server with a pool under load, and checks it against an expected state in a file.

After each restart every acknowledged write is present with its bytes, and every acknowledged removal holds. A write in
flight at the kill has the old value, the new value, or none. No eviction may occur: the devices have space for all.
The model is RocksDB's db_crashtest. The journal of the expected state also survives this program, so a later run can
inspect or continue a loop.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from callers import Caller, load
from nodes import MIB, Storage
from outcomes import ABSENT, Expected, Outcome, Tally

_KEYS: Final = 90
_CLIENTS: Final = 3


class Journal(Expected):
    """An expected state with a journal. Each change is in the file before the operation starts."""

    def __init__(self, path: Path, seed: int, **options: Any) -> None:
        """Read the state from the file if it exists."""
        super().__init__(seed, **options)
        self._file = -1
        for line in path.read_text().splitlines() if path.exists() else []:
            what, key, version = line.split("\t")
            known = self.of(key)
            if what == "begin":
                known.possible.add(int(version))
                known.next_version = int(version) + 1
            elif what == "end":
                known.possible = {int(version)}
            else:
                known.possible.add(ABSENT)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _note(self, what: str, key: str, version: int) -> None:
        os.write(self._file, f"{what}\t{key}\t{version}\n".encode())

    def begin(self, key: str) -> int:
        self._note("begin", key, self.of(key).next_version)
        return super().begin(key)

    def acknowledged(self, key: str, version: int) -> None:
        super().acknowledged(key, version)
        self._note("end", key, version)

    def removing(self, key: str) -> None:
        self._note("maybe absent", key, ABSENT)
        super().removing(key)

    def unknown(self, key: str) -> None:
        self._note("maybe absent", key, ABSENT)
        super().unknown(key)

    def close(self) -> None:
        os.close(self._file)


def _provoke(storage: Storage, callers: Sequence[Caller], keys: Sequence[str], chance: random.Random) -> None:
    """Run operations for a short time, until the server's death."""
    with load(callers, keys, chance.randrange(1 << 30)):
        time.sleep(chance.choice([0.02, 0.1, 0.3, 0.8]) * chance.random())
        storage.kill()
    if chance.random() < 0.2:  # a second kill, during recovery
        storage.start_only()
        time.sleep(chance.uniform(0.2, 1.2))
        storage.kill()


def run(folder: Path, kills: int, seed: int, ends: float | None = None) -> dict[str, Any]:
    """Kill a server a number of times or until a time of the monotonic clock, at least once; return the report."""
    chance = random.Random(seed)
    tally = Tally()
    expected = Journal(folder / "expected", seed, sizes=(9, 150, 4_000, 70_000, 300_000))
    storage = Storage("pool", folder, device_bytes=64 * MIB)
    keys = [f"key {number}" for number in range(_KEYS)]
    done, starts = 0, []
    began = time.monotonic()
    callers = [Caller(storage.port, expected, tally) for _ in range(_CLIENTS)]
    try:
        while done < kills and not tally.failed and (not done or ends is None or time.monotonic() < ends):
            since = time.monotonic()
            storage.start()
            starts.append(time.monotonic() - since)
            callers[0].verify()
            if not tally.failed:
                _provoke(storage, callers, keys, chance)
                done += 1
        if not tally.failed:
            storage.start()
            callers[0].verify()
            if not storage.stop():
                tally.note(Outcome.HANG, "the server does not stop on SIGTERM")
    finally:
        for caller in callers:
            caller.close()
        storage.close()
        expected.close()
    command = [sys.executable, "-m", "shadowserve_tools", "verify", *map(str, storage.paths)]
    verified = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    return {
        "kills": done,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "outcomes": tally.as_json(),
        "examples": {outcome.value: tally.examples(outcome) for outcome in (Outcome.WRONG, Outcome.HANG)},
        "start seconds": {"median": round(statistics.median(starts), 2), "most": round(max(starts), 2)},
        "verify": "sound" if verified.returncode == 0 else (verified.stdout + verified.stderr)[-2000:],
        "complaints": storage.complaints()[:5],
        "passed": not tally.failed and verified.returncode == 0 and not storage.complaints(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Kill a storage server repeatedly and check its data.")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--folder", type=Path, help="working folder; kept and continued")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="crash-loop-"))
    folder.mkdir(exist_ok=True, parents=True)
    report = run(folder, options.kills, options.seed)
    print(json.dumps(report, indent=1))
    if report["passed"] and options.folder is None:
        shutil.rmtree(folder)
    elif not report["passed"]:
        print(f"the remaining files are in {folder}", file=sys.stderr)
    return int(not report["passed"])
