"""The connection of an engine to its data plane at the start."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def test_with_a_slow_data_plane_the_first_prompt_is_stored(make_engine: Any, data_plane: Any, prompt: Any) -> None:
    """Symptom: the engine waited for its connection for two seconds only."""
    data_plane.script.stall.add("Hello")

    def answer_late() -> None:
        data_plane.wait_for_call("Hello")
        time.sleep(3)
        data_plane.script.unstall.set()

    with ThreadPoolExecutor(1) as others:
        late = others.submit(answer_late)
        engine = make_engine(data_plane.address)
        try:
            engine.outputs([prompt(600)])
            late.result()
            engine.flush()
            assert len(data_plane.records) == 2, engine.counters()
        finally:
            engine.close()


def test_an_engine_warns_of_engines_with_another_chunk_size(
    make_engine: Callable[..., Any], data_plane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: two engines with different chunk_tokens shared nothing, and neither log reported it."""
    import host_control.vllm.connector as connector

    warnings: list[str] = []
    monkeypatch.setattr(connector._logger, "warning", lambda text, *values: warnings.append(text % values))
    for chunk_tokens in (32, 64):
        data_plane.differences = ["another engine has other chunks"] if chunk_tokens == 64 else []
        with closing(make_engine(data_plane.address, extra={"chunk_tokens": chunk_tokens})):
            told = [text for text in warnings if "another engine has other chunks" in text]
            assert len(told) == (chunk_tokens == 64), warnings
    engines = [hello.engine for hello in data_plane.hellos if hello.HasField("engine")]
    assert {(each.chunk_tokens, each.quantizer) for each in engines} == {(32, "lossless"), (64, "lossless")}
    assert len({each.model for each in engines}) == 1, "the identity of the model depends on chunk_tokens"
