"""Programs of the project, and ``vllm serve``, as processes that tests can kill and restart."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Final

import machine
from machine import PATIENT, WAIT_MAX_S, free_port, python_path, wait_for
from preloaded import Preloaded

ROOT: Final = Path(__file__).parents[2]


class Process:
    """A program of the project that prints ``ready ADDRESS`` on its standard output."""

    def __init__(self, program: str, *arguments: str) -> None:
        self._command = [sys.executable, "-m", "shadowserve_tools", program]
        self._arguments = arguments
        self.address = ""
        self.start()

    def start(self) -> None:
        # scripts/test-dpu gives only the daemon a C core with sanitizers.
        special = os.environ.get("TEST_DPU_ENVIRONMENT", "") if self._command[-1] == "dpu" else ""
        with tempfile.TemporaryFile("w+") as log:
            self._process = Preloaded(
                [*self._command, *self._arguments],
                cwd=ROOT,
                env=os.environ | dict(setting.split("=", 1) for setting in special.split()),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            assert self._process.stdout is not None
            word, _, self.address = (line := self._process.stdout.readline()).strip().partition(" ")
            if word != "ready":
                status = self._process.wait(WAIT_MAX_S)
                log.seek(0)
                raise AssertionError(
                    f"{self._process.args} printed {line!r}, exit status {status}: {log.read()[-3000:]}"
                )

    @property
    def killed(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill it with SIGKILL, like a loss of power."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._close()

    def restart(self) -> None:
        option = "--listen" if "--listen" in self._arguments else "--port"
        value = self.address if option == "--listen" else self.address.rpartition(":")[2]
        arguments = list(self._arguments)
        arguments[arguments.index(option) + 1] = value
        self._arguments = tuple(arguments)
        self.start()

    def freeze(self, frozen: bool) -> None:
        """Stop its threads with open connections, or let them continue."""
        self._process.send_signal(signal.SIGSTOP if frozen else signal.SIGCONT)
        if frozen:
            wait_for(lambda: machine.frozen(self._process.pid))

    def stop(self) -> None:
        if not self.killed:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(signal.SIGTERM)
            assert self._process.wait(WAIT_MAX_S) == 0
        self._close()

    def _close(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()


def data_plane(storage: str, listen: str = "") -> Process:
    return Process("dpu", "--listen", listen or f"127.0.0.1:{free_port()}", "--storage", storage, *PATIENT)


def serve_environment() -> dict[str, str]:
    """Return the variables that ``vllm serve`` has beside those of this process."""
    return {
        "PYTHONPATH": python_path(),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        # By default vLLM kills a worker that has not ended after some seconds, as on a busy machine.
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": str(int(WAIT_MAX_S)),
    }


class Server:
    """``vllm serve``, with the plugin's own configuration ``transfer``, or without the plugin."""

    def __init__(
        self,
        model: Path,
        transfer: dict[str, Any] | None,
        log: Path,
        *options: str,
        popen: type[subprocess.Popen[Any]] = subprocess.Popen,
    ) -> None:
        self._popen = popen
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.log = log
        configured = {
            "kv_connector": "ShadowServeConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": transfer,
        }
        self._environment = serve_environment()
        arguments = [
            *("--served-model-name", "small", "--host", "127.0.0.1", "--port", str(port)),
            # By default vLLM kills its workers immediately at a stop request.
            *("--shutdown-timeout", "60"),
            *("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "4", "--block-size", "32"),
            *("--enforce-eager", "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(64 << 20)),
            *(("--kv-transfer-config", json.dumps(configured)) if transfer is not None else ()),
            *options,
        ]
        self._command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *arguments]
        self.start()

    def start(self) -> None:
        with self.log.open("a") as file:
            self.process = self._popen(
                self._command,
                cwd=ROOT,
                env=os.environ | self._environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def kill(self) -> None:
        """Kill all of its processes with SIGKILL, like a loss of power."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def call(self, path: str, body: dict[str, Any] | None = None, timeout: float = WAIT_MAX_S) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return str(answer.read().decode())

    def wait_ready(self, timeout: float) -> None:
        ends = time.monotonic() + timeout
        while True:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                self.call("/health", timeout=2)
                return
            except OSError:
                assert time.monotonic() < ends, self.log.read_text()[-4000:]
                time.sleep(0.2)

    def metric(self, name: str) -> float:
        return sum(
            float(line.rpartition(" ")[2]) for line in self.call("/metrics").splitlines() if line.startswith(name)
        )
