"""Other KV caches: bfloat16, fp8, large blocks, sliding windows that keep all tokens, MLA."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tiny_models import FAMILIES

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

# Equal step sizes with and without a hit, for equal rounding.
IN_CHUNKS = {"max_num_batched_tokens": 256}
CPUINFO = Path("/proc/cpuinfo")
AMX = pytest.mark.skipif(
    not CPUINFO.exists() or " amx_tile" not in CPUINFO.read_text(),
    reason="vLLM needs AMX to continue after a prefix with MLA on CPUs",
)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"dtype": "bfloat16", **IN_CHUNKS}),
        ("llama", {"dtype": "bfloat16", "kv_cache_dtype": "fp8", **IN_CHUNKS}),
        ("llama", {"block_size": 128}),
        ("gemma3", {"disable_hybrid_kv_cache_manager": True}),
        ("gpt_oss", {"disable_hybrid_kv_cache_manager": True}),
        pytest.param("deepseek", {"dtype": "bfloat16", **IN_CHUNKS}, marks=AMX),
    ],
    ids=["bfloat16", "fp8", "large blocks", "windows", "windows with sinks", "latents"],
)
def test_a_prompt_is_stored_and_loaded(
    name: str, options: dict[str, Any], family: Any, make_engine: Any, data_plane: Any, prompt: Any
) -> None:
    with closing(make_engine(data_plane.address, model=family(name), **options)) as engine:
        assert engine.connector._scheduler.problem == ""
        (first,) = engine.outputs([prompt(600)])
        engine.flush()
        assert len(data_plane.records) == 2, engine.counters()
        engine.forget()
        assert engine.served(prompt(600)) == (first, 512)
        engine.assert_sensitive([prompt(600)], [first])


def test_the_layout_of_mla_is_detected_and_moved(family: Any, make_engine: Any, prompt: Any) -> None:
    """Without AMX the plugin is off for MLA on CPUs, but it supports the layout."""
    import torch

    from host_control.layouts import PagedLayout
    from host_control.vllm.probe import find_layout
    from host_control.vllm.support import UncacheableError

    with closing(make_engine(None, model=family("deepseek"), **FAMILIES["deepseek"].engine)) as engine:
        engine.outputs([prompt(300)])
        caches = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner.kv_caches
        vllm_config = engine.llm.llm_engine.vllm_config
        names = list(engine.scheduler.kv_cache_config.kv_cache_groups[0].layer_names)
        # vLLM passes connectors the caches with a dimension for heads; the caches of its layers have no such dimension.
        tensors = [cache if cache.ndim == 4 else cache.unsqueeze(1) for cache in caches]
        assert len(tensors) == len(names) == 3
        for name, cache in zip(names, tensors, strict=True):
            assert find_layout(vllm_config, name, cache, ("latent",)) == "latent"
        with pytest.raises(UncacheableError):
            find_layout(vllm_config, names[0], tensors[0], ("kv_cells",))
        layout = PagedLayout(tensors, "latent")
        used = [block for block in range(len(tensors[0])) if tensors[0][block].any()][:16]
        free = [block for block in range(len(tensors[0])) if not tensors[0][block].any()][:16]
        assert len(used) == len(free) == 16
        chunk = torch.empty(layout.chunk_bytes(16 * layout.block_tokens), dtype=torch.uint8)
        layout.gather(chunk, used)
        with torch.inference_mode():
            layout.scatter(chunk, free)
        for cache in tensors:
            assert torch.equal(cache[free], cache[used])
            assert len({tuple(cache[block].flatten().tolist()) for block in used}) == 16, "each block differs"
