"""Real vLLM with requests that take a slower path than configured: right tokens, a counter and one log line."""

from collections.abc import Callable
from typing import Any

import pytest
from kit import add
from machine import wait_for

from shadowserve.errors import ConfigurationError

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def test_asynchronous_fetch_false_with_two_groups_loads_beside_other_requests(
    data_plane: Any, make_engine: Callable[..., Any], family: Any, prompt: Any
) -> None:
    """Symptom: every request with a hit waited forever."""
    model = family("gemma3")
    plain = make_engine(None, model=model, enable_prefix_caching=False)
    expected = plain.outputs([prompt(1000)])
    plain.close()
    engine = make_engine(data_plane.address, model=model, extra={"asynchronous_fetch": False})
    try:
        assert engine.outputs([prompt(1000)]) == expected
        engine.flush()
        engine.reset(data_plane)
        core, ended = engine.llm.llm_engine, []
        add(engine, "hit", prompt(1000))

        def stepped() -> bool:
            ended.extend(output for output in core.step() if output.finished)
            return bool(ended)

        wait_for(stepped)
        assert [list(output.outputs[0].token_ids) for output in ended] == expected
        counted = engine.counted_since()
        assert counted["loaded_tokens"] and counted["slower_paths/several_groups"] == 1
    finally:
        engine.close()


def test_pages_without_devices_are_fetched_as_chunks(
    data_plane: Any, make_engine: Callable[..., Any], serve: Any
) -> None:
    engine = make_engine(data_plane.address, extra={"pages": True})
    try:
        serve(engine, 1000)
        engine.flush()
        engine.forget()
        serve(engine, 1000)
        counted = engine.counters()
        assert counted["loaded_tokens"] == 768 and counted["slower_paths/no_page_devices"] == 1
        assert "FetchPages" not in data_plane.calls
    finally:
        engine.close()


def test_an_engine_with_windows_refuses_layer_order(
    data_plane: Any, make_engine: Callable[..., Any], family: Any
) -> None:
    """Symptom: vLLM made piecewise CUDA graphs, and no load ran layer by layer."""
    with pytest.raises(ConfigurationError, match="layer_order: true needs one KV cache group"):
        make_engine(data_plane.address, model=family("gemma3"), extra={"layer_order": True})
