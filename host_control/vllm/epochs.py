"""Epochs: periods between two changes of an engine's weights. KV of one epoch is invalid in another.

vLLM does not notify connectors of ``collective_rpc`` (used by ``apply_model``, ``reload_weights``, ``update_config``
and weight transfer from a trainer), of ``reset_prefix_cache`` without ``reset_connector``, or of ``wake_up``. They are
methods of the engine core, which runs in the scheduler's process. So this module wraps them there and counts the calls.
"""

import collections
import functools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

WEIGHTS_CHANGED: Final = (
    "ShadowServe: the weights of this engine have changed, and the connector was not reset. From now on this engine "
    "does not load KV that was stored before, and does not store KV of running requests. vLLM's own prefix cache may "
    "still serve KV of the old weights; behind such a prefix nothing is loaded or stored until that cache is emptied. "
    "After a change of weights call reset_prefix_cache(reset_connector=True), or POST "
    "/reset_prefix_cache?reset_external=true"
)

WORKER_CALLS: Final = ("collective_rpc", "wake_up")
_METHODS: Final = (*WORKER_CALLS, "reset_prefix_cache")
_counts: collections.Counter[str] = collections.Counter()
_UNKNOWN: Final = object()
_PAUSE_S: Final = 5.0
"""Time without a step after which the weights may have changed: loading other weights takes longer."""


class Epochs:
    """Tracks the epoch of an engine, and if its own prefix cache may have KV of an earlier one.

    The first epoch is the empty text: engines that never change their weights share their chunks. Each later epoch has
    a unique name. Chunks that are stored already keep their epoch.

    Attributes:
        doubts: How often the weights may have changed so far, as far as the scheduler can see: calls to the engine, an
            emptied prefix cache, pauses.
        agreed: The last doubt after which all ranks have found the epoch's weights.
    """

    def __init__(self) -> None:
        self.current = ""
        self.ranks = 1
        self.doubts = self.agreed = 0
        self._pool: Any = None
        self._old_blocks: Any = None
        self._calls: Callable[[], int] = lambda: 0
        self._blind = False
        self._seen: tuple[int, Any] = (0, _UNKNOWN)
        self._stepped_s = time.monotonic()
        self._settled: dict[int, int] = {}

    def bind(self, block_pool: Any) -> None:
        self._pool = block_pool
        self._seen = (self._seen[0], self._blocks())

    def watch(self, calls: Callable[[], int], *, blind: bool) -> None:
        """Watch calls to the engine.

        Args:
            blind: Workers cannot read all of their weights.
        """
        self._calls, self._blind = calls, blind
        self._seen = (calls(), self._seen[1])

    def look(self, logger: logging.Logger) -> bool:
        """Look, in each step, for signs that the weights may have changed.

        Returns:
            True if they count as changed, because no worker can read all of them.
        """
        now_s, seen = time.monotonic(), (self._calls(), self._blocks())
        called = seen[0] != self._seen[0] or seen[1] is not self._seen[1]
        if called or now_s - self._stepped_s > _PAUSE_S:
            self._seen = seen
            self.doubts += 1
            if not called and self.agreed == self.doubts - 1:
                self.agreed = self.doubts  # a pause alone: each rank checks its own weights
        self._stepped_s = now_s
        if called and self._blind:
            logger.warning(
                "ShadowServe: this engine was called, or its prefix cache emptied, and not all of its weights can be "
                "read (enable_eplb): they count as changed, and KV that was stored before is not loaded any more"
            )
        return called and self._blind

    def settled(self, doubts: Mapping[int, int]) -> None:
        """Count the ranks that have found the epoch's weights after each doubt."""
        for doubt, ranks in doubts.items():
            self._settled[doubt] = self._settled.get(doubt, 0) + ranks
            if self._settled[doubt] >= self.ranks:
                self.agreed = max(self.agreed, doubt)
        if doubts:
            self._settled = {doubt: ranks for doubt, ranks in self._settled.items() if doubt > self.agreed}

    def begin(self) -> None:
        """Start another epoch: all KV that the engine holds is of an earlier one."""
        self.current = secrets.token_hex(16)
        blocks, pool = self._blocks(), self._pool
        # One block is always in use: vLLM's null block.
        empty = blocks is not _UNKNOWN and not blocks and pool.get_num_free_blocks() >= pool.num_gpu_blocks - 1
        self._old_blocks = None if empty else blocks

    def evict(self, blocks: Iterable[int]) -> None:
        """Evict blocks from the engine's own prefix cache, because their KV is invalid."""
        if self._pool is not None:
            self._pool.evict_blocks(set(blocks))

    @property
    def own_cache_is_old(self) -> bool:
        """The engine's own prefix cache may have KV of an earlier epoch: it was not emptied since."""
        return self._old_blocks is not None and self._blocks() is self._old_blocks

    def _blocks(self) -> Any:
        """Return the table of blocks in the engine's prefix cache; vLLM empties the cache by making a new one."""
        return getattr(self._pool, "cached_block_hash_to_block", _UNKNOWN)


def counted_calls(names: Sequence[str] = _METHODS, core: Any = None) -> Callable[[], int] | None:
    """Return a function that returns the number of calls so far in this process.

    Returns:
        ``None`` if this release of vLLM lacks one of the methods, so that calls cannot be counted.
    """
    if core is None:
        try:
            from vllm.v1.engine.core import EngineCore
        except ImportError:
            return None
        core = EngineCore
    if not all(callable(getattr(core, name, None)) for name in _METHODS):
        return None
    for name in _METHODS:
        method = getattr(core, name)
        if not hasattr(method, "counted_by_shadowserve"):
            setattr(core, name, _counted(method))
    return lambda: sum(_counts[name] for name in names)


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:
            _counts[method.__name__] += 1

    call.counted_by_shadowserve = True  # type: ignore[attr-defined]
    return call
