"""Runs each fuzzer for its share of a time and counts its inputs: fuzzers in C (libFuzzer), and parsers in Python.

The fuzzers in C continue from earlier findings (``build/fuzz/corpus``) beside the kept corpus. For parsers in Python, a
seed determines the inputs: inputs of a corpus, changed, truncated, and joined. A parser may raise only its own error:
any other end is a finding, and the input is kept.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any, Final

from builds import REPOSITORY, NativeBuild
from targets import TARGETS, Target

_FOLDER: Final = REPOSITORY / "build" / "fuzz"
_PROGRAMS: Final = REPOSITORY / "native" / "fuzz"
_EXECUTED: Final = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_KEPT: Final = re.compile(r"Test unit written to (\S+)")
_HANG_S: Final = 120
"""Time after which an input hangs; less may be a pause of the machine."""
_TELL_S: Final = 2.0
_BATCH: Final = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one fuzzer.

    Attributes:
        name: Name of the fuzzer.
        inputs: Number of inputs.
        seconds: Run time.
        finding: Path of the failing input, or the error; None without a finding.
        output: End of the fuzzer's output about the finding.
    """

    name: str
    inputs: int
    seconds: float
    finding: str | None = None
    output: str = ""


# ---- In Python


def changed(chance: random.Random, target: Target, corpus: Sequence[bytes]) -> bytes:
    data = bytearray(chance.choice(corpus) if corpus and chance.random() < 0.95 else b"")
    for _ in range(chance.choice((1, 1, 2, 4, 8, 16))):
        at = chance.randrange(len(data) + 1)
        end = min(len(data), at + chance.choice((1, 2, 4, 8, 64)))
        match chance.randrange(8):
            case 0 if data:
                data[at - 1] ^= 1 << chance.randrange(8)
            case 1 if data:
                data[at - 1] = chance.randrange(256)
            case 2 if target.words:
                data[at:at] = chance.choice(target.words)
            case 3 if target.words:
                data[at:end] = chance.choice(target.words)
            case 4:
                del data[at:end]
            case 5:
                data[at:at] = data[at:end] * chance.choice((1, 2, 30))
            case 6 if corpus:
                data[at:] = chance.choice(corpus)[at:]
            case _:
                number = chance.choice((0, 1, -1, 127, 255, 65535, 1 << 31, (1 << 32) - 1, chance.getrandbits(31)))
                data[at:end] = (number & 0xFFFF_FFFF).to_bytes(4, chance.choice(("little", "big")))
    return bytes(data[: target.size_max])


def fuzz(name: str, target: Target, seconds: float, seed: int, folder: Path) -> Outcome:
    """Run a parser on inputs for some time. Failing inputs are kept in ``folder``."""
    chance = random.Random(seed)
    corpus = [data[: target.size_max] for data in target.corpus()]
    began, inputs, data = time.monotonic(), 0, b""
    queue: Iterator[bytes] = iter(corpus)
    try:
        while inputs < len(corpus) or time.monotonic() - began < seconds:
            signal.alarm(_HANG_S)
            for _ in range(_BATCH):
                data = next(queue, b"") if inputs < len(corpus) else changed(chance, target, corpus)
                target.run(data)
                inputs += 1
    except Exception as error:
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / f"{name}-{sha256(data).hexdigest()[:16]}"
        kept.write_bytes(data)
        text = "".join(traceback.format_exception(error))[-4000:]
        return Outcome(name, inputs, time.monotonic() - began, str(kept), text)
    finally:
        signal.alarm(0)
    return Outcome(name, inputs, time.monotonic() - began)


def _hung(_number: int, _frame: FrameType | None) -> None:
    raise TimeoutError(f"an input, or {_BATCH} of them together, took more than {_HANG_S} s")


def _run_target(name: str, seconds: float, seed: int) -> Outcome:
    """Fuzz in a separate process, so that a crash ends no other fuzzer."""
    script = REPOSITORY / "scripts" / "fuzz"
    command = [sys.executable, str(script), "--target", name, "--seconds", str(seconds), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return Outcome(**json.loads(done.stdout))
    except (ValueError, TypeError):
        return Outcome(name, 0, 0.0, f"the process ended with {done.returncode}", done.stderr[-4000:])


# ---- In C


def run_program(program: Path, seconds: float, kept: Path, folder: Path) -> Outcome:
    """Run a libFuzzer program over the corpus ``kept`` and its earlier inputs; findings go to ``folder``."""
    found = folder / "corpus" / program.name
    found.mkdir(parents=True, exist_ok=True)
    findings = folder / "findings"
    findings.mkdir(parents=True, exist_ok=True)
    command = [str(program), f"-max_total_time={max(1, round(seconds))}", "-print_final_stats=1"]
    command += [f"-artifact_prefix={findings}/{program.name}-", f"-timeout={_HANG_S}", str(found), str(kept)]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, cwd=folder)
    executed, written = _EXECUTED.search(done.stderr), _KEPT.search(done.stderr)
    finding = None
    if done.returncode != 0 or executed is None:
        finding = written[1] if written else f"the process ended with {done.returncode}"
    inputs = int(executed[1]) if executed else 0
    return Outcome(program.name, inputs, time.monotonic() - began, finding, done.stderr[-4000:] if finding else "")


def _programs() -> dict[str, Path]:
    """Build the fuzzers in C, and return them by name.

    Raises:
        AssertionError: The build failed.
    """
    build = NativeBuild("fuzz")
    folder = build.directory / "native" / "fuzz"
    return {path.stem: folder / path.stem for path in sorted(_PROGRAMS.glob("fuzz_*.c"))}


# ---- All fuzzers


@contextlib.contextmanager
def _telling(what: Callable[[], str]) -> Iterator[None]:
    """Print the progress every two seconds: in one line on a terminal, else not at all."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(_TELL_S):
            if sys.stderr.isatty():
                print(f"\r\033[K{what()}", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _run_all(jobs: dict[str, Callable[[float], Outcome]], seconds: float) -> list[Outcome]:
    at_once = min(os.cpu_count() or 1, len(jobs))
    share = seconds * at_once / len(jobs)
    began = time.monotonic()
    outcomes: list[Outcome] = []

    def progress() -> str:
        inputs = sum(outcome.inputs for outcome in outcomes)
        passed = time.monotonic() - began
        return f"{len(outcomes)} of {len(jobs)} fuzzers, {inputs:,} inputs, {passed:.0f} of about {seconds:.0f} s"

    def run(job: Callable[[float], Outcome]) -> None:
        outcome = job(share)
        outcomes.append(outcome)
        _print(outcome)

    with _telling(progress), ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, jobs.values()))
    return sorted(outcomes, key=lambda outcome: outcome.name)


def _print(outcome: Outcome) -> None:
    clear = "\r\033[K" if sys.stderr.isatty() else ""
    state = f"FOUND: {outcome.finding}" if outcome.finding else "nothing found"
    print(f"{clear}{outcome.name:24} {outcome.inputs:>12,} inputs {outcome.seconds:>7.1f} s  {state}", flush=True)
    if outcome.output:
        print(outcome.output, file=sys.stderr)


def _report(outcomes: list[Outcome], path: Path | None) -> int:
    total = sum(outcome.inputs for outcome in outcomes)
    findings = [outcome for outcome in outcomes if outcome.finding]
    print(f"{'all':24} {total:>12,} inputs; {len(findings)} findings")
    if path is not None:
        report: dict[str, Any] = {"inputs": total, "fuzzers": [asdict(outcome) for outcome in outcomes]}
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if findings else 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fuzz",
        description="Run every fuzzer for its share of the time, and count inputs.",
        epilog="Exit codes: 0 no finding; 1 a finding, with its input's path; 2 the fuzzers could not run.",
    )
    parser.add_argument("names", nargs="*", help="fuzzers to run; all of them by default, see --list")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="time of all fuzzers together, without the build (60)"
    )
    parser.add_argument("--seed", type=int, help="seed of the fuzzers in Python; by default another one each time")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results as JSON")
    parser.add_argument("--list", action="store_true", help="list the fuzzers and exit")
    parser.add_argument("--python-only", action="store_true", help="skip the fuzzers in C, which need clang")
    parser.add_argument("--target", choices=TARGETS, help=argparse.SUPPRESS)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    parser = _arguments()
    given = parser.parse_args(words)
    seed = random.SystemRandom().getrandbits(32) if given.seed is None else given.seed
    if given.target is not None:
        signal.signal(signal.SIGALRM, _hung)
        outcome = fuzz(given.target, TARGETS[given.target], given.seconds, seed, _FOLDER / "findings")
        print(json.dumps(asdict(outcome)))
        return 0
    in_c = [] if given.python_only else [path.stem for path in sorted(_PROGRAMS.glob("fuzz_*.c"))]
    known = [*in_c, *TARGETS]
    if given.list:
        print("\n".join(known))
        return 0
    wanted = given.names or known
    if not set(wanted) <= set(known) or given.seconds <= 0:
        parser.error(f"there are {', '.join(known)}, and --seconds is more than 0")
    jobs: dict[str, Callable[[float], Outcome]] = {}
    if set(wanted) & set(in_c):
        if shutil.which("clang") is None:
            print("The fuzzers in C need clang with libFuzzer; --python-only skips them.", file=sys.stderr)
            return 2
        print("Building the fuzzers in C; the first time takes some minutes.", file=sys.stderr, flush=True)
        try:
            programs = _programs()
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            print(f"The fuzzers in C cannot be built: {error}", file=sys.stderr)
            return 2
        for name in (name for name in wanted if name in programs):
            jobs[name] = lambda share, name=name: run_program(
                programs[name], share, _PROGRAMS / "corpus" / name, _FOLDER
            )
    for name in (name for name in wanted if name in TARGETS):
        jobs[name] = lambda share, name=name: _run_target(name, share, seed)
    print(f"seed {seed}, {len(jobs)} fuzzers, {given.seconds:g} s", file=sys.stderr, flush=True)
    return _report(_run_all(jobs, given.seconds), given.json)
