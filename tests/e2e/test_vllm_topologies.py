"""Engines of other numbers of ranks and stages find each other's records, and take of them what is theirs."""

import math
from typing import Any

import pytest
from machine import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]


TWO_RANKS, TWO_STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


def make_room(worker: Any) -> None:
    """What vLLM leaves out on CPUs where there is nothing to warm up, and then misses in a stage's first step."""
    runner = worker.model_runner
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


@pytest.mark.parametrize(
    ("writer", "reader"),
    [({}, TWO_RANKS), (TWO_RANKS, {}), (TWO_STAGES, TWO_STAGES), (TWO_STAGES, {}), ({}, TWO_STAGES)],
    ids=["one rank to two", "two ranks to one", "two stages", "two stages to one", "one stage to two"],
)
def test_ranks_of_another_number_load_what_was_stored(
    writer: dict[str, Any],
    reader: dict[str, Any],
    make_engine: Any,
    data_plane: Any,
    reference: Any,
    prompt: Any,
    several_workers: None,
) -> None:
    prompts = [prompt(length) for length in (300, 512, 700)]
    expected = reference(prompts)
    workers = math.prod(writer.values())
    engine = make_engine(data_plane.address, **writer)
    try:
        if writer == TWO_STAGES:
            engine.llm.collective_rpc(make_room)
        assert engine.outputs(prompts) == expected
        wait_for(lambda: len(data_plane.records) == 2 * workers)
    finally:
        engine.close()
    stored = set(data_plane.records)
    engine = make_engine(data_plane.address, **reader)
    try:
        if reader == TWO_STAGES:
            engine.llm.collective_rpc(make_room)
        for tokens, answer, cached in zip(prompts, expected, (256, 511, 512), strict=True):
            engine.forget()
            (output,) = engine.generate([tokens])
            assert list(output.outputs[0].token_ids) == answer
            assert output.num_cached_tokens == cached
        assert set(data_plane.records) == stored, "what was loaded is not stored again"
    finally:
        engine.close()
