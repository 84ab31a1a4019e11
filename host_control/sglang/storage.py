"""ShadowServe's storage backend of HiCache: SGLang's host pool to and from the data plane.

SGLang calls from three threads: one asks what is stored, one fetches, one stores. Each call blocks until its deadline
at most. A failure is a miss: SGLang computes the tokens.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import prometheus_client

from host_control.config import HostConfig
from host_control.sglang.blocks import Pages
from host_control.sglang.engine import Engine, running_engine
from host_control.sglang.identity import refuse_ranks
from host_control.sglang.plane import Moved, PageMover
from host_control.transfer import Reason
from host_control.vllm.support import UncacheableError
from shadowserve.errors import ConfigurationError, DataPlaneError

try:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult
except ImportError:  # tests without SGLang, which call what SGLang would call
    HiCacheStorage, PoolTransferResult = object, SimpleNamespace

_logger = logging.getLogger(__name__)

_moved_pages = prometheus_client.Counter(
    "sglang_pages", "Pages by operation (exists, get, set) and reason.", ["operation", "reason"], "shadowserve"
)
_SGLANGS: Final = ("backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size")
"""Keys of the backend's configuration that SGLang reads."""
_FIXED: Final = {"pages": False, "pd_role": "none", "fetch_or_recompute": False, "quantizer": "lossless"}
"""Keys of section ``host`` that have no other value here."""
_WARNED_S: Final = 30.0
"""Between two warnings about failures."""


class ShadowServeStorage(HiCacheStorage):  # type: ignore[misc]
    """A HiCache storage backend over a data plane (interface v1, and v2 of the KV pool alone).

    Args:
        storage_config: SGLang's HiCacheStorageConfig; its ``extra_config`` has keys of section ``host``.
        kwargs: Nothing, in SGLang 0.5.23.
        engine: Description of the engine; by default of the one that runs here.

    Attributes:
        counts: Pages by operation and reason: ``get complete``, ``set deadline``...

    Raises:
        ConfigurationError: The engine or the configuration is not supported; the message says why.
    """

    def __init__(
        self, storage_config: Any, kwargs: Mapping[str, Any] | None = None, *, engine: Engine | None = None
    ) -> None:
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise ConfigurationError('ShadowServe: set "interface_v1": 1 in --hicache-storage-backend-extra-config')
        for name in _SGLANGS:
            extra.pop(name, None)
        self._config = HostConfig.from_engine(extra, "--hicache-storage-backend-extra-config")
        for name, only in _FIXED.items():
            if getattr(self._config, name) != only:
                raise ConfigurationError(f"ShadowServe: with SGLang, {name} can only be {only!r}")
        self._ranks = storage_config
        self._engine = engine
        self._mover: PageMover | None = None
        self._pool: Any = None
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._warned = float("-inf")

    # ------------------------------------------------------------------ SGLang's pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool of the KV cache."""
        self._pool = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuse pools of other caches."""
        if str(host_pool_name) != "kv":
            self.close()
            raise ConfigurationError(
                f"ShadowServe: a model with the host pool '{host_pool_name}' is not supported; start SGLang without "
                "--hicache-storage-backend"
            )
        self._pool = host_pool

    def on_host_pools_registered(self) -> None:
        """Identify the engine and open the connection: all pools are known."""
        try:
            refuse_ranks(self._ranks)
            self._engine = self._engine or running_engine(self._config, self._pool)
            self._mover = PageMover(self._config, self._engine, self._pool, self._ranks)
        except UncacheableError as error:
            raise ConfigurationError(f"ShadowServe: {error}; start SGLang without --hicache-storage-backend") from error
        except ConfigurationError:
            raise
        except Exception as error:  # of another SGLang, or of files that are not as expected
            line = " ".join(repr(error).split())
            raise ConfigurationError(f"ShadowServe: this engine cannot be identified: {line}") from error

    def close(self) -> None:
        """End all calls and release the memory."""
        mover, self._mover = self._mover, None
        if mover is not None:
            mover.close()

    # ------------------------------------------------------------------ interface v1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return the number of leading pages that are stored."""
        mover = self._usable("exists", len(keys), self._config.fetch)
        if mover is None:
            return 0
        try:
            pages = _pages(keys, extra_info)
            found = mover.find(pages) - pages.first
        except DataPlaneError as error:
            self._failed("exists", len(keys), error.outcome, str(error))
            return 0
        except Exception as error:  # one that ends SGLang's thread ends the engine
            _logger.exception("ShadowServe: exists failed")
            self._failed("exists", len(keys), Reason.INTERNAL, type(error).__name__)
            return 0
        self._count("exists", Reason.COMPLETE, found)
        self._count("exists", Reason.ABSENT, len(keys) - found)
        return found

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Fetch pages into the host pool; return which are in place."""
        mover = self._usable("get", len(keys), self._config.fetch)
        moved = self._moved("get", keys, mover.fetch if mover is not None else None, host_indices, extra_info)
        # A fetch may have begun before an update of the weights.
        return moved if self._usable("get", len(keys), self._config.fetch) else [False] * len(keys)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the host pool; return which are stored."""
        mover = self._usable("set", len(keys), self._config.store)
        return self._moved("set", keys, mover.store if mover is not None else None, host_indices, extra_info)

    def _moved(
        self, operation: str, keys: list[str], move: Callable[[Pages, Any], Moved] | None, indices: Any, extra: Any
    ) -> list[bool]:
        moved = Moved([False] * len(keys))
        if move is None:
            return moved.pages
        try:
            moved = move(_pages(keys, extra), indices)
        except DataPlaneError as error:
            moved = moved._replace(reason=error.outcome, detail=str(error))
        except Exception as error:  # SGLang computes the tokens
            _logger.exception("ShadowServe: %s failed", operation)
            moved = moved._replace(reason=Reason.INTERNAL, detail=type(error).__name__)
        count = sum(moved.pages)
        self._count(operation, Reason.COMPLETE, count)
        if count < len(keys):
            self._failed(operation, len(keys) - count, moved.reason, moved.detail)
        return moved.pages

    # ------------------------------------------------------------------ interface v2: no pools beside the KV pool

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Return the lengths that can be restored: any of the KV pool's, none of another pool's."""
        others = any(str(each.name) != "kv" for each in pool_transfers or ())
        count = 0 if others else self.batch_exists(keys, extra_info)
        return PoolTransferResult(
            kv_hit_pages=count,
            extra_pool_hit_pages={"kv": count} if count else {},
            restorable_prefix_pages=list(range(1, count + 1)),
        )

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Fetch pages of the KV pool, and none of other pools."""
        return self._each(transfers, extra_info, self.batch_get_v1)

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Store pages of the KV pool, and none of other pools."""
        return self._each(transfers, extra_info, self.batch_set_v1)

    def _each(self, transfers: Iterable[Any], extra_info: Any, move: Any) -> dict[Any, list[bool]]:
        results = {}
        for each in transfers:
            keys = each.keys or []
            there = str(each.name) == "kv" and each.host_indices is not None
            results[each.name] = move(keys, each.host_indices, extra_info) if there else [False] * len(keys)
        return results

    # ------------------------------------------------------------------ what interface_v1 replaces

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Return None: pages move through interface v1."""

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        """Return None for each page: they move through interface v1."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Return False: pages move through interface v1."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Return False: pages move through interface v1."""
        return False

    def exists(self, key: str) -> bool:
        """Return True if a prompt's first page is stored."""
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """Keep what is stored: other engines share it. Expiry, quotas and the storage server's commands remove it."""
        _logger.warning("ShadowServe: SGLang asks to clear its storage; other engines share it, so it is kept")

    # ------------------------------------------------------------------ outcomes

    def _usable(self, operation: str, pages: int, wanted: bool) -> PageMover | None:
        """Return the mover if it can be used now."""
        if self._mover is None or self._engine is None or not wanted or not pages:
            return None
        if self._engine.weights_changed():
            self._failed(operation, pages, "weights_changed", "restart SGLang to use the cache with its new weights")
            return None
        return self._mover

    def _count(self, operation: str, reason: str, pages: int) -> None:
        with self._lock:
            self.counts[f"{operation} {reason}"] += pages
        _moved_pages.labels(operation, reason).inc(pages)

    def _failed(self, operation: str, pages: int, reason: str, detail: str) -> None:
        self._count(operation, reason, pages)
        if (now := time.monotonic()) - self._warned >= _WARNED_S:
            self._warned = now
            _logger.warning("ShadowServe: %s: %d pages: %s (%s)", operation, pages, reason, detail or "no detail")


def _pages(keys: Sequence[str], extra_info: Any) -> Pages:
    return Pages.of(keys, getattr(extra_info, "prefix_keys", None))
