"""Adapters by content: what an engine has loaded under a number, as far as that can be known.

vLLM loads an adapter when it is first asked for, drops it when others need its place, loads it again, and keeps what
it has under a number, whatever becomes of the files. Which content it holds can be known only of files that have not
changed since the engine started; requests with others are served without the cache.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any, Final

from host_control.vllm.identity.content import ContentHashes, changed_since, in_hub_cache
from host_control.vllm.support import UncacheableError

_FILES: Final = ("adapter_config.json", "*.safetensors", "*.bin", "*.pt")
_NUMBERS_MAX: Final = 65_536


class Adapters:
    """The adapters of one engine, made when it starts: before it can have loaded any.

    Args:
        lora_config: of vLLM.
        hashes: of files.
    """

    def __init__(self, lora_config: Any, hashes: ContentHashes) -> None:
        self._config = lora_config
        self._hashes = hashes
        self._started_ns = time.time_ns()
        self._lock = threading.Lock()
        self._paths: dict[int, str] = {}

    def arrived(self, lora: Any) -> None:
        """Note which adapter a request means by a number, in the order in which requests arrive.

        Raises:
            UncacheableError: the number has meant another adapter, or is loaded anew: the engine may hold either.
        """
        path = str(lora.lora_path)
        with self._lock:
            known = self._paths.get(lora.lora_int_id)
            if known is None and len(self._paths) < _NUMBERS_MAX and not lora.load_inplace:
                self._paths[lora.lora_int_id] = known = path
            if known != path or lora.load_inplace:
                if lora.lora_int_id in self._paths or len(self._paths) < _NUMBERS_MAX:
                    self._paths[lora.lora_int_id] = ""
                raise UncacheableError(f"adapter number {lora.lora_int_id} has stood for more than one adapter")

    def described(self, lora: Any) -> dict[str, Any]:
        """Return what names an adapter's part in KV: its files' content, and what the engine applies of it.

        Raises:
            UncacheableError: its files cannot be read, or have changed since the engine started.
        """
        folder = _folder(str(lora.lora_path), self._started_ns)
        files = sorted({path for pattern in _FILES for path in folder.glob(pattern)})
        if not files:
            raise UncacheableError(f"{folder} holds no adapter")
        if changed := [path for path in files if changed_since(path, self._started_ns)]:
            raise UncacheableError(
                f"adapter file {changed[0]} has changed since the engine started: which of its contents is loaded "
                "cannot be known; start the engine again"
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
    from huggingface_hub import snapshot_download

    if (path := Path(os.path.expanduser(name))).exists():
        if not in_hub_cache(path) and path.stat().st_ctime_ns > moment_ns:
            raise UncacheableError(f"{path} has changed since the engine started; start it again")
        return path
    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except Exception as error:  # of many kinds, by what the name looks like
        raise UncacheableError(f"adapter {name} is neither a folder nor in the hub's cache: {error}") from error
    # The branch may have moved on since the engine looked.
    if any(changed_since(branch, moment_ns) for branch in (folder.parents[1] / "refs").glob("*")):
        raise UncacheableError(f"the hub's cache of adapter {name} has changed since the engine started")
    return folder
