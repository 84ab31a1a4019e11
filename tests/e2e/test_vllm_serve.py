"""``vllm serve`` as a user runs it: its own processes, the OpenAI API, the entry point's connector, SIGTERM."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import PATIENCE_S, free_port, wait_for
from tiny_models import with_another_first_chunk

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


class Server:
    def __init__(self, model: Path, data_plane: str, patient: dict[str, float], log: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.log = log
        transfer = {
            "kv_connector": "ShadowServeConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"shadowserve.data_plane": data_plane, **patient},
        }
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
        }
        arguments = [
            *("--served-model-name", "small", "--host", "127.0.0.1", "--port", str(port)),
            # By default vLLM kills its workers as soon as it is told to stop.
            *("--shutdown-timeout", "60"),
            *("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "4", "--block-size", "32"),
            *("--enforce-eager", "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(64 << 20)),
            *("--kv-transfer-config", json.dumps(transfer)),
        ]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *arguments],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def call(self, path: str, body: dict[str, Any] | None = None, timeout: float = PATIENCE_S) -> str:
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


@pytest.fixture
def server(model: Path, data_plane: Any, patient: dict[str, float], tmp_path: Path) -> Iterator[Server]:
    server = Server(model, data_plane.address, patient, tmp_path / "server.log")
    yield server
    if server.process.poll() is None:
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


def test_serve_stores_loads_and_stops_on_sigterm(server: Server, data_plane: Any, prompt: Any) -> None:
    server.wait_ready(600)
    request = {"model": "small", "prompt": prompt(700), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    request["return_token_ids"] = True
    first = json.loads(server.call("/v1/completions", request))
    wait_for(lambda: len(data_plane.records) == 2)
    server.call("/reset_prefix_cache", {})
    second = json.loads(server.call("/v1/completions", request))
    assert second["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    assert server.metric("vllm:shadowserve_loaded_tokens_total") == 512
    wait_for(lambda: server.metric("vllm:shadowserve_stored_chunks_total") == 2)
    wait_for(lambda: data_plane.destinations == 2)
    other = json.loads(server.call("/v1/completions", request | {"prompt": with_another_first_chunk(prompt(700))}))
    assert other["choices"][0]["token_ids"] != first["choices"][0]["token_ids"], "outputs tell one prefix from another"
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(2 * PATIENCE_S) in (0, -signal.SIGTERM), server.log.read_text()[-4000:]
    wait_for(lambda: not data_plane.destinations)  # no memory is registered once the server has stopped
