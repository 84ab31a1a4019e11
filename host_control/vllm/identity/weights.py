"""Finds the files of an engine's weights and code, and returns their digests.

vLLM's own loader selects the files, so that formats, indexes and duplicates are handled as when the engine loaded them.
Models in a Hugging Face hub cache are found without network access.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from host_control.vllm.identity.content import ContentHashes, changed_since, hub_folder
from host_control.vllm.support import UncacheableError

# Formats of vLLM's default loader; they only select files of a folder.
_DEFAULT: Final = {
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt", "npcache",
}  # fmt: skip
_ELSEWHERE: Final = {
    "ipc_cache": "another process's memory",
    "modelexpress": "a ModelExpress server",
}
_CANDIDATES: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors")


@dataclass
class _Source:
    """The files of the weights, and other inputs to their identity."""

    files: list[Path] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


def weight_digests(vllm_config: Any, hashes: ContentHashes) -> dict[str, Any]:
    """Return the identity of an engine's weights: the sorted digests of their files, and other inputs."""
    source = _source(vllm_config)
    _unchanged(source.files, vllm_config)
    return {"files": sorted(hashes.digests(source.files)), **source.more}


def code_digests(vllm_config: Any, hashes: ContentHashes) -> list[str]:
    """Return the digests of a model's own Python files, if ``trust_remote_code`` allows any."""
    model = vllm_config.model_config
    automatic = getattr(model.hf_config, "auto_map", None)
    if not model.trust_remote_code or not automatic:
        return []
    repositories = {str(name).partition("--")[0] for name in _leaves(automatic) if "--" in str(name)}
    folders = [_folder(model.model, model.code_revision or model.revision, None)]
    folders += [_folder(repository, model.code_revision, None) for repository in sorted(repositories)]
    return sorted(hashes.digests([path for folder in folders for path in sorted(folder.glob("*.py"))]))


def model_class(model_config: Any, hashes: ContentHashes) -> dict[str, Any]:
    """Return the name of the model's class, and the module and source of a class that is not vLLM's."""
    from vllm.model_executor.model_loader.utils import get_model_architecture

    chosen, architecture = get_model_architecture(model_config)
    if any("secondary_weights" in _stored_names(base) for base in chosen.__mro__):
        raise UncacheableError(f"{architecture} loads weights of other models, which is not supported")
    named = {"architecture": architecture, "class": chosen.__qualname__}
    if chosen.__module__.startswith("vllm."):
        return named
    file = getattr(sys.modules.get(chosen.__module__), "__file__", None)
    if file is None:
        raise UncacheableError(f"the code of {chosen.__module__}.{chosen.__qualname__} cannot be read")
    return {**named, "module": chosen.__module__, "source": hashes.digests([Path(file)])}


def model_folder(vllm_config: Any) -> Path:
    """Return the folder that an engine's model was loaded from."""
    model = vllm_config.model_config
    folder = _folder(model.model, model.revision, vllm_config.load_config.download_dir)
    commit = getattr(model.hf_config, "_commit_hash", None)
    if folder.parent.name == "snapshots" and commit and commit != folder.name:
        raise UncacheableError(
            f"the hub's cache has {model.model} at commit {folder.name}, but the engine read its configuration at "
            f"{commit}; restart the engine, or set --revision"
        )
    return folder


def _source(vllm_config: Any) -> _Source:
    model, load = vllm_config.model_config, vllm_config.load_config
    load_format, path = str(load.load_format), Path(str(model.model))
    if load_format == "dummy":
        return _Source(more={"dummy": model.seed})
    if where := _ELSEWHERE.get(load_format) or getattr(model, "model_weights", ""):
        raise UncacheableError(f"weights are loaded from {where}, so their content is not known")
    if path.is_file():
        return _Source([path], {"format": load_format})
    folder = model_folder(vllm_config)
    if load_format in _DEFAULT:
        return _Source(_chosen(vllm_config, folder))
    if load_format == "tensorizer":
        return _Source([_tensorized(load.model_loader_extra_config)], {"format": load_format})
    return _Source(_all(folder), {"format": load_format})


def _chosen(vllm_config: Any, folder: Path) -> list[Path]:
    """Return the files of a folder that vLLM's loader selects."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import get_model_cls

    chosen = get_model_cls(vllm_config.model_config)
    fall_back = getattr(chosen, "fall_back_to_pt_during_load", True)
    patterns = getattr(chosen, "allow_patterns_overrides", None)
    loader = DefaultModelLoader(vllm_config.load_config)
    _, files, _, _ = loader._prepare_weights(
        str(folder),
        None,
        vllm_config.model_config.revision,
        fall_back,
        patterns if isinstance(patterns, list) else None,
    )
    return [Path(file) for file in files]


def _all(folder: Path) -> list[Path]:
    files = sorted({path for pattern in _CANDIDATES for path in folder.glob(pattern)})
    if not files:
        raise UncacheableError(f"{folder} contains no weights of a known type ({', '.join(_CANDIDATES)})")
    return files


def _tensorized(extra: Any) -> Path:
    uri = extra.get("tensorizer_uri") if isinstance(extra, dict) else getattr(extra, "tensorizer_uri", None)
    if not uri or not Path(str(uri)).is_file():
        raise UncacheableError(
            f"weights are loaded from {uri or 'a source that only tensorizer knows'}, which is not a local file"
        )
    return Path(str(uri))


def _folder(model: str, revision: str | None, cache: str | None) -> Path:
    import vllm.envs as envs

    if (path := Path(str(model))).exists():
        return path if path.is_dir() else path.parent
    if envs.VLLM_USE_MODELSCOPE:
        raise UncacheableError(f"{model} is loaded from ModelScope; set --model to its folder")
    return hub_folder(str(model), revision=revision, cache_dir=cache)


def _unchanged(files: Sequence[Path], vllm_config: Any) -> None:
    """Raise UncacheableError if a file may have changed after the engine read it.

    vLLM's instance ID is the time at which the engine was configured, before it loaded the weights.
    """
    configured = str(getattr(vllm_config, "instance_id", ""))
    if not configured.isdecimal() or int(configured) > time.time_ns():
        return
    for path in files:
        if changed_since(path, int(configured)):
            raise UncacheableError(
                f"{path} has changed since this engine was configured, so the loaded content is unknown; restart the "
                "engine"
            )


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _stored_names(base: type) -> tuple[str, ...]:
    code = getattr(base.__dict__.get("__init__"), "__code__", None)
    return (*base.__dict__, *(code.co_names if code is not None else ()))
