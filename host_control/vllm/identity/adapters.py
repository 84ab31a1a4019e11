"""LoRA adapters by content.

vLLM loads an adapter when a request first uses it, evicts it for others and loads it again. The loaded content is only
known if the files have not changed since the engine started. Requests with other adapters run without the cache.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any, Final

from host_control.vllm.identity.content import ContentHashes, changed_since, hub_folder, in_hub_cache
from host_control.vllm.support import UncacheableError

_FILES: Final = ("adapter_config.json", "*.safetensors", "*.bin", "*.pt")
_NUMBERS_MAX: Final = 65_536


class Adapters:
    """The adapters of one engine. To be created before the engine loads any."""

    def __init__(self, lora_config: Any, hashes: ContentHashes) -> None:
        self._config = lora_config
        self._hashes = hashes
        self._started_ns = time.time_ns()
        self._lock = threading.Lock()
        self._paths: dict[int, str] = {}

    def register(self, lora: Any) -> None:
        """Record the adapter of a request. Called in the order in which requests arrive.

        Raises:
            UncacheableError: Another adapter had the same number, or it is reloaded. The engine may use either.
        """
        path = str(lora.lora_path)
        with self._lock:
            known = self._paths.get(lora.lora_int_id)
            if known is None and len(self._paths) < _NUMBERS_MAX and not lora.load_inplace:
                self._paths[lora.lora_int_id] = known = path
            if known != path or lora.load_inplace:
                if lora.lora_int_id in self._paths or len(self._paths) < _NUMBERS_MAX:
                    self._paths[lora.lora_int_id] = ""
                raise UncacheableError(f"adapter number {lora.lora_int_id} was used for more than one adapter")

    def described(self, lora: Any) -> dict[str, Any]:
        """Return the inputs of an adapter to the key: its files' content, and how the engine applies it."""
        folder = _folder(str(lora.lora_path), self._started_ns)
        files = sorted({path for pattern in _FILES for path in folder.glob(pattern)})
        if not files:
            raise UncacheableError(f"{folder} contains no adapter")
        if changed := [path for path in files if changed_since(path, self._started_ns)]:
            raise UncacheableError(
                f"adapter file {changed[0]} has changed since the engine started, so the loaded content is unknown; "
                "restart the engine"
            )
        config = self._config
        mixed = bool(getattr(config, "enable_mixed_moe_lora_format", False))
        return {
            "files": sorted(self._hashes.digests(files)),
            "dtype": str(config.lora_dtype).removeprefix("torch."),
            "modules": sorted(config.target_modules) if config.target_modules else None,
            "tower": bool(config.enable_tower_connector_lora),
            "experts": [
                mixed,
                mixed and lora.is_3d_lora_weight,
                bool(getattr(config, "enable_moe_shared_loras", False)),
            ],
        }


def _folder(name: str, moment_ns: int) -> Path:
    """Return the folder that vLLM loads an adapter from."""
    if (path := Path(os.path.expanduser(name))).exists():
        if not in_hub_cache(path) and path.stat().st_ctime_ns > moment_ns:
            raise UncacheableError(f"{path} has changed since the engine started; restart the engine")
        return path
    folder = hub_folder(name, kind="adapter ")
    # The branch may point to another commit than when the engine resolved it.
    if any(changed_since(branch, moment_ns) for branch in (folder.parents[1] / "refs").glob("*")):
        raise UncacheableError(f"the hub's cache of adapter {name} has changed since the engine started")
    return folder
