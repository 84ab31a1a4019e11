"""Child processes of the demo and the benchmarks: started, awaited, and always stopped."""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, Final, Self

from rich.progress import Progress

from shadowserve.errors import ShadowServeError

STOP_TIMEOUT_S: Final = 20.0
_READY: Final = re.compile(r"^ready (?P<address>\S+)$", re.MULTILINE)
_TUNING: Final = "oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1"
"""Settings of Redis's allocator that keep the memory of large replies.

By default each reply above 8 MiB is a new mapping, whose page faults cost Redis three times its other work.
"""


@dataclass(frozen=True)
class Child:
    """A running child process: its name in messages, the file with its output, and ``host:port`` it listens on."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path
    address: str


def until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Wait until a condition holds; the error after ``timeout_s`` has ``what``, such as "X is not stored"."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise ShadowServeError(f"{what} after {timeout_s:g} s")
        time.sleep(0.02)


def http_request(url: str, body: Mapping[str, Any] | None = None, timeout_s: float = 60.0) -> HTTPResponse:
    """Send a GET, or a POST with a body of JSON, to a program of this machine, without a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    answer: HTTPResponse = opener.open(request, timeout=timeout_s)
    return answer


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def started(
    name: str,
    command: Sequence[str],
    log_folder: Path,
    *,
    ready: "re.Pattern[str]" = _READY,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 30.0,
) -> Iterator[Child]:
    """Run a program while the context lasts. The context begins when the program has printed ``ready``.

    Its output is in ``<name>.log``. Group ``address`` of ``ready``, if any, becomes the child's address.

    Raises:
        ShadowServeError: It ended or was not ready in time; the message has the end of its log.
    """
    log = log_folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}, process_group=0
        )
    try:
        match = _await(name, process, log, ready, time.monotonic() + timeout_s)
        yield Child(name, process, log, match.groupdict().get("address") or "")
    finally:
        _stop(process)


def _await(
    name: str, process: "subprocess.Popen[bytes]", log: Path, ready: "re.Pattern[str]", deadline: float
) -> "re.Match[str]":
    while True:
        ended = process.poll() is not None
        text = log.read_text(errors="replace")
        if match := ready.search(text):
            return match
        if ended or time.monotonic() > deadline:
            what = f"ended with code {process.returncode}" if ended else "did not become ready in time"
            raise ShadowServeError(f"{name} {what}. The end of {log}:\n{text[-3000:]}")
        time.sleep(0.02)


class JsonProcess:
    """A program that answers each line of JSON on its standard input with one on its standard output.

    Attributes:
        process: The running program; its standard error is in the log.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._name, self._log = name, log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env={**os.environ, **environment}, process_group=0,
            )  # fmt: skip

    def send(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # receiving reports the end, with the log
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Return the next answer.

        Raises:
            ShadowServeError: The program ended, gave no answer in time, or answered with an ``error``.
        """
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if ready else ""
        missing = {"error": "ended" if ready else "gave no answer"}
        answer: dict[str, Any] = json.loads(line) if line else missing
        if "error" in answer:
            end = self._log.read_text(errors="replace")[-3000:]
            raise ShadowServeError(f"{self._name}: {answer['error']}. The end of {self._log}:\n{end}")
        return answer

    def stop(self) -> None:
        """End the process, by force if it does not end in time."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        _kill(self.process)
        self.process.stdout.close()


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Stop the program with SIGTERM, and kill the rest of its process group."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    _kill(process)


def _kill(process: "subprocess.Popen[Any]") -> None:
    """Wait for the end of the program, and kill the rest of its process group."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def start_storage(
    log_folder: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> contextlib.AbstractContextManager[Child]:
    """Run a storage node on a free port of loopback; ``flags`` as for ``shadowserve storage``."""
    command = [sys.executable, "-m", "shadowserve_tools", "storage", "--port", "0", *flags]
    return started("storage", command, log_folder, environment=environment)


def start_data_plane(
    log_folder: Path, storage: str, *flags: str, environment: Mapping[str, str] | None = None
) -> contextlib.AbstractContextManager[Child]:
    """Run a data plane for ``storage`` on a free port of loopback; ``flags`` as for ``shadowserve dpu``."""
    command = [sys.executable, "-m", "shadowserve_tools", "dpu", "--listen", "127.0.0.1:0"]
    command += ["--storage", storage, *flags]
    return started("dpu", command, log_folder, environment=environment)


class Programs(contextlib.ExitStack):
    """Programs of a benchmark, with a folder for their logs and a progress bar. All end with the context."""

    logs: Path

    def __enter__(self) -> Self:
        super().__enter__()
        self.logs = Path(self.enter_context(tempfile.TemporaryDirectory()))
        return self

    def storage(self, *flags: str, environment: Mapping[str, str] | None = None) -> Child:
        """Start a storage node on a free port of loopback; ``flags`` as for ``shadowserve storage``."""
        return self.enter_context(start_storage(self.logs, *flags, environment=environment))

    def data_plane(self, storage: str, *flags: str, environment: Mapping[str, str] | None = None) -> Child:
        """Start a data plane for the storage node at ``storage``; ``flags`` as for ``shadowserve dpu``."""
        return self.enter_context(start_data_plane(self.logs, storage, *flags, environment=environment))

    def disk(self, folder: Path | None) -> Path:
        """Make a temporary folder on the device of ``folder``; by default where temporary files are."""
        return Path(self.enter_context(tempfile.TemporaryDirectory(prefix="shadowserve-bench-", dir=folder)))

    def progress(self, total: float | None, first: str = "starting") -> Callable[[str], None]:
        """Show a progress bar of ``total`` steps; the returned function ends a step and names the next one."""
        bar = self.enter_context(Progress(transient=True))
        task = bar.add_task(first, total=total)
        return lambda step: bar.update(task, advance=1, description=step)


@contextlib.contextmanager
def start_redis(log_folder: Path, *, host: str = "127.0.0.1", tuned: bool = False) -> Iterator[Child]:
    """Run a Redis server in memory only, with defaults or ``tuned`` for large values.

    Raises:
        ShadowServeError: It is not installed, or does not start.
    """
    if not shutil.which("redis-server"):
        raise ShadowServeError("redis-server, a peer to compare with, is not installed; run scripts/setup")
    port = free_port()
    command = ["redis-server", "--bind", host, "--port", str(port), "--protected-mode", "no", "--save", ""]
    command += ["--appendonly", "no", "--dir", str(log_folder)]
    ready, environment = re.compile("Ready to accept connections"), {"MALLOC_CONF": _TUNING if tuned else ""}
    name = "redis-tuned" if tuned else "redis"
    with started(name, command, log_folder, ready=ready, environment=environment) as child:
        yield Child(child.name, child.process, child.log, f"{host}:{port}")
