"""Engines of one model with other chunks or another quantizer: each says what it has, and warns of what it is told."""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def plane() -> Iterator[Any]:
    from scripted import ScriptedDataPlane

    plane = ScriptedDataPlane()
    yield plane
    plane.stop()


def test_an_engine_names_its_model_and_chunks_and_warns_of_an_engine_that_differs(
    make_engine: Callable[..., Any], plane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: two engines with different chunk_tokens shared nothing, and neither log said so."""
    import host_control.vllm.connector as connector

    warnings: list[str] = []
    monkeypatch.setattr(connector._logger, "warning", lambda text, *values: warnings.append(text % values))
    for chunk_tokens in (32, 64):
        plane.differences = ["another engine has other chunks"] if chunk_tokens == 64 else []
        with closing(make_engine(plane.address, extra={"chunk_tokens": chunk_tokens})):
            told = [text for text in warnings if "another engine has other chunks" in text]
            assert len(told) == (chunk_tokens == 64), warnings
    engines = [hello.engine for hello in plane.hellos if hello.HasField("engine")]
    assert {(each.chunk_tokens, each.quantizer) for each in engines} == {(32, "lossless"), (64, "lossless")}
    assert len({each.model for each in engines}) == 1, "the model is the same, whatever its chunks are"
