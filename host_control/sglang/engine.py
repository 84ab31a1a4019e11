"""Description of a running SGLang engine. The only module that reads SGLang's objects beside the host pool."""

import functools
import inspect
import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from host_control.config import HostConfig
from host_control.sglang.identity import engine_identity, shard_layout
from host_control.vllm.identity.content import content_hashes
from host_control.vllm.support import UncacheableError
from shadowserve.chunk import ChunkLayout
from shadowserve.keys import ModelIdentity

_logger = logging.getLogger(__name__)
_UPDATES: Final = re.compile(r"(update|load|receive)_weights.*|begin_weight_update")
_changed = threading.Event()


@dataclass(frozen=True)
class Engine:
    """An engine as the backend needs it.

    Attributes:
        heads: KV heads of the model.
        timeout_base_s, timeout_per_ki_s: SGLang's time limit of a prefetch: seconds, and seconds per 1,024 tokens.
        weights_changed: Tells if the weights are not those of the identity any more.
    """

    identity: ModelIdentity
    heads: int
    timeout_base_s: float = 1.0
    timeout_per_ki_s: float = 0.25
    weights_changed: Callable[[], bool] = _changed.is_set

    def fetch_timeout_s(self, tokens: int) -> float:
        """Return SGLang's time limit for prefetching some tokens."""
        return max(self.timeout_base_s + self.timeout_per_ki_s * tokens / 1024, 0.1)

    def layout(self, layout: ChunkLayout, pool: Any, ranks: Any) -> ChunkLayout:
        """Return a layout with the namespace of a rank's layers and heads."""
        return shard_layout(self.identity, layout, pool, ranks, self.heads)


def running_engine(config: HostConfig, pool: Any) -> Engine:
    """Return the engine that runs in this process.

    Raises:
        UncacheableError: Its KV cannot be identified; the message says why.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    model = ModelConfig.from_server_args(arguments)
    timeouts = _prefetch_settings(arguments)
    identity = engine_identity(arguments, model, pool.dtype, int(pool.page_size), content_hashes(config, _logger))
    _watch_weights()
    _complete_prefixes()
    _logger.info("ShadowServe: identity %s of %s", identity.digest().hex()[:16], arguments.model_path)
    return Engine(identity, int(model.get_total_num_kv_heads()), *timeouts)


def _prefetch_settings(arguments: Any) -> tuple[float, float]:
    """Return SGLang's time limits of a prefetch; refuse an engine that does not tell where in a prompt pages are."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.runtime_context import get_memory

    given = getattr(arguments, "hicache_storage_backend_extra_config", None)
    if get_memory().hicache_storage_backend != "dynamic" or not given:  # None after a detach
        # Earlier updates of the weights are not known, nor is the configuration.
        raise UncacheableError("attaching at run time is not supported: start SGLang with --hicache-storage-backend")
    _, _, base, per_ki, prefix_keys = HybridCacheController.parse_storage_backend_extra_config(given)
    if not prefix_keys:
        raise UncacheableError('set "hicache_storage_pass_prefix_keys": true in --hicache-storage-backend-extra-config')
    return base, per_ki


def _watch_weights() -> None:
    """Notice updates of weights: from then on, the identity is not the engine's."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.utils.weight_checker import WeightChecker

    methods = [(WeightUpdater, name) for name in vars(WeightUpdater) if _UPDATES.fullmatch(name)]
    methods.append((WeightChecker, "_reset_tensors"))
    if not hasattr(WeightUpdater, "update_weights_from_disk") or not hasattr(*methods[-1]):
        raise UncacheableError("this SGLang updates weights in a way that is not known; 0.5.23 is supported")
    for owner, name in methods:
        method = getattr(owner, name)
        if not hasattr(method, "__wrapped__"):
            setattr(owner, name, _noticed(method))


def _complete_prefixes() -> None:
    """Tell lookups of all pages before theirs: SGLang 0.5.23 leaves out those of the last node that matches."""
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import UnifiedTreeCoreInterface
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    method: Any = getattr(UnifiedRadixCache, "get_prefix_hash_values", None)
    last_hash = getattr(UnifiedRadixCache, "get_last_hash_value", None)
    own = getattr(UnifiedTreeCoreInterface, "get_hash_values", None)
    used = (method, last_hash, own)
    if not all(each and [*inspect.signature(each).parameters] == ["self", "node_id"] for each in used):
        raise UncacheableError("this SGLang describes a prefix in a way that is not known; 0.5.23 is supported")
    if hasattr(method, "__wrapped__"):
        return

    @functools.wraps(method)
    def complete(self: Any, node_id: Any) -> list[str]:
        found, last = list(method(self, node_id)), self.get_last_hash_value(node_id)
        known = last is None or found[-1:] == [last]  # a page's hash contains its prefix: no other page has it
        return found if known else [*found, *self.tree_core.get_hash_values(node_id)]

    UnifiedRadixCache.get_prefix_hash_values = complete


def _noticed(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noticed(*arguments: Any, **named: Any) -> Any:
        _changed.set()  # first: what is computed from now on is not stored
        return method(*arguments, **named)

    return noticed
