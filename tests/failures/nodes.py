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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from faults import Faults, StoredObject, objects
from machine import WAIT_MAX_S, free_port
from preloaded import Preloaded

REPOSITORY: Final = Path(__file__).parents[2]
MIB: Final = 1 << 20
_GONE: Final = re.compile(r"Traceback|connection_failed|Segmentation|AddressSanitizer")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Node:
    """One program of the product as a process, on the same port after each start.

    ``options`` and ``environment`` are for the next start. Of this process's variables, it gets none of the product's.
    """

    def __init__(
        self, program: str, folder: Path, environment: Mapping[str, str] | None, options: Mapping[str, Any]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._program = program
        self.environment = dict(environment or {})
        self.port = free_port()
        self.log = folder / f"{program}.log"
        self.options = dict(options)
        self.process: subprocess.Popen[str] | None = None

    def command(self) -> list[str]:
        flags = [word for name, value in self.options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        return [sys.executable, "-m", "shadowserve_tools", self._program, *flags]

    def start(self) -> Self:
        """Start it, and wait until it serves."""
        assert self.try_start(), f"'{self._program}' did not start: {self.log.read_text()[-2000:]}"
        return self

    def try_start(self) -> bool:
        """Start it. Return True if it serves; else it has ended, and its log has the reason."""
        self.start_only()
        assert self.process is not None and self.process.stdout is not None
        if self.process.stdout.readline().startswith("ready "):
            return True
        self._ended(WAIT_MAX_S)
        return False

    def start_only(self) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SHADOWSERVE_")}
        with open(self.log, "ab") as log:
            self.process = Preloaded(
                self.command(),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=REPOSITORY,
                env=clean | self.environment,
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
        self.process.send_signal(number)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the process with SIGSTOP until the context ends."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self._ended(WAIT_MAX_S)

    def stop(self) -> bool:
        """Send SIGTERM. Return True if the process ends in time without SIGKILL."""
        if self.process is not None:
            self.signal(signal.SIGTERM)
            try:
                self._ended(WAIT_MAX_S)
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
        self.kill()

    def complaints(self) -> list[str]:
        """Return log lines that no fault should cause."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return [line for line in text.splitlines() if _GONE.search(line)]


class Storage(_Node):
    """One storage server with one engine, memory or pool, on the same port and devices after each start."""

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
        """Describe a server. ``limits``: arguments of prlimit; ``options``: configuration keys."""
        super().__init__("storage", folder, environment, {"memory_budget_bytes": memory_bytes})
        self.engine, self._limits = engine, list(limits)
        where = folder / "disks"
        where.mkdir(exist_ok=True)
        self._faults = Faults(folder, where) if faulty else None
        if self._faults is not None:
            self.environment |= self._faults.environment
        self.options |= {"io_threads": 1}
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

    @property
    def faults(self) -> Faults:
        """Faults of its disk and its clock; requires ``faulty``."""
        assert self._faults is not None
        return self._faults

    def command(self) -> list[str]:
        devices = ["--devices", json.dumps(self.devices)] if self.engine == "pool" else []
        limited = [shutil.which("prlimit") or "prlimit", *self._limits] if self._limits else []
        return [*limited, *super().command(), "--port", str(self.port), *devices]

    def close(self) -> None:
        super().close()
        if self._faults is not None:
            self._faults.close()

    # ---- Inspection

    def objects(self) -> list[StoredObject]:
        return list(objects([path for path in self.paths if path.exists()]))

    def stored(self) -> int:
        with socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_MAX_S) as sock:
            sock.sendall(b"*1\r\n$6\r\nDBSIZE\r\n")
            return int(sock.recv(64)[1:])

    def resident_bytes(self) -> int:
        return resident_bytes(self.pid)

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


class DataPlane(_Node):
    """One daemon above a storage server, or (port 0) with its tiers only. It has the same port after each start."""

    def __init__(
        self, storage_port: int, folder: Path, environment: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        super().__init__("dpu", folder, environment, {"storage": f"127.0.0.1:{storage_port}" if storage_port else ""})
        self.address = f"127.0.0.1:{self.port}"
        self.options |= {
            "listen": self.address,
            "shutdown_timeout_s": 2.0,
            "connect_timeout_s": 2.0,
            "command_timeout_s": 2.0,
            "quarantine_s": 0.1,
            "decompression_buffer_bytes": "8MiB",
            "dequantization_buffer_bytes": "8MiB",
            "dma_source_buffer_bytes": "8MiB",
            "store_buffer_bytes": "8MiB",
            "hosts_max": 4,
        } | options


def tiers(memory: str, device: Path | None = None, size: str = "32MiB", **disk: Any) -> str:
    """Return the configuration of a data plane's tiers: memory, alone or above a file of ``size``."""
    made: dict[str, Any] = {"memory_budget_bytes": memory}
    if device is not None:
        device.parent.mkdir(exist_ok=True)
        disk = {"path": str(device), "size": size, "objects_max": 600} | disk
        made |= {"memory_bandwidth": 1, "scrub_bytes_per_s": 0, "devices": [disk]}
    return json.dumps(made)


def certificates(folder: Path) -> Path:
    folder.mkdir(parents=True)
    command = [sys.executable, REPOSITORY / "scripts" / "make-certificates", folder]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder
