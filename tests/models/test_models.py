"""A small matrix of models: three families and a few cells; `make models` runs all of them."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import answers as answers_module
import families
import model_matrix
import pytest
from answers import Answer, difference
from cells import Cell, Reference, Served, plan
from model_matrix import failed, published_row, run_families
from published import PUBLISHED, found
from tiny_models import FAMILIES

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
CELLS = ("sensitive", "one chunk", "window", "local then stored", "chunked prefill", "a record is lost")


@pytest.fixture
def terminable() -> Iterator[None]:
    """This process handles SIGTERM as before, once the test has ended."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_answers_are_those_of_the_engine_without_the_plugin(terminable: None) -> None:
    """In this process, which has imported vLLM."""
    reader, writer = os.pipe()
    with open(reader) as lines:
        with open(writer, "w"):
            families.main([str(writer), "llama,gemma3,qwen3_next", ",".join(CELLS)])
        found = [json.loads(line) for line in lines]
    assert [family["name"] for family in found] == ["llama", "gemma3", "qwen3_next"]
    for family in found:
        assert not failed(family), family
        assert set(family["cells"]) == set(CELLS), family
        assert family["cells"]["sensitive"]["outcome"] == "passed"
        served = family["cells"]["one chunk"]
        assert served["own"] == family["chunk_tokens"], "vLLM's own cache has no hit"
        assert bool(served["hit"]) == (family["off"] == ""), (
            "the plugin must serve if it is on, and give a reason if it is off"
        )
        if family["name"] == "llama":
            assert family["off"] == "" and family["cells"]["a record is lost"]["outcome"] == "passed"


def said(*tokens: int, logprob: float = -1.0, cached: int = 0) -> Answer:
    return Answer(list(tokens), [{token: logprob, token + 1: logprob - 0.0005} for token in tokens], cached)


def test_other_tokens_and_other_logprobs_are_a_difference() -> None:
    assert difference(said(1, 5), said(1, 5), 1e-3) == 0
    assert difference(said(1, 5), said(1, 9), 1e-3) == float("inf")
    assert difference(said(1), said(1, logprob=-1.25), 1e-3) == 0.25
    assert difference(said(1), said(1, logprob=float("nan")), 1e-3) == float("inf")


def test_as_likely_tokens_may_take_each_others_place_within_the_tolerance() -> None:
    one = Answer([1, 7], [{1: -1.0, 2: -1.0005}, {7: -1.0}], 0)
    other = Answer([2, 30], [{2: -1.0, 1: -1.0005}, {30: -1.0}], 0)
    assert difference(one, other, 1e-3) == pytest.approx(0.0005)
    assert difference(one, other, 1e-4) == float("inf")


@pytest.mark.parametrize(
    ("cold", "warm", "off", "why"),
    [
        (said(3), said(3, cached=64), "", ""),
        (said(3), said(3), "windows are not supported", ""),
        (said(3), said(9, cached=64), "", "answered [9]"),
        (said(9), said(3, cached=64), "", "answered [9]"),
        (said(3), said(3, logprob=-1.5, cached=64), "", "logprobs 0.5"),
        (said(3), said(3, cached=32), "", "32 tokens were served, of 64"),
        (said(3), said(3, cached=64), "windows are not supported", "by a plugin that is off"),
    ],
    ids=["hit", "off", "wrong hit", "wrong at once", "other logprobs", "too short", "hit though off"],
)
def test_what_is_wrong_with_a_hit_is_seen(
    cold: Answer, warm: Answer, off: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with scripted answers."""
    outputs = iter([cold, warm])
    monkeypatch.setattr(answers_module, "answers", lambda *_: [next(outputs)])
    prompts = plan(32, 0, 8192, ("one chunk",))
    reference = Reference(prompts, 1e-3, {"one chunk": said(3)}, {"one chunk": said(3, cached=70)})
    engine: Any = SimpleNamespace(
        problem=off,
        forget=lambda: None,
        flush=lambda: None,
        scheduler=SimpleNamespace(
            max_num_scheduled_tokens=8192, scheduler_config=SimpleNamespace(enable_chunked_prefill=True)
        ),
    )
    cell: Cell = Served(engine, reference, SimpleNamespace()).run("one chunk")  # type: ignore[arg-type]
    assert (cell.outcome == "passed") == (not why), cell
    assert why in cell.why


_CRASHES = """
import json, os, sys
for name in sys.argv[2].split(","):
    if name in ("gemma3", "eagle"):
        print("the end of it", flush=True)
        os.abort()
    os.write(int(sys.argv[1]), json.dumps({"name": name, "cells": {}, "asked": sys.argv[3]}).encode() + b"\\n")
"""


def test_a_family_that_ends_its_process_is_the_only_one_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "families.py").write_text(_CRASHES)
    monkeypatch.setattr(model_matrix, "HERE", tmp_path)
    names = ["llama", "qwen3", "gemma3", "phi3", "mtp", "eagle"]
    found = list(run_families(names, ["one chunk", "abort"]))
    assert [family["name"] for family in found] == names
    assert [family["name"] for family in found if failed(family)] == ["gemma3", "eagle"]
    assert found[2]["failed"] == "its process ended with -6" and "the end of it" in found[2]["log"]
    assert found[0]["asked"] == "one chunk,abort"


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        ("gpt-oss 120B", [16, 16]),
        ("Gemma 3 27B", [16] * 7),
        ("Llama 4 Scout", [16] * 4),
        ("DeepSeek V3, R1", [64]),
        ("DeepSeek V3.2", [64]),
        ("DeepSeek V4 Flash", [64, 64, 256, 4, 8]),
        ("Qwen3-Next 80B", [544] * 4),
        ("Kimi-Linear 48B", [1920] * 4),
        ("Nemotron-H 8B", [1040] * 7),
        ("a ring of scratch", [16, 16]),
    ],
)
def test_vllm_groups_a_published_model_as_it_does_on_a_gpu(model: str, blocks: list[int]) -> None:
    described = found(model)
    assert [group["block_tokens"] for group in described["groups"]] == blocks
    assert published_row(described) in DOCUMENT.read_text(), "run 'make models', which writes these rows, too"


def test_the_document_names_every_family_and_published_model() -> None:
    tables = DOCUMENT.read_text().split("\n| ")
    named = [row.partition(" |")[0] for row in tables[1:]]
    assert set(named) == {"family", "model", *FAMILIES, *PUBLISHED}
