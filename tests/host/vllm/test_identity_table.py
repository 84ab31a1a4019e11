"""Changes every input in vLLM's real configuration, and compares the effect on the key with the table."""

import copy
import dataclasses
import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from identity_support import ASSET, digest, engine_config, kv_cache_config, model_folder, model_of, part_of, rope, spec

from host_control.config import HostConfig
from host_control.vllm.identity.namespace import positions
from host_control.vllm.identity.table import ENVIRONMENT, TABLE, Effect
from host_control.vllm.support import UncacheableError

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def base() -> Any:
    return engine_config(ASSET)


def fields_of(config: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield place, name and value of every configuration field that the table lists by name."""
    for place in dataclasses.fields(config):
        value = getattr(config, place.name)
        if dataclasses.is_dataclass(value):
            yield from (
                (place.name, field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)
            )


def another(value: Any) -> Any:
    """Return another value for a field, of any type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, enum.Enum):
        return next(member for member in type(value) if member is not value)
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, dict):
        return {**value, "another": 1}
    return [*value, "another"] if isinstance(value, list) else "another"


def effect_of(place: str, name: str) -> Any:
    rows = [row for row in TABLE if row.place == place]
    return next((row.effect for row in rows if name in row.named()), None) or next(
        (row.effect for row in rows if row.names == "*"), None
    )


# Other tests cover the values that these produce, below or in test_identity_weights.py and test_identity_requests.py.
OBJECTS = {"hf_config", "hf_text_config", "multimodal_config"}


def test_the_table_lists_every_field_of_vllm(base: Any) -> None:
    assert [(place, name) for place, name, _ in fields_of(base) if effect_of(place, name) is None] == []
    places = {field.name for field in dataclasses.fields(base)}
    assert places - {row.place for row in TABLE} == set()
    rows = [(row.place, name) for row in TABLE for name in row.named()]
    assert len(rows) == len(set(rows)), "a name has two rows"
    real = {(place, name) for place, name, _ in fields_of(base)}
    gone = {(place, name) for place, name in rows if place in {place for place, _ in real} and name != "*"} - real
    assert gone == set(), "rows of fields that no longer exist"


def test_each_field_has_the_effect_in_the_table(base: Any) -> None:
    before, wrong, seen = digest(base), [], 0
    for place, name, value in fields_of(base):
        effect = effect_of(place, name)
        if name in OBJECTS or effect not in (Effect.KEY, Effect.NO, Effect.ROUNDING):
            continue
        config, seen = copy.copy(base), seen + 1
        part = copy.copy(getattr(config, place))
        object.__setattr__(part, name, another(value))
        object.__setattr__(config, place, part)
        # The dtype of the cache's own elements counts.
        caches = kv_cache_config(spec(dtype=torch.uint8)) if name == "cache_dtype" else None
        same = digest(config, caches) == before
        if same != (effect is not Effect.KEY):
            wrong.append(f"{place}.{name}: {value!r} -> {another(value)!r}, {effect}")
    assert not wrong, "\n".join(wrong)
    assert seen > 250


def test_an_unknown_field_is_in_the_key_if_set(base: Any) -> None:
    config = copy.copy(base)
    later = dataclasses.make_dataclass("Later", [("speed", int, 1), ("mode", str, "auto")])
    added = dataclasses.make_dataclass("VllmConfig", [("later_config", object, None)], bases=(type(base),))
    object.__setattr__(config, "__class__", added)
    object.__setattr__(config, "later_config", later())
    assert digest(config) == digest(base)
    object.__setattr__(config, "later_config", later(speed=2))
    assert digest(config) != digest(base)


BINNED = {"quantizer": "binned"}
# Arguments of users that change KV, and those that do not: of vLLM, of the plugin, and of the cache's shape.
OTHER: dict[str, list[dict[str, Any]]] = {
    "engine": [
        {"dtype": "float32"},
        {"hf_overrides": {"rms_norm_eps": 1e-3}},
        {"hf_overrides": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}},
        {"hf_overrides": rope("linear")},
        {"hf_overrides": {"sliding_window": 128, "use_sliding_window": True}},
        {"model_impl": "transformers"},
        {"attention_config": {"use_prefill_query_quantization": True}},
        {"kernel_config": {"moe_backend": "triton"}},
        {"linear_backend": "marlin"},
        {"worker_extension_cls": "mine.Worker"},
        {"kv_sharing_fast_prefill": True},
        {"additional_config": {"a": 1}},
        {"load_format": "dummy"},
        {"quantization": "fp8_per_tensor"},
        {"quantization": "fp8_per_tensor", "quantization_config": {"ignore": ["model.layers.0.mlp.down_proj"]}},
    ],
    "host": [
        BINNED,
        BINNED | {"bins": 32},
        {"chunk_tokens": 512},
        BINNED | {"value_bins": 32},
        BINNED | {"scale_tokens": 16},
    ],
    "cache": [{"num_kv_heads": 1}, {"head_size": 32}, {"dtype": torch.float16}],
}
SAME: dict[str, list[dict[str, Any]]] = {
    "engine": [
        {"served_model_name": "shown"},
        {"max_model_len": 2048},
        {"seed": 7},
        {"revision": "v2"},
        {"load_format": "safetensors"},
        {"block_size": 64},
        {"max_num_batched_tokens": 512},
        {"max_num_seqs": 4},
        {"enforce_eager": True},
        {"enable_prefix_caching": False},
        {"enable_lora": True},
        {"enable_lora": True, "max_lora_rank": 64},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        {"compilation_config": {"mode": 0}},
        {"optimization_level": 0},
        {"disable_log_stats": True},
        {"hf_overrides": {"eos_token_id": 5}},
        {"structured_outputs_config": {"backend": "outlines"}},
        {"gpu_memory_utilization": 0.5},
        {"generation_config": "vllm", "override_generation_config": {"temperature": 0.5}},
        {"config_format": "hf"},
        {"model_impl": "vllm"},
    ],
    "host": [{"fetch_timeout_s": 3, "order": "sjf", "store": False, "identity_cache": "none", "data_plane": "unix:/x"}],
    "cache": [{"block_size": 64}],
}


def digest_with(base: Any, kind: str, given: dict[str, Any]) -> bytes:
    if kind == "engine":
        return digest(engine_config(ASSET, **given))
    return digest(base, host=HostConfig(**given)) if kind == "host" else digest(base, kv_cache_config(spec(**given)))


@pytest.mark.parametrize("kind", OTHER)
def test_arguments_that_change_kv_change_the_key(kind: str, base: Any) -> None:
    found = {digest(base): "the default"}
    for given in OTHER[kind]:
        name = digest_with(base, kind, given)
        assert name not in found, f"{given}: the same key as {found[name]}"
        found[name] = str(given)


@pytest.mark.parametrize("kind", SAME)
def test_arguments_that_do_not_change_kv_leave_the_key(kind: str, base: Any) -> None:
    assert [given for given in SAME[kind] if digest_with(base, kind, given) != digest(base)] == []


def test_another_tokenizer_leaves_the_key(base: Any, tmp_path: Path) -> None:
    assert digest(engine_config(ASSET, tokenizer=str(model_folder(tmp_path / "t")))) == digest(base)


@pytest.mark.parametrize("module", ["vllm.model_executor.models.mistral", "mine"])
def test_another_model_class_is_in_the_key(
    base: Any, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.model_loader import utils
    from vllm.model_executor.models import ModelRegistry

    monkeypatch.setitem(ModelRegistry.models, "LlamaForCausalLM", ModelRegistry.models["LlamaForCausalLM"])
    monkeypatch.setattr(utils, "_MODEL_ARCH_BY_HASH", {})
    monkeypatch.syspath_prepend(str(tmp_path))
    before, found = digest(base), []
    for body in ("pass", "size = 1"):
        utils._MODEL_ARCH_BY_HASH.clear()  # like a new process
        (tmp_path / "mine.py").write_text(
            "from vllm.model_executor.models.llama import LlamaForCausalLM\n\n\n"
            f"class MistralForCausalLM(LlamaForCausalLM):\n    {body}\n"
        )
        found.append(
            digest(engine_config(ASSET, model_class_overrides={"LlamaForCausalLM": f"{module}:MistralForCausalLM"}))
        )
    assert before not in found
    assert (found[0] != found[1]) is (module == "mine"), "the key contains the content of the user's own code"


def test_dummy_weights_are_identified_by_their_seed() -> None:
    one, other, again = (digest(engine_config(ASSET, load_format="dummy", seed=seed)) for seed in (0, 1, 0))
    assert one == again != other


@pytest.mark.parametrize(
    ("kind", "counts"),
    [("default", False), ("linear", False), ("llama3", False), ("yarn", False), ("dynamic", True), ("longrope", True)],
)
@pytest.mark.parametrize("transformers", [4, 5])
def test_the_context_length_counts_if_it_changes_rotation(
    tmp_path: Path, kind: str, counts: bool, transformers: int
) -> None:
    described = rope(kind)
    if transformers == 4:
        described = {"rope_scaling": described["rope_parameters"], "rope_theta": 10000.0, "rope_parameters": None}
    folder = model_folder(tmp_path / "m", max_position_embeddings=4096, **described)
    shorter, longer = (digest(engine_config(folder, max_model_len=length)) for length in (1024, 2048))
    assert (shorter != longer) is counts


def test_context_lengths_on_one_side_of_longropes_limit_share(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", max_position_embeddings=4096, **rope("longrope"))
    assert len({digest(engine_config(folder, max_model_len=length)) for length in (512, 1024)}) == 1
    assert len({digest(engine_config(folder, max_model_len=length)) for length in (1025, 2048, 4096)}) == 1


def test_the_context_length_counts_for_unknown_rotary_types() -> None:
    nested = {
        "text": {"rope_parameters": {"full_attention": {"rope_type": "new"}, "sliding": {"rope_type": "default"}}}
    }
    assert positions(nested, 1024) != positions(nested, 2048)


def test_transformers_dynamic_rotation_is_uncacheable(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", max_position_embeddings=4096, **rope("dynamic"))
    with pytest.raises(UncacheableError, match="longest request in a batch"):
        model_of(engine_config(folder, model_impl="transformers"))


@pytest.mark.parametrize(
    ("ranks", "expected"), [(1, [(0, 4)]), (2, [(0, 2), (2, 4)]), (8, [(n // 2, n // 2 + 1) for n in range(8)])]
)
def test_a_rank_is_identified_by_its_heads(
    base: Any, monkeypatch: pytest.MonkeyPatch, ranks: int, expected: list[tuple[int, int]]
) -> None:
    config = shared_by(base, ranks, monkeypatch)
    caches = kv_cache_config(spec(num_kv_heads=max(1, 4 // ranks)))
    named = [part_of(config, caches, rank=rank) for rank in range(ranks)]
    assert [each.heads for each in named] == expected
    assert {(each.label, each.layers) for each in named} == {("full", (0, 3))}
    assert model_of(config, caches).digest() == model_of(base).digest(), "one chain for all"
    digests = [digest(config, caches, rank=rank) for rank in range(ranks)]
    assert len(set(digests)) == len(set(expected)), "ranks with the same heads share their records"


def test_mla_is_the_same_for_any_number_of_ranks(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    caches = kv_cache_config(MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.bfloat16))
    alone = digest(base, caches)
    config = shared_by(base, 2, monkeypatch)
    assert {digest(config, caches, rank=rank) for rank in (0, 1)} == {alone}


def test_unknown_divisions_of_heads_are_not_shared(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = shared_by(base, 2, monkeypatch)
    caches = kv_cache_config(spec(num_kv_heads=3))
    assert len({digest(config, caches, rank=rank) for rank in (0, 1)} | {digest(base, caches)}) == 3


def shared_by(base: Any, ranks: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the configuration of an engine with a number of ranks, for a model with four KV heads."""
    monkeypatch.setattr(type(base.model_config), "get_total_num_kv_heads", lambda self: 4)
    config = copy.copy(base)
    config.parallel_config = copy.copy(base.parallel_config)
    object.__setattr__(config.parallel_config, "tensor_parallel_size", ranks)
    object.__setattr__(config.parallel_config, "rank", ranks - 1)  # the model is the same on all ranks
    return config


def test_two_fp8_formats_share_nothing(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    config = copy.copy(base)
    config.cache_config = copy.copy(base.cache_config)
    caches = kv_cache_config(spec(dtype=torch.uint8))
    found = []
    for named, element in (("fp8", "float8_e4m3fn"), ("fp8_e4m3", "float8_e4m3fn"), ("fp8", "float8_e4m3fnuz")):
        platform = classmethod(lambda cls, element=element: getattr(torch, element))
        monkeypatch.setattr(type(current_platform), "fp8_dtype", platform)
        object.__setattr__(config.cache_config, "cache_dtype", named)
        found.append(digest(config, caches))
    ocp, spelled, other = found
    assert ocp == spelled != other


@pytest.mark.parametrize("name", ["VLLM_MARLIN_INPUT_DTYPE", "VLLM_CPU_INT4_W4A8"])
def test_environment_that_rounds_activations_is_in_the_key(
    base: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest(base)
    monkeypatch.setenv(name, "int8" if "DTYPE" in name else "0")
    assert digest(base) != before


def test_environment_of_the_table_is_vllm_s(base: Any) -> None:
    import vllm.envs

    assert [name for name in ENVIRONMENT if name not in vllm.envs.environment_variables] == []


def test_exceptions_of_a_checkpoints_quantization_are_in_the_key(tmp_path: Path) -> None:
    found = []
    for ignored in ([], ["model.layers.0.self_attn.k_proj"]):
        described = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ignored}
        folder = model_folder(tmp_path / f"m{len(ignored)}", quantization_config=described)
        found.append(digest(engine_config(folder)))
    assert found[0] != found[1]
