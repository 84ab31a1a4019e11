"""What only time shows: a server and a data plane under load for half an hour must not grow; and the long loops.

``make soak`` runs the leak soak, the crash loop and the simulation one after the other, and writes one JSON report.
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
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import crash_loop
from callers import Caller, Host, Prompt
from nodes import MIB, REPOSITORY, DataPlane, Storage
from outcomes import Expected, Outcome, Tally

_WARM_UP_SHARE: Final = 0.25
"""Of the time: caches and pools fill, malloc's arenas settle."""
_GROWTH_BYTES_MAX: Final = 16 * MIB
"""That the line through the samples may rise over the whole time. A leak of 64 bytes an operation would be more."""
_GROWTH_DESCRIPTORS_MAX: Final = 1.0
_PAUSE_S: Final = 0.004
"""Between operations of one client: other work on the machine goes on."""


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """Return the median of the slopes of all pairs (Theil and Sen): one outlier does not move it."""
    chosen = samples[:: max(1, len(samples) // 120)]
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for index, earlier in enumerate(chosen)
        for later in chosen[index + 1 :]
        if later[0] > earlier[0]
    ]
    return statistics.median(slopes) if slopes else 0.0


def verdict(samples: Sequence[tuple[float, float]], allowed: float) -> dict[str, Any]:
    """Return how much a figure grows over the time of its samples after the warm-up, and whether it may."""
    begins, ends = samples[0][0], samples[-1][0]
    settled = [sample for sample in samples if sample[0] >= begins + _WARM_UP_SHARE * (ends - begins)]
    growth = slope(settled) * (settled[-1][0] - settled[0][0])
    return {
        "first": settled[0][1],
        "last": settled[-1][1],
        "least": min(value for _, value in settled),
        "most": max(value for _, value in settled),
        "growth": round(growth, 2),
        "allowed": allowed,
        "samples": len(settled),
        "course": [[round(when), value] for when, value in samples[:: max(1, len(samples) // 30)]],
        "passed": growth <= allowed,
    }


def _resident(pid: int) -> float:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return float((int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE"))  # without what is shared


def _descriptors(pid: int) -> float:
    return float(len(os.listdir(f"/proc/{pid}/fd")))


def _redis_work(caller: Caller, keys: Sequence[str], seed: int, stopped: threading.Event) -> None:
    chance = random.Random(seed)
    while not stopped.is_set():
        caller.step(chance.choice(keys), chance)
        if chance.random() < 0.005:
            caller.reconnect()
        time.sleep(_PAUSE_S)


def _host_work(address: str, tally: Tally, seed: int, stopped: threading.Event) -> None:
    """Store and fetch ever new prompts: the store is full most of the time."""
    chance = random.Random(seed)
    host, recent = Host(address, tally, deadline_s=60), []
    number = 0
    while not stopped.is_set():
        if len(recent) < 4 or chance.random() < 0.2:
            recent = [*recent[-7:], Prompt(f"{seed}/{number}", 6)]
            number += 1
            host.store(recent[-1])
        else:
            host.fetch(chance.choice(recent), losable="evicted to make room")
        if number % 50 == 49:  # a host that goes and comes again
            host.leave()
            host, number = Host(address, tally, deadline_s=60), number + 1
        time.sleep(_PAUSE_S)
    host.leave()


def leak_soak(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Run a server with a pool and a data plane under load; return how their memory and descriptors went."""
    tally = Tally()
    expected = Expected(seed)
    expected.losable = "evicted to make room"
    storage = Storage("pool", folder / "storage", memory_bytes=32 * MIB, scrub_bytes_per_s=4 * MIB).start()
    plane = DataPlane(storage.port, folder / "dataplane", command_timeout=60, connect_timeout=60).start()
    assert plane.process is not None
    stopped = threading.Event()
    keys = [f"key {number}" for number in range(400)]
    work: list[Callable[[], None]] = [
        lambda: _redis_work(Caller(storage.port, expected, tally), keys[:200], seed, stopped),
        lambda: _redis_work(Caller(storage.port, expected, tally), keys[200:], seed + 1, stopped),
        lambda: _host_work(plane.address, tally, seed, stopped),
    ]
    threads = [threading.Thread(target=each, daemon=True) for each in work]
    for thread in threads:
        thread.start()
    samples: dict[str, list[tuple[float, float]]] = {}
    began = time.monotonic()
    try:
        while (now := time.monotonic() - began) < seconds:
            for name, pid in (("server", storage.pid), ("data plane", plane.process.pid)):
                samples.setdefault(f"{name} resident bytes", []).append((now, _resident(pid)))
                samples.setdefault(f"{name} descriptors", []).append((now, _descriptors(pid)))
            time.sleep(min(5.0, seconds / 60))
    finally:
        stopped.set()
        for thread in threads:
            thread.join(120)
    stopped_well = storage.stop()
    plane.kill()
    storage.close()
    verdicts = {
        name: verdict(found, _GROWTH_DESCRIPTORS_MAX if "descriptors" in name else _GROWTH_BYTES_MAX)
        for name, found in samples.items()
    }
    complaints = storage.complaints() + plane.complaints()
    return {
        "seconds": round(seconds),
        "outcomes": tally.as_json(),
        "examples": {outcome.value: tally.examples(outcome) for outcome in (Outcome.WRONG, Outcome.HANG)},
        "growth": verdicts,
        "complaints": complaints[:5],
        "passed": all(found["passed"] for found in verdicts.values())
        and not tally.failed
        and not complaints
        and stopped_well
        and not any(thread.is_alive() for thread in threads),
    }


def simulation(hours: float, folder: Path) -> dict[str, Any]:
    """Run further seeds of the simulation; return its own report."""
    program = REPOSITORY / "scripts" / "soak-simulation"
    report = folder / "simulation.json"
    command = [sys.executable, program, "--hours", f"{hours:g}", "--json", report]
    done = subprocess.run(command, cwd=REPOSITORY)
    found: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
    return found | {"passed": done.returncode == 0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; return 1 if one has not passed."""
    parser = argparse.ArgumentParser(description="The long tests: leaks, the crash loop, the simulation.")
    parser.add_argument("--hours", type=float, default=float(os.environ.get("SOAK_HOURS", "1")))
    parser.add_argument("--parts", default="leaks,crashes,simulation", help="which, of: leaks, crashes, simulation")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--json", type=Path, default=Path("soak.json"), help="the report")
    options = parser.parse_args(arguments)
    seconds, parts = 3600 * options.hours, options.parts.split(",")
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    report: dict[str, Any] = {"seed": options.seed, "hours": options.hours}
    if "leaks" in parts:
        place = folder / "leaks"
        report["leaks"] = leak_soak(place, seconds / 2 if len(parts) > 1 else seconds, options.seed)
        _keep(report, options.json)
    if "crashes" in parts:
        place = folder / "crashes"
        place.mkdir()
        ends = time.monotonic() + (seconds / 4 if len(parts) > 1 else seconds)
        report["crashes"] = crash_loop.run(place, sys.maxsize, options.seed, ends)
        _keep(report, options.json)
    if "simulation" in parts:
        report["simulation"] = simulation(options.hours / 4 if len(parts) > 1 else options.hours, folder)
    report["passed"] = all(part["passed"] for part in report.values() if isinstance(part, dict))
    _keep(report, options.json)
    if report["passed"]:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"what is left is in {folder}", file=sys.stderr)
    return int(not report["passed"])


def _keep(report: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1), flush=True)


__all__ = ["leak_soak", "main", "slope", "verdict"]
