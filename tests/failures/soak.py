"""The long tests: a server and a data plane under load for half an hour must not grow; and the long loops.

``make soak`` runs the leak soak, the crash loop, the simulation and engines under stress, and writes one JSON report.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import crash_loop
from callers import Caller, Host, Prompt, going_on
from nodes import MIB, REPOSITORY, DataPlane, Storage, certificates
from outcomes import Expected, Outcome, Tally

_WARM_UP_SHARE: Final = 0.25
"""Share of the time: caches and pools fill, and malloc's arenas reach their size."""
_GROWTH_BYTES_MAX: Final = 8 * MIB
"""Permitted rise of the line through the samples after the warm-up. That time has about 250,000 operations and 80,000
connections per half hour, so a leak of 35 bytes per operation or of 105 per connection exceeds it. Slower growth is
bounded memory that fills late: the account of chains (placement.py) takes 2 MiB, and malloc's holes about as much."""
_GROWTH_DESCRIPTORS_MAX: Final = 1.0
_PAUSE_S: Final = 0.004
"""Pause between operations of one client, for other work on the machine."""


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """Return the median slope of all pairs (Theil and Sen): one outlier does not change it."""
    chosen = samples[:: max(1, len(samples) // 120)]
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for index, earlier in enumerate(chosen)
        for later in chosen[index + 1 :]
        if later[0] > earlier[0]
    ]
    return statistics.median(slopes) if slopes else 0.0


def verdict(samples: Sequence[tuple[float, float]], allowed: float) -> dict[str, Any]:
    """Return the growth of a figure over the samples after the warm-up, and the permitted growth."""
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
    return float((int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE"))  # without shared pages


def _descriptors(pid: int) -> float:
    return float(len(os.listdir(f"/proc/{pid}/fd")))


def _redis_work(caller: Caller, keys: Sequence[str], chance: random.Random) -> Iterator[None]:
    while True:
        caller.step(chance.choice(keys), chance)
        if chance.random() < 0.005:
            caller.reconnect()
        yield


def _host_work(address: str, tally: Tally, seed: int) -> Iterator[None]:
    """Store and fetch new prompts all the time: the store is full most of the time."""
    chance, recent = random.Random(seed), list[Prompt]()
    numbers = itertools.count()
    while True:
        host = Host(address, tally, deadline_s=60)
        for _ in range(50):
            if len(recent) < 4 or chance.random() < 0.2:
                recent = [*recent[-7:], Prompt(f"{seed}/{next(numbers)}", 6)]
                host.store(recent[-1])
            else:
                host.fetch(chance.choice(recent), losable="evicted to make room")
            yield
        host.leave()  # then it connects again


# ---- Clients with one connection

_VISITS: Final[dict[str, tuple[Literal["answered", "closed", "reset"], tuple[str, ...]]]] = {
    "says little": ("answered", ("PING", "CLIENT SETNAME visitor-{n}", "UNKNOWN{n} a", "GET absent:{n}")),
    "leaves half a value": ("closed", ("*3\r\n$3\r\nSET\r\n$4\r\nhalf\r\n$1000000\r\n{half}",)),
    "dies in a command": ("reset", ("*3\r\n$3\r\nSET\r\n$1",)),
    "dies while it is answered": ("reset", ("\r\n".join(f"GET key {key}" for key in range(51)),)),
    "says nonsense": ("answered", ("*nonsense {n}",)),
    "begins TLS": ("answered", ("\x16\x03\x01\x02\0\x01",)),
    "begins TLS and leaves": ("closed", ("\x16\x03\x01\x02\0\x01",)),
    "begins TLS and dies": ("reset", ("\x16\x03\x01\x02\0\x01",)),
    "guesses a password": ("closed", ("AUTH user{n} guessed\r\n",)),
    "administers": (
        "answered",
        ("ACL SETUSER user{n} on >{n} ~* +@all", "CONFIG SET maxclients {most}", "INFO all", "ACL DELUSER user{n}"),
    ),
}
"""End of a connection, and what is sent: lines that are answered each, or bytes."""
_PLAIN: Final = tuple(what for what in _VISITS if not what.startswith("begins TLS and"))
_OVER_TLS: Final = ("says little", "leaves half a value", "dies in a command")
_INSTEAD_OF_TLS: Final = ("begins TLS and leaves", "begins TLS and dies", "says nonsense")


def _visit(sock: socket.socket, what: str, number: int) -> None:
    end, texts = _VISITS[what]
    for text in texts:
        request = text.format(n=number, half="0" * (number % 500_000), most=2000 + number % 100)
        sock.sendall(request.encode("latin-1") + b"\r\n" * (end == "answered"))
        if end == "answered":
            sock.recv(4096)
    if end == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _visits_work(storage: Storage, chance: random.Random, counts: Counter[str]) -> Iterator[None]:
    """Open connections that end in every way, use names once, and change settings. Other functions check answers."""
    while True:
        counts["visits"] += 1
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", storage.port), 60) as sock:
            _visit(sock, chance.choice(_PLAIN), counts["visits"])
        if counts["visits"] % 500 == 0:
            storage.signal(signal.SIGHUP)
        time.sleep(3 * _PAUSE_S)
        yield


def _tls_work(storage: Storage, context: ssl.SSLContext, chance: random.Random, counts: Counter[str]) -> Iterator[None]:
    """Run handshakes that succeed, fail, or stop half way."""
    while True:
        counts["handshakes"] += 1
        number = counts["handshakes"]
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", storage.port), 60) as sock:
            luck = chance.random()
            if luck < 0.4:
                with context.wrap_socket(sock, server_hostname="localhost") as secure:
                    _visit(secure, chance.choice(_OVER_TLS), number)
            elif luck < 0.6:  # a client that does not trust the server
                ssl.create_default_context().wrap_socket(sock, server_hostname="localhost")
            else:
                _visit(sock, chance.choice(_INSTEAD_OF_TLS), number)
        time.sleep(7 * _PAUSE_S)
        yield


Sample = tuple[float, float]
"""Seconds since the start, and the figure at that time."""


def leak_soak(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Run servers and a data plane under load. Return the growth of their memory and descriptors."""
    tally, expected, counts = Tally(), Expected(seed), Counter[str]()
    expected.losable = "evicted to make room"
    keys = [f"key {number}" for number in range(400)]
    failures, samples = list[str](), dict[str, list[Sample]]()
    made = certificates(folder / "secure")
    trusting = ssl.create_default_context(cafile=str(made / "ca.crt"))
    files = {"tls_cert": made / "server.crt", "tls_key": made / "server.key"}
    with contextlib.ExitStack() as ends:
        storage = Storage("pool", folder / "storage", memory_bytes=32 * MIB, scrub_bytes_per_s=4 * MIB)
        plane = DataPlane(storage.port, folder / "dataplane", command_timeout_s=60, connect_timeout_s=60)
        secure = Storage("memory", folder / "secure" / "storage", memory_bytes=16 * MIB, **files)
        processes = {"server": storage, "data plane": plane, "server with TLS": secure}
        for process in processes.values():
            ends.callback(process.close)
            process.start()
        works = (
            _redis_work(Caller(storage.port, expected, tally), keys[:200], random.Random(seed)),
            _redis_work(Caller(storage.port, expected, tally), keys[200:], random.Random(seed + 1)),
            _host_work(plane.address, tally, seed),
            _visits_work(storage, random.Random(seed), counts),
            _tls_work(secure, trusting, random.Random(seed), counts),
        )
        try:
            with going_on(tally, [partial(_step, work) for work in works]):
                samples = _watch({name: process.pid for name, process in processes.items()}, seconds)
        except Exception:
            failures.append(traceback.format_exc()[-2000:])
        stopped_well = storage.stop() and secure.stop()
    verdicts = {
        name: verdict(found, _GROWTH_DESCRIPTORS_MAX if "descriptors" in name else _GROWTH_BYTES_MAX)
        for name, found in samples.items()
    }
    complaints = [line for process in processes.values() for line in process.complaints()]
    did_all = counts["visits"] > 0 and counts["handshakes"] > 0 and tally.as_json()["right"] > 0
    return {
        "seconds": round(seconds),
        "outcomes": tally.as_json(),
        "examples": {outcome.value: tally.examples(outcome) for outcome in (Outcome.WRONG, Outcome.HANG)},
        **counts,
        "growth": verdicts,
        "complaints": complaints[:5],
        "failures": failures,
        "passed": all(found["passed"] for found in verdicts.values())
        and did_all
        and not (tally.failed or complaints or failures)
        and stopped_well,
    }


def _step(work: Iterator[None]) -> None:
    next(work)
    time.sleep(_PAUSE_S)


def _watch(pids: dict[str, int], seconds: float) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {}
    began = time.monotonic()
    while (now := time.monotonic() - began) < seconds:
        for name, pid in pids.items():
            samples.setdefault(f"{name} resident bytes", []).append((now, _resident(pid)))
            samples.setdefault(f"{name} descriptors", []).append((now, _descriptors(pid)))
        time.sleep(min(5.0, seconds / 60))
    return samples


def crashes(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Kill a server repeatedly. Return the crash loop's report."""
    found = crash_loop.run(folder, sys.maxsize, seed, time.monotonic() + seconds)
    return found | {"passed": found["passed"] and found["kills"] > 0}


def simulation(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Run new seeds of the simulation, which the script chooses itself. Return its report."""
    program = REPOSITORY / "scripts" / "soak-simulation"
    report = folder / "simulation.json"
    command = [sys.executable, program, "--hours", f"{seconds / 3600:.6f}", "--json", report]
    done = subprocess.run(command, cwd=REPOSITORY)
    found: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
    return found | {"passed": done.returncode == 0 and found.get("seeds", 0) > 0}


def engines(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Run engines of every kind one after the other, under all loads at once. Return how each ended."""
    program = REPOSITORY / "tests" / "e2e" / "engine_stress.py"
    listed = subprocess.run([sys.executable, program, "--list"], check=True, capture_output=True, text=True)
    found: dict[str, Any] = {}
    for kind in (kinds := listed.stdout.split()):
        log = folder / f"{kind}.log"
        command = [sys.executable, program, kind, "--seconds", f"{seconds / len(kinds):.0f}", "--seed", f"{seed}"]
        with log.open("w") as file:
            done = subprocess.run(command, cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT)
        found[kind] = {"exit": done.returncode, "said": log.read_text()[-1000:].splitlines()[-1:]}
    return {"kinds": found, "passed": bool(found) and not any(kind["exit"] for kind in found.values())}


PARTS: Final[dict[str, tuple[float, Callable[[Path, float, int], dict[str, Any]]]]] = {
    "leaks": (2.0, leak_soak),
    "crashes": (1.0, crashes),
    "simulation": (1.0, simulation),
    "engines": (1.0, engines),
}
"""Relative time of each part, and the function that runs it."""

_HELP: Final = """Run the long tests, one after the other, and write one report.

leaks       a server with a pool, one with TLS, and a data plane under load: memory and descriptors must not grow
crashes     a server killed again and again: what was acknowledged is there after each restart (scripts/crash-loop)
simulation  new seeds, never run before (scripts/soak-simulation)
engines     real vLLM under arrivals, aborts, preemptions and faults at once: answers are right, and nothing is left

Of the time, leaks get two fifths, the others a fifth each; with --parts, those share it alike. The exit status is 1 if
any part has not passed, or could not run. The files of such a part are kept; the last lines have their folder and the
command that repeats it. docs/design/testing.md has more."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    hours = float(os.environ.get("SOAK_HOURS", "1"))
    parser.add_argument("--hours", type=float, default=hours, help="total time; by default $SOAK_HOURS, or 1")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated names of parts; by default all")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="seed of leaks and crashes; by default the time"
    )
    parser.add_argument("--json", type=Path, default=Path("soak.json"), help="the report; by default soak.json")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts. Return 1 if one has not passed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    chosen = list(dict.fromkeys(options.parts.split(",")))
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"--parts: there is no {unknown[0]!r}; there are {', '.join(PARTS)}")
    if options.hours <= 0:
        parser.error("--hours: the time must be positive")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # its exit also ends servers and clients
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    report: dict[str, Any] = {"seed": options.seed, "hours": options.hours, "passed": False}
    whole = sum(PARTS[name][0] for name in chosen)
    for name in chosen:
        share, run = PARTS[name]
        place = folder / name
        place.mkdir()
        try:
            found = run(place, 3600 * options.hours * share / whole, options.seed)
        except Exception:
            found = {"error": traceback.format_exc()[-4000:], "passed": False}
        report[name] = found
        print(json.dumps({name: found}, indent=1), flush=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    failed = [name for name in chosen if not report[name]["passed"]]
    report["passed"] = not failed
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
    for name in chosen:
        print(f"{name}: {'failed' if name in failed else 'passed'}")
    for name in failed:
        again = f"scripts/soak --parts {name} --seed {options.seed} --hours {options.hours:g}"
        print(f"{name}: files: {folder / name}; again: {again}", file=sys.stderr)
    return int(bool(failed))
