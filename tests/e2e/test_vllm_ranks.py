"""Tensor parallelism: each rank has its own namespace, keys and memory; a hit is what every rank holds."""

from typing import Any

import pytest
from machine import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]


def test_two_ranks_store_load_and_recompute(
    make_engine: Any, data_plane: Any, reference: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    prompts = [prompt(length) for length in (300, 512, 700)]
    expected = reference(prompts)
    # The workers are processes of their own; they import from the checkout.
    monkeypatch.setenv("PYTHONPATH", str(request.config.rootpath))
    engine = make_engine(data_plane.address, tensor_parallel_size=2)
    try:
        assert engine.outputs(prompts) == expected
        wait_for(lambda: len(data_plane.records) == 2 * 2)  # the prompts begin with the same two chunks
        engine.forget()
        outputs = engine.generate(prompts)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert [output.num_cached_tokens for output in outputs] == [256, 511, 512]
        assert data_plane.destinations == 4

        # One rank's copy of the second chunk is gone after the lookup has seen it: both ranks recompute it.
        data_plane.script.lookup_hits = lambda hits: [2 for _ in hits]
        data_plane.records.pop(data_plane.fetches[-1].keys[-1])
        engine.forget()
        data_plane.fetches.clear()
        (output,) = engine.generate([prompt(700)])
        assert list(output.outputs[0].token_ids) == reference([prompt(700)])[0]
        assert len(data_plane.fetches) == 2
    finally:
        engine.close()
    wait_for(lambda: data_plane.destinations == 0)
