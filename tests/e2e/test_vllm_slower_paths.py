"""Real vLLM where a configured way to load cannot be taken: the right tokens, a counter, and one log line."""

from collections.abc import Callable
from typing import Any

import pytest
from machine import wait_for

from shadowserve.errors import ConfigurationError

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def test_asynchronous_fetch_false_with_two_groups_loads_beside_other_requests(
    data_plane: Any, make_engine: Callable[..., Any], family: Any, prompt: Any
) -> None:
    """Symptom: every request that hits waits for ever."""
    from vllm import SamplingParams

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
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
        core.add_request("hit", {"prompt_token_ids": prompt(1000)}, sampling)

        def stepped() -> bool:
            ended.extend(output for output in core.step() if output.finished)
            return bool(ended)

        wait_for(stepped)
        assert [list(output.outputs[0].token_ids) for output in ended] == expected
        counted = engine.counted_since()
        assert counted["loaded_tokens"] and counted["slower_paths/several_groups"] == 1
    finally:
        engine.close()


def test_pages_of_a_data_plane_without_devices_come_as_without_pages(
    data_plane: Any, make_engine: Callable[..., Any], reference: Any, prompt: Any
) -> None:
    engine = make_engine(data_plane.address, extra={"pages": True})
    try:
        assert engine.outputs([prompt(1000)]) == reference([prompt(1000)])
        engine.flush()
        engine.forget()
        assert engine.outputs([prompt(1000)]) == reference([prompt(1000)])
        counted = engine.counters()
        assert counted["loaded_tokens"] == 768 and counted["slower_paths/no_page_devices"] == 1
        assert "FetchPages" not in data_plane.calls
    finally:
        engine.close()


def test_an_engine_with_windows_refuses_layer_order(
    data_plane: Any, make_engine: Callable[..., Any], family: Any
) -> None:
    """Symptom: vLLM made piecewise CUDA graphs, and no load ever went by layers."""
    with pytest.raises(ConfigurationError, match="layer_order: true needs one KV cache group"):
        make_engine(data_plane.address, model=family("gemma3"), extra={"layer_order": True})
