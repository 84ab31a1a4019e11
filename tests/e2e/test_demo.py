"""``shadowserve demo``, small: the command that README names first, with everything it starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

KEYS = {
    "name",
    "requests",
    "ttft_mean_s",
    "ttft_p95_s",
    "tokens_cacheable",
    "tokens_computed",
    "tokens_fetched",
    "bytes_raw",
    "bytes_stored",
    "bytes_fetched",
}


def test_second_engine_fetches_and_agrees(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "shadowserve.cli", "demo", "--documents", "2", "--document-bytes", "2048"]
    command += ["--turns", "2", "--output-tokens", "4", "--json", str(file), "--keep-logs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Outputs agree, token by token." in done.stdout
    content = json.loads(file.read_text())
    cold, warm = content["phases"]
    assert content["outputs_agree"] is True
    assert KEYS <= set(cold) == set(warm)
    assert (cold["name"], warm["name"], cold["requests"], warm["requests"]) == ("cold", "warm", 4, 4)
    assert cold["tokens_fetched"] == 0 < cold["bytes_stored"]
    assert warm["tokens_fetched"] == warm["tokens_cacheable"] == cold["tokens_cacheable"] >= 2 * 2048
    assert 0 < warm["bytes_fetched"] < warm["bytes_raw"]
