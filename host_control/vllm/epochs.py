"""Epochs: the times between two changes of an engine's weights. KV of one is of no use in another."""

import secrets
from collections.abc import Iterable
from typing import Any, Final

__all__ = ["Epochs"]

_UNKNOWN: Final = object()


class Epochs:
    """The epoch that an engine is in, and whether its own prefix cache has KV of an earlier one.

    The first epoch is the empty text: engines that never change their weights share what they store. Each later one has
    a name that nobody else has. Stored chunks cannot be taken back from others, so they keep theirs.

    Attributes:
        current: name of the epoch.
    """

    def __init__(self) -> None:
        self.current = ""
        self._pool: Any = None
        self._old_blocks: Any = None

    def bind(self, block_pool: Any) -> None:
        """Take the engine's blocks."""
        self._pool = block_pool

    def begin(self) -> None:
        """Begin another epoch; all that the engine holds is of an earlier one."""
        self.current = secrets.token_hex(16)
        blocks, pool = self._blocks(), self._pool
        # One block is always in use, and stands for none.
        empty = blocks is not _UNKNOWN and not blocks and pool.get_num_free_blocks() >= pool.num_gpu_blocks - 1
        self._old_blocks = None if empty else blocks

    def evict(self, blocks: Iterable[int]) -> None:
        """Take blocks out of the engine's own prefix cache: what they hold is not what it takes them for."""
        if self._pool is not None:
            self._pool.evict_blocks(set(blocks))

    @property
    def own_cache_is_old(self) -> bool:
        """Whether the engine's own prefix cache may have KV of an earlier epoch: it was not emptied since."""
        return self._old_blocks is not None and self._blocks() is self._old_blocks

    def _blocks(self) -> Any:
        """Return the table of blocks in the engine's prefix cache: vLLM empties it by making another one."""
        return getattr(self._pool, "cached_block_hash_to_block", _UNKNOWN)
