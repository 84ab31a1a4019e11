"""Layouts of chunks: pages of quantized caches are stored as bytes, each format in its own namespace."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from identity_support import ASSET, engine_config, kv_cache_config, layout_of, model_folder, model_of, part_of
from identity_support import spec as full

from host_control.config import HostConfig
from host_control.vllm.support import UncacheableError, uncacheable
from shadowserve.chunk import DType, Quantizer

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

DOCUMENT = Path(__file__).parents[3] / "docs" / "design" / "identity.md"
BACKENDS = {
    "Triton": "v1.attention.backends.triton_attn.TritonAttentionBackend",
    "TurboQuant": "v1.attention.backends.turboquant_attn.TurboQuantAttentionBackend",
    "ROCm": "v1.attention.backends.rocm_attn.RocmAttentionBackend",
    "b12x": "v1.attention.backends.b12x.B12xPagedAttentionBackend",
    "MLA": "model_executor.layers.attention.mla_attention.MLACommonBackend",
}
ROWS = [
    [cell.strip().strip("`") for cell in line.strip("|\n").split("|")]
    for line in DOCUMENT.read_text().partition("<!-- begin pages -->\n")[2].partition("<!-- end")[0].splitlines()[2:]
]
PAGES = [(row[0], row[1]) for row in ROWS]
INLINE = [page for page in PAGES if page[0] not in ("bfloat16", "fp8")]


def page(dtype: str, backend: str) -> Any:
    """Return a layer's spec for a cache dtype and backend."""
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, get_kv_quant_mode

    module, _, name = BACKENDS[backend].rpartition(".")
    shape: dict[str, Any] = {"dtype": STR_DTYPE_TO_TORCH_DTYPE[dtype], "kv_quant_mode": get_kv_quant_mode(dtype)}
    plain: Any
    if backend == "MLA":
        packed = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}.get(dtype)  # as in vLLM's MLAAttention
        shape |= {"num_kv_heads": 1, "head_size": 576, "cache_dtype_str": dtype, "state_content_bytes": packed}
        plain = MLAAttentionSpec(block_size=64, **shape)
    else:
        plain = FullAttentionSpec(block_size=32, num_kv_heads=8, head_size=128, **shape)
    return getattr(importlib.import_module(f"vllm.{module}"), name).customize_spec(plain)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return engine_config(model_folder(tmp_path_factory.mktemp("pages") / "model"))


def problem(config: Any, spec: Any) -> str:
    groups = [SimpleNamespace(layer_names=["a", "b", "c"], kv_cache_spec=spec)]
    return uncacheable(config, SimpleNamespace(kv_cache_groups=groups)) or ""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row[:2]))
def test_pages_match_the_documentation(row: list[str]) -> None:
    spec = page(row[0], row[1])
    found = [str(spec.num_heads), str(spec.state_content_size_bytes), str(spec.dtype).removeprefix("torch.")]
    assert found == row[2:5]
    assert spec.page_size_bytes == spec.block_size * spec.num_heads * spec.state_content_size_bytes


@pytest.mark.parametrize(("dtype", "backend"), INLINE)
def test_pages_with_inline_scales_are_stored_as_bytes(
    config: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, backend: str
) -> None:
    spec = page(dtype, backend)
    monkeypatch.setattr(config.cache_config, "cache_dtype", dtype)
    if said := problem(config, spec):
        assert len(said) > 20, "it runs without the cache and without a reason"
        return
    shape = layout_of(config, kv_cache_config(spec), HostConfig(quantizer="binned"))
    assert (shape.dtype, shape.quantizer) == (DType.UINT8, Quantizer.PASSTHROUGH)


def test_formats_of_one_element_type_share_nothing(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    formats = [dtype for dtype, backend in PAGES if backend == "MLA"]
    for dtype in formats:
        monkeypatch.setattr(config.cache_config, "cache_dtype", dtype)
        names.add(model_of(config, kv_cache_config(page(dtype, "MLA"))).digest())
    assert len(names) == len(formats)


@pytest.mark.parametrize(("dtype", "backend"), [(row[0], row[1]) for row in ROWS if row[6] == "no"])
def test_pages_that_cannot_be_divided_by_heads_are_not_shared(
    config: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, backend: str
) -> None:
    """Pages of K of all heads, then V of all heads: with two heads, the number of slots equals the number of heads."""
    monkeypatch.setattr(config.cache_config, "cache_dtype", dtype)
    for heads in (8, 2):
        spec = replace(page(dtype, backend), num_kv_heads=heads)
        assert problem(config, spec) or "rank" in part_of(config, kv_cache_config(spec)).label


@pytest.mark.parametrize("dtype", ["int8_per_token_head", "turboquant_3bit_nc"])
def test_opaque_pages_include_vllms_release_and_are_refused_on_cpus(
    config: Any, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """The backend of a release orders such pages; on a CPU, the instruction set does."""
    import vllm

    monkeypatch.setattr(config.cache_config, "cache_dtype", dtype)
    caches = kv_cache_config(page(dtype, dict(INLINE)[dtype]))
    assert f"of vLLM {vllm.__version__}" in part_of(config, caches).label
    monkeypatch.setattr(vllm, "__version__", "0.99")
    assert "of vLLM 0.99" in part_of(config, caches).label
    with pytest.raises(UncacheableError, match="the page layout of a is not known"):
        part_of(config, caches, device="cpu")


@pytest.mark.parametrize(
    ("cache_dtype", "element", "quantizer", "stored", "wire"),
    [
        ("fp8_e4m3", "uint8", "lossless", "passthrough", "uint8"),
        ("fp8_e4m3", "uint8", "binned", "binned", "float8_e4m3"),
        ("fp8", "uint8", "binned", "binned", "float8_e4m3"),
        ("fp8_inc", "float8_e4m3fn", "binned", "binned", "float8_e4m3"),
        ("fp8_inc", "float8_e4m3fn", "lossless", "passthrough", "uint8"),
        ("fp8_e5m2", "uint8", "binned", "passthrough", "uint8"),
        ("fp8_ds_mla", "uint8", "binned", "passthrough", "uint8"),
    ],
)
def test_fp8_caches_are_stored_as_they_are_but_for_e4m3_in_bins(
    cache_dtype: str, element: str, quantizer: Any, stored: str, wire: str
) -> None:

    config, host = engine_config(ASSET), HostConfig(quantizer=quantizer, scale_tokens=4)
    object.__setattr__(config.cache_config, "cache_dtype", cache_dtype)
    caches = kv_cache_config(full(dtype=getattr(torch, element)))
    assert cache_dtype in model_of(config, caches, host).dtype
    shape = layout_of(config, caches, host)
    assert (shape.dtype.label, shape.quantizer.label, shape.raw_bytes) == (wire, stored, 3 * 2 * 128 * 256)
    treatment = (shape.bins, shape.value_bins, shape.scale_tokens)
    assert treatment == ((64, 16, 4) if stored == "binned" else (0, 0, 1))


def test_amd_has_another_e4m3_that_is_not_binned(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "fp8_dtype", classmethod(lambda cls: torch.float8_e4m3fnuz))
    config = engine_config(ASSET)
    object.__setattr__(config.cache_config, "cache_dtype", "fp8")
    caches = kv_cache_config(full(dtype=torch.uint8))
    layout = layout_of(config, caches, HostConfig(quantizer="binned"))
    assert layout.quantizer is Quantizer.PASSTHROUGH


def test_chunks_that_records_cannot_hold_have_a_reason() -> None:
    with pytest.raises(UncacheableError, match="cannot hold its chunks: .*2 MiB"):
        layout_of(engine_config(ASSET), kv_cache_config(full(head_size=1 << 20)))


def test_values_with_the_bins_of_keys_are_named_as_if_there_were_no_choice() -> None:
    layout = layout_of(engine_config(ASSET), None, HostConfig(quantizer="binned", bins=32, value_bins=32))
    assert (layout.bins, layout.value_bins) == (32, 0)
