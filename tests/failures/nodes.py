"""Storage servers and data planes as processes: killed, restarted on the same devices, stopped in order."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from faults import Faults
from images import StoredObject, objects
from machine import PATIENCE_S, free_port
from preloaded import Preloaded

REPOSITORY: Final = Path(__file__).parents[2]
MIB: Final = 1 << 20
ENGINES: Final = ("memory", "pool")
_GONE: Final = re.compile(r"Traceback|connection_failed|Segmentation|AddressSanitizer")


class Storage:
    """One storage server of a kind, on the same port and the same devices after each start.

    Attributes:
        engine: memory or pool.
        paths: of its devices.
        port: that it listens on.
        faults: what it is told of its disk and its clock, where ``faulty`` was asked for.
        starts: how often it was started.
    """

    def __init__(
        self,
        engine: str,
        folder: Path,
        *,
        devices: int = 2,
        device_bytes: int = 48 * MIB,
        memory_bytes: int = 16 * MIB,
        faulty: bool = False,
        paths: Sequence[Path] | None = None,
        limits: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Describe one; ``limits`` are arguments of prlimit, ``options`` keys of the configuration."""
        self.environment = dict(environment or {})
        self.engine, self.folder, self.limits = engine, folder, list(limits)
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "storage.log"
        self.port = free_port()
        self.starts = 0
        self.process: subprocess.Popen[str] | None = None
        where = folder / "disks"
        where.mkdir(exist_ok=True)
        self.faults = Faults(folder, where) if faulty else None
        self.options: dict[str, Any] = {"engine": engine, "memory_budget_bytes": memory_bytes, "io_threads": 1}
        self.paths: list[Path] = []
        if engine == "pool":
            self.paths = list(paths) if paths is not None else [where / f"disk{i}" for i in range(devices)]
            access = "threads" if faulty else "auto"
            self.devices: list[dict[str, Any]] = [
                {
                    "path": str(path),
                    **({} if path.is_block_device() else {"size": device_bytes}),
                    "objects_max": 600,
                    "bandwidth": 1 << 30,
                    "access": access,
                }
                for path in self.paths
            ]
            self.options |= {"memory_bandwidth": 1, "scrub_bytes_per_s": 0}
        self.options |= options

    # ---- Life

    def command(self) -> list[str]:
        flags = [word for name, value in self.options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        if self.engine == "pool":
            flags += ["--devices", json.dumps(self.devices)]
        limited = [shutil.which("prlimit") or "prlimit", *self.limits] if self.limits else []
        return [*limited, sys.executable, "-m", "shadowserve_tools", "storage", "--port", str(self.port), *flags]

    def start(self) -> "Storage":
        """Start it, and wait until it serves."""
        assert self.try_start(), f"the server did not start: {self.log.read_text()[-2000:]}"
        return self

    def try_start(self) -> bool:
        """Start it; return whether it serves. Else it has ended, and its log says why."""
        self.start_only()
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline()
        if line.startswith("ready "):
            return True
        self._ended(PATIENCE_S)
        return False

    def start_only(self) -> None:
        """Start it without waiting for anything."""
        self.starts += 1
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SHADOWSERVE_")}
        environment = clean | self.environment | (self.faults.environment if self.faults is not None else {})
        with open(self.log, "ab") as log:
            self.process = Preloaded(
                self.command(), stdout=subprocess.PIPE, stderr=log, text=True, cwd=REPOSITORY, env=environment
            )

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        if self.process is not None:
            self.process.kill()
            self._ended(PATIENCE_S)

    def stop(self, timeout_s: float = PATIENCE_S) -> bool:
        """SIGTERM; return whether it ended by itself in time."""
        if self.process is None:
            return True
        self.signal(signal.SIGTERM)
        try:
            self._ended(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True

    def _ended(self, timeout_s: float) -> None:
        assert self.process is not None
        self.process.wait(timeout_s)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.process = None

    def close(self) -> None:
        if self.process is not None:
            self.signal(signal.SIGCONT)
            self.kill()
        if self.faults is not None:
            self.faults.close()

    # ---- Looking

    def objects(self) -> list[StoredObject]:
        """Return what lies on its devices, dead objects included."""
        return list(objects([path for path in self.paths if path.exists()]))

    def reachable(self, timeout_s: float = 1.0) -> bool:
        """Whether it answers now."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s) as sock:
                sock.settimeout(timeout_s)
                sock.sendall(b"PING\r\n")
                return sock.recv(16).startswith(b"+PONG")
        except OSError:
            return False

    def stored(self) -> int:
        """Return how many keys it has."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S) as sock:
            sock.sendall(b"*1\r\n$6\r\nDBSIZE\r\n")
            return int(sock.recv(64)[1:])

    def complaints(self) -> list[str]:
        """Return lines of its log that no fault should bring about."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return [line for line in text.splitlines() if _GONE.search(line)]

    def resident_bytes(self) -> int:
        """Return its resident memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def descriptors(self) -> int:
        """Return how many file descriptors it has."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def samples(self, port: int) -> dict[str, float]:
        """Return its metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as page:
            lines = page.read().decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")}


class DataPlane:
    """One daemon, on the same port after each start, above a storage server, or (port 0) with its tiers alone."""

    def __init__(
        self, storage_port: int, folder: Path, environment: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.environment = dict(environment or {})
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.log = folder / "dataplane.log"
        self.options: dict[str, Any] = {
            "storage": f"127.0.0.1:{storage_port}" if storage_port else "",
            "listen": self.address,
            "shutdown_time": 2.0,
            "connect_timeout": 2.0,
            "command_timeout": 2.0,
            "quarantine_time": 0.1,
            "decompression_buffer_bytes": "8MiB",
            "dequantization_buffer_bytes": "8MiB",
            "dma_source_buffer_bytes": "8MiB",
            "store_buffer_bytes": "8MiB",
            "hosts_max": 4,
        } | options
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "DataPlane":
        flags = [word for name, value in self.options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        with open(self.log, "ab") as log:
            self.process = Preloaded(
                [sys.executable, "-m", "shadowserve_tools", "dpu", *flags],
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=REPOSITORY,
                env=os.environ | self.environment,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(b"ready "), self.log.read_text()[-2000:]
        return self

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    close = kill

    def stop(self) -> None:
        """SIGTERM, and wait."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE_S)
        self.kill()

    def complaints(self) -> list[str]:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return [line for line in text.splitlines() if _GONE.search(line)]


def await_end(process: subprocess.Popen[Any], timeout_s: float) -> bool:
    """Return whether a process ended in time."""
    ends = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < ends:
        time.sleep(0.01)
    return process.poll() is not None


__all__ = ["ENGINES", "MIB", "REPOSITORY", "DataPlane", "Storage", "await_end"]
