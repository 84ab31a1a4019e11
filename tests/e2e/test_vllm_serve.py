"""``vllm serve`` as a user runs it: its processes, the OpenAI API, the connector's entry point, SIGTERM."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import NEVER_S, WAIT_MAX_S, wait_for
from preloaded import Preloaded
from stack import Server
from tiny_models import with_another_first_chunk

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]


@pytest.fixture
def server(model: Path, data_plane: Any, patient: dict[str, float], tmp_path: Path) -> Iterator[Server]:
    popen = subprocess.Popen if os.environ.get("TEST_NIGHTLY") else Preloaded
    server = Server(model, {"data_plane": data_plane.address, **patient}, tmp_path / "server.log", popen=popen)
    yield server
    server.kill()


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
    wait_for(lambda: data_plane.registrations == 2)
    other = json.loads(server.call("/v1/completions", request | {"prompt": with_another_first_chunk(prompt(700))}))
    assert other["choices"][0]["token_ids"] != first["choices"][0]["token_ids"], "another prefix changes the output"
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(2 * WAIT_MAX_S) in (0, -signal.SIGTERM), server.log.read_text()[-4000:]
    assert data_plane.registrations == 0, server.log.read_text()[-4000:]


def test_a_wrong_configuration_ends_vllm_serve_with_one_line_before_weights_load(model: Path, tmp_path: Path) -> None:
    """Symptom: it was reported only after warm-up, inside a traceback, and labelled "command line"."""
    server = Server(model, {"layer_ordr": True}, tmp_path / "server.log")
    try:
        assert server.process.wait(NEVER_S) == 1
    finally:
        server.kill()
    log = server.log.read_text()
    (line,) = [line for line in log.splitlines() if line.startswith("ShadowServe: ")]
    said = "kv_connector_extra_config: there is no key 'layer_ordr'; did you mean 'layer_order'?"
    assert line.removeprefix("ShadowServe: ").startswith(said)
    assert "Traceback" not in log and "load model" not in log and "EngineCore" not in log, log[-4000:]
