"""Real configurations of vLLM for folders of tiny models, and their identities."""

import copy
import json
import logging
import os
import shutil
import struct
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from host_control.config import HostConfig
from host_control.vllm import shards
from host_control.vllm.groups import Groups
from host_control.vllm.identity.content import ContentHashes
from host_control.vllm.identity.namespace import model_identity

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

BLOCKS = 3
ASSET = Path(__file__).parents[1] / "assets" / "model"
LOGGER = logging.getLogger("identity")
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "dynamic": {"factor": 2.0},
    "longrope": {
        "short_factor": [1.0] * 32, "long_factor": [4.0] * 32, "original_max_position_embeddings": 1024, "factor": 4.0,
    },
}  # fmt: skip


def tensors(data: bytes = bytes(range(256)) * 64, name: str = "model.layers.0.self_attn.k_proj.weight") -> bytes:
    """Return a safetensors file with one tensor of the given bytes."""
    header = json.dumps({name: {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(header)) + header + data


def tick() -> None:
    """Wait until file times differ from those of earlier changes."""
    coarse = 5  # CLOCK_REALTIME_COARSE, which Python does not name
    now = time.time_ns()
    while time.clock_gettime_ns(coarse) <= now:  # it can be several ticks behind
        pass


def model_folder(folder: Path, *, weights: bytes | None = tensors(), **changes: Any) -> Path:
    """Create a model's folder from the project's own, with another configuration and synthetic weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(ASSET / name, folder / name)
    described = json.loads((ASSET / "config.json").read_text())
    described.pop("rope_theta")
    (folder / "config.json").write_text(json.dumps({**described, **changes}))
    if weights is not None:
        (folder / "model.safetensors").write_bytes(weights)
    return folder


def rope(kind: str, **more: Any) -> dict[str, Any]:
    """Return rotary parameters in the format of Transformers 5."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind], **more}}


def engine_config(model: Path | str, **arguments: Any) -> Any:
    """Return vLLM's configuration. The model's class is inspected in this process, which saves 9 s."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    settings: dict[str, Any] = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 1024}
    tick()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        config = EngineArgs(**{"model": str(model), **settings, **arguments}).create_engine_config()
    tick()
    return config


def spec(**options: Any) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(
        **{"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16, **options}
    )


def kv_cache_config(*specs: Any) -> Any:
    groups = [SimpleNamespace(layer_names=["a", "b", "c"], kv_cache_spec=one) for one in specs or (spec(),)]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=BLOCKS)


def hashes(path: Path | None = None, **options: Any) -> Any:
    return ContentHashes(path, LOGGER, **options)


def model_of(config: Any, caches: Any = None, host: HostConfig | None = None) -> Any:
    """Return the identity of the model of an engine with this configuration."""
    return model_identity(config, caches or kv_cache_config(), (host or HostConfig()).chunk_tokens, hashes())


def part_of(
    config: Any, caches: Any = None, host: HostConfig | None = None, rank: int = 0, device: str = "meta"
) -> Any:
    """Return the shards of a rank with the page layout of CUDA backends."""
    caches, host = caches or kv_cache_config(), host or HostConfig()
    (group,) = caches.kv_cache_groups
    cell = group.kv_cache_spec
    latent = type(cell).__name__ == "MLAAttentionSpec"
    shape = (BLOCKS, cell.num_heads, cell.block_size, cell.state_content_size_bytes // cell.dtype.itemsize)
    memory = {name: torch.empty(shape, dtype=cell.dtype, device=device) for name in group.layer_names}
    place = shards.Rank(rank, config.parallel_config.tensor_parallel_size)
    plain = copy.copy(config)
    plain.speculative_config = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "find_layout", lambda *_: "latent" if latent else "kv_cells")
        patch.setattr(shards.Rank, "layers", lambda *_: (0, len(group.layer_names)))
        own, *_ = shards.find_shards(config, caches, Groups(plain, caches, host), memory, host, place)
    return own


def layout_of(config: Any, caches: Any = None, host: HostConfig | None = None, rank: int = 0) -> Any:
    """Return the chunk layout with its namespace."""
    return part_of(config, caches, host, rank).described(model_of(config, caches, host), host or HostConfig())


def digest(config: Any, *arguments: Any, **options: Any) -> bytes:
    value: bytes = layout_of(config, *arguments, **options).namespace
    return value
