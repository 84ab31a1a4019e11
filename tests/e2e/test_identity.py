"""Engines that compute different KV never share it. Each case once gave wrong tokens with a hit."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from identity_support import ASSET, tick
from kit import greedy

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LENGTH = 600


class Runs:
    """Runs one prompt on engines over one store, one after the other."""

    def __init__(self, make_engine: Callable[..., Any], plane: Any, prompt: list[int], memory: Path) -> None:
        self._make_engine, self._plane, self._prompt = make_engine, plane, prompt
        self._memory = memory

    def __call__(self, model: Path, lora: Any = None, **options: Any) -> tuple[list[int], list[int], int]:
        """Return an engine's output, its output without the cache, and the number of cached tokens."""
        tick()
        extra = {"identity_cache": str(self._memory)}
        with closing(self._make_engine(self._plane.address, model=model, extra=extra, **options)) as engine:
            output, cached = self._generate(engine, lora)
            engine.flush()
            stored = dict(self._plane.records)
            engine.reset(self._plane, records=True)
            alone, _ = self._generate(engine, lora)
            engine.flush()
            self._plane.records.clear()
            self._plane.records.update(stored)
        return output, alone, cached

    def _generate(self, engine: Any, lora: Any) -> tuple[list[int], int]:
        parameters = greedy(8)
        (made,) = engine.llm.generate(
            [{"prompt_token_ids": self._prompt}], parameters, use_tqdm=False, lora_request=lora
        )
        return list(made.outputs[0].token_ids), int(made.num_cached_tokens or 0)


@pytest.fixture
def run(make_engine: Any, data_plane: Any, prompt: Any, tmp_path: Path) -> Runs:
    return Runs(make_engine, data_plane, prompt(LENGTH), tmp_path / "content.json")


def copied(folder: Path, **changes: Any) -> Path:
    shutil.copytree(ASSET, folder)
    described = json.loads((folder / "config.json").read_text())
    described.pop("rope_theta")
    (folder / "config.json").write_text(json.dumps({**described, **changes}))
    return folder


def edited(model: Path, part: str) -> None:
    """Negate some of a model's weights in place, without changing the file's size."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    tensors = {name: -tensor if part in name else tensor for name, tensor in tensors.items()}
    save_file(tensors, model / "model.safetensors")


def test_weights_edited_in_place_share_nothing_with_the_old_ones(run: Runs, tmp_path: Path) -> None:
    model = copied(tmp_path / "model")
    before, _, _ = run(model)
    shutil.copytree(model, tmp_path / "moved")
    assert run(tmp_path / "moved") == (before, before, 512), "an engine with the same weights has a hit"
    edited(model, "layers.0.self_attn.k_proj")
    after, alone, cached = run(model)
    assert (after, cached) == (alone, 0) and after != before


def test_context_lengths_with_other_longrope_factors_share_nothing(run: Runs, tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 32, "long_factor": [40.0] * 32, "original_max_position_embeddings": 1024}
    ropes = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 16.0, **factors}
    model = copied(tmp_path / "model", rope_parameters=ropes)
    short, _, _ = run(model, max_model_len=1024)
    long, alone, cached = run(model, max_model_len=2048)
    assert (long, cached) == (alone, 0) and long != short


def adapter(folder: Path, seed: int, modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")) -> Path:
    """Create a LoRA adapter for the project's model that changes its outputs."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    described = json.loads((ASSET / "config.json").read_text())
    hidden, heads, kv = described["hidden_size"], described["num_attention_heads"], described["num_key_value_heads"]
    wide, narrow = heads * described["head_dim"], kv * described["head_dim"]
    sizes = {"q_proj": (hidden, wide), "k_proj": (hidden, narrow), "v_proj": (hidden, narrow), "o_proj": (wide, hidden)}
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(described["num_hidden_layers"]):
        for module in modules:
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            inner, outer = sizes[module]
            tensors[f"{name}.lora_A.weight"] = torch.randn(8, inner, generator=generator)
            tensors[f"{name}.lora_B.weight"] = torch.randn(outer, 8, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": list(modules), "bias": "none"})
    )
    return folder


def lora(path: Path, number: int = 1, name: str = "mine") -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(path))


def test_adapters_share_by_content(run: Runs, tmp_path: Path) -> None:
    folder, options = adapter(tmp_path / "adapter", 1), {"enable_lora": True, "max_lora_rank": 8}
    plain, _, _ = run(ASSET, **options)
    first, _, cached = run(ASSET, lora(folder), **options)
    assert first != plain and cached == 0
    same = shutil.copytree(folder, tmp_path / "replica")
    assert run(ASSET, lora(same, 2, "another"), **options) == (first, first, 512), "a replica shares"
    # Retrained in the same folder.
    adapter(folder, 2)
    after, alone, cached = run(ASSET, lora(folder), **options)
    assert (after, cached) == (alone, 0) and after != first


def test_an_adapter_retrained_while_the_engine_runs_is_not_cached(
    make_engine: Any, data_plane: Any, prompt: Any, tmp_path: Path
) -> None:
    folder, other = adapter(tmp_path / "adapter", 1), adapter(tmp_path / "other", 2)
    tick()
    options = {"enable_lora": True, "max_lora_rank": 8, "extra": {"identity_cache": "none"}}
    runs = Runs(make_engine, data_plane, prompt(LENGTH), tmp_path)
    with closing(make_engine(data_plane.address, model=ASSET, **options)) as engine:
        first, _ = runs._generate(engine, lora(folder))
        engine.flush()
        assert (len(data_plane.records), data_plane.fetches) == (2, [])
        tick()
        for file in other.iterdir():
            shutil.copyfile(file, folder / file.name)
        engine.reset(data_plane)
        assert runs._generate(engine, lora(folder)) == (first, 0), "vLLM continues with the loaded adapter"
        # For another adapter, vLLM evicts the loaded one; it later loads the new content.
        runs._generate(engine, lora(other, 2, "other"))
        engine.reset(data_plane, records=True)
        second, cached = runs._generate(engine, lora(folder))
        engine.flush()
        assert second != first and (cached, data_plane.records) == (0, {})
