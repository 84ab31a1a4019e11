"""A small run of ``shadowserve demo``, the first command in the README."""

import json
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from preloaded import Preloaded
from stack import serve_environment
from tiny_models import with_another_first_chunk

from shadowserve_tools import main
from shadowserve_tools.demo import OWN_MODEL, PLAIN, QUESTIONS, _documents

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

DOCUMENTS, DOCUMENT_BYTES, OUTPUT = 2, 2048, 24

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


def test_another_prefix_changes_the_demos_outputs(make_engine: Callable[..., Any]) -> None:
    documents = _documents({"documents": DOCUMENTS, "document_bytes": DOCUMENT_BYTES})
    question = PLAIN[1].format(question=QUESTIONS[0])
    prompts = [list(f"{text}{question}".encode()) for _, text in documents]
    with closing(make_engine(None, model=OWN_MODEL, max_model_len=4096)) as engine:
        outputs = engine.outputs(prompts, OUTPUT)
        # In some documents, the small model's output does not depend on the first chunk.
        assert engine.outputs([with_another_first_chunk(prompt) for prompt in prompts], OUTPUT) != outputs


def test_second_engine_fetches_and_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "out.json"
    monkeypatch.setattr(subprocess, "Popen", Preloaded)
    for variable in serve_environment().items():  # so that all engines are forked from one process
        monkeypatch.setenv(*variable)
    command = ["demo", "--documents", f"{DOCUMENTS}", "--turns", "2"]
    command += ["--document-bytes", f"{DOCUMENT_BYTES}", "--output-tokens", f"{OUTPUT}"]
    command += ["--model", str(OWN_MODEL), "--json", str(file), "--plot", str(tmp_path / "ttft.svg")]
    command += ["--keep-logs", str(tmp_path)]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert "Outputs agree, token by token." in done.stdout
    content = json.loads(file.read_text())
    cold, warm = content["phases"]
    assert content["outputs_agree"] is True
    assert len(content["asked"]) == 4
    assert all(each["ttft_warm_s"] > 0 and f"{each['document']}: " in done.stdout for each in content["asked"])
    assert (tmp_path / "ttft.svg").read_text().count(QUESTIONS[1]) == DOCUMENTS
    assert KEYS <= set(cold) == set(warm)
    assert (cold["name"], warm["name"], cold["requests"], warm["requests"]) == ("cold", "warm", 4, 4)
    assert cold["tokens_fetched"] == 0 < cold["bytes_stored"]
    assert warm["tokens_fetched"] == warm["tokens_cacheable"] == cold["tokens_cacheable"] >= 2 * 2048
    assert 0 < warm["bytes_fetched"] < warm["bytes_raw"]
