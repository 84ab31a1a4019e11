"""Models with several KV cache groups: windows, windows with sinks, states; hits are right, and memory stays vLLM's."""

from typing import Any

import pytest

from shadowserve.proto import dataplane_pb2 as pb

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

FAMILIES = [("gemma3", {}), ("gpt_oss", {}), ("qwen3_next", {"dtype": "bfloat16"})]
LENGTHS = (600, 1100)


@pytest.mark.parametrize(("name", "options"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_every_group_comes_back_from_the_store(
    name: str, options: dict[str, Any], family: Any, make_engine: Any, data_plane: Any, prompt: Any
) -> None:
    options = {"model": family(name), "max_num_batched_tokens": 512, **options}
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    engine = make_engine(None, **options)
    try:
        expected, blocks = engine.outputs(prompts), engine.scheduler.kv_cache_config.num_blocks
        engine.assert_sensitive(prompts, expected)
    finally:
        engine.close()
    engine = make_engine(data_plane.address, **options)
    try:
        assert engine.scheduler.kv_cache_config.num_blocks == blocks, "the plugin costs no block"
        assert engine.outputs(prompts) == expected
        engine.flush()
        engine.forget()
        outputs = engine.generate(prompts)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert [output.num_cached_tokens >= least for output, least in zip(outputs, (512, 1024), strict=True)] == [
            True
        ] * 2

        # A load that falls short is computed from the start, and not offered again.
        for outcome, reason in ((pb.OUTCOME_CORRUPT, "corrupt"), (pb.OUTCOME_ABSENT, "absent")):
            engine.flush()
            engine.forget()
            data_plane.script.fail_fetch_at, data_plane.script.fail_outcome = 2, outcome
            (output,) = engine.generate(prompts[1:])
            assert [list(output.outputs[0].token_ids)] == expected[1:]
            assert output.num_cached_tokens == 0
            assert engine.counters()[f"load_failures/{reason}"] == 1
    finally:
        engine.close()
    assert data_plane.destinations == 0
