"""KV cache groups: which blocks of a prompt each group keeps, and how long a hit on them can be.

vLLM puts layers of the same cache type into one group with one block table. A record holds one chunk of one group: all
tokens of it (full attention, MLA), the last tokens that a hit ending with the chunk can need (sliding windows), or the
recurrent state at its end (Mamba, GDN, KDA).

vLLM's own coordinator decides the length of a hit, over a fake block pool that only knows which blocks are stored. So
alignment, the fixed point over all groups and the block that draft layers drop follow vLLM's rules.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from host_control.config import HostConfig
from host_control.layouts import NOWHERE
from host_control.vllm.support import UncacheableError, layer_specs
from shadowserve.pieces import Flags, leading

Kind = Literal["full", "window", "state"]
NULL_BLOCK: Final = 0
"""vLLM's placeholder for a block that is not kept. It is never read or written."""
_FULL: Final = {"FullAttentionSpec", "MLAAttentionSpec"}


@dataclass(frozen=True)
class Group:
    """One KV cache group.

    Attributes:
        block_tokens: Tokens per block. For recurrent state: tokens between two states.
        record_blocks: Number of last blocks of a chunk that a record holds; 1 for recurrent state.
        last_chunks: Last chunks of a hit that need their record, where not all do.
    """

    index: int
    kind: Kind
    block_tokens: int
    chunk_blocks: int
    record_blocks: int
    last_chunks: int = 1

    @property
    def whole(self) -> bool:
        """True if a record holds all blocks of its chunk."""
        return self.record_blocks == self.chunk_blocks

    def rows(self, table: Sequence[int], first: int, end: int) -> npt.NDArray[np.int64]:
        """Return the block numbers of the records of chunks ``first`` to ``end`` (exclusive), shape [chunk, block].

        Blocks beyond the end of the table are the null block.
        """
        known = np.asarray(table[first * self.chunk_blocks : end * self.chunk_blocks], np.int64)
        blocks = np.full((end - first) * self.chunk_blocks, NULL_BLOCK, np.int64)
        blocks[: len(known)] = known
        return blocks.reshape(end - first, self.chunk_blocks)[:, -self.record_blocks :]

    def tail(self, table: Sequence[int], end_tokens: int) -> npt.NDArray[np.int64]:
        """Return the block numbers of the record of a prompt's tail that ends at ``end_tokens``, shape [block].

        If a record holds whole chunks: the blocks from the start of the last chunk. Otherwise: the last
        ``record_blocks`` blocks before the end, as for a chunk that ends there.
        """
        end = -(-end_tokens // self.block_tokens)
        first = (end - 1) // self.chunk_blocks * self.chunk_blocks if self.whole else end - self.record_blocks
        known = np.asarray(table[max(first, 0) : end], np.int64)
        blocks = np.full(self.record_blocks, NULL_BLOCK, np.int64)
        blocks[max(-first, 0) :][: len(known)] = known
        return blocks

    def wanted(
        self, table: Sequence[int], local_tokens: int, end_tokens: int, *, tail: bool = False
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the chunks that a load up to ``end_tokens`` needs, and the target block of each of their blocks.

        Args:
            local_tokens: Tokens in the engine's own prefix cache. Their blocks may be shared and are not written.
            tail: The last tokens come from a tail's record (:meth:`tail`), not from a chunk's.

        Returns:
            The chunk indexes, and an array [chunk, block] of block numbers or :data:`~host_control.layouts.NOWHERE`.

        Raises:
            ValueError: No record holds a block that the engine expects to be filled.
        """
        chunk_tokens = self.chunk_blocks * self.block_tokens
        first, end = local_tokens // chunk_tokens, -(-end_tokens // chunk_tokens)
        target = np.asarray(table[: -(-end_tokens // self.block_tokens)], np.int64)
        target = np.where(target == NULL_BLOCK, NOWHERE, target)
        # A recurrent state is one block, at the end of the hit, even if the engine has all tokens before it.
        target[: local_tokens // self.block_tokens if self.kind != "state" else 0] = NOWHERE
        if tail and not self.whole:  # the tail's record alone holds all blocks that the hit needs
            rows = np.full((end - first, self.record_blocks), NOWHERE, np.int64)
            rows[-1, max(self.record_blocks - len(target), 0) :] = target[-self.record_blocks :]
            outside = target[: -self.record_blocks]
        else:
            blocks = np.full(end * self.chunk_blocks, NOWHERE, np.int64)
            blocks[: len(target)] = target
            chunks = blocks.reshape(end, self.chunk_blocks)[first:]
            outside, rows = chunks[:, : self.chunk_blocks - self.record_blocks], chunks[:, -self.record_blocks :]
        if (outside != NOWHERE).any():
            raise ValueError(f"KV cache group {self.index}: the load needs blocks that are in no stored record")
        (needed,) = np.nonzero((rows != NOWHERE).any(axis=1))
        return first + needed, rows[needed]


class Groups:
    """The KV cache groups of one engine that ShadowServe stores.

    Attributes:
        chunk_tokens: Tokens per chunk: the configured number, rounded up to whole blocks of every group. With
            recurrent state: one block, because states are kept at block ends and keys name chunk ends.
        followed: Running requests can be saved on preemption. False if draft tokens may have been computed, and for
            recurrent state together with windows.
        written_first: vLLM zeroes and copies blocks before it calls the connector to save them, as its second model
            runner does. With recurrent state that runner zeroes every block that it allocates.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: HostConfig) -> None:
        chosen = [
            (index, group)
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
            if getattr(group, "enable_kv_transfer", True) and group.kv_cache_spec.prefix_cacheable
        ]
        specs = [_first(group.kv_cache_spec) for _, group in chosen]
        common = math.lcm(*(spec.block_size for spec in specs))
        states = any(type(spec).__name__ == "MambaSpec" for spec in specs)
        self.chunk_tokens = common if states else -(-config.chunk_tokens // common) * common
        speculative = vllm_config.speculative_config
        drafts = speculative is not None and speculative.use_eagle_block_drop()
        self.groups = tuple(
            _group(index, spec, self.chunk_tokens, drafts) for (index, _), spec in zip(chosen, specs, strict=True)
        )
        self._drafts = drafts
        # A hit can end at any token, not only at a block or chunk end.
        self._plain = not drafts and all(group.kind == "full" for group in self.groups)
        self._block_tokens = math.gcd(*(group.block_tokens for group in self.groups))
        self._common = common
        # After rejected draft tokens, only the worker knows which block holds the recurrent state.
        self.followed = (speculative is None and self.states) if states else not drafts
        self.written_first = bool(getattr(vllm_config, "use_v2_model_runner", True))
        self._coordinator: Any = None

    @property
    def one(self) -> bool:
        """True if there is one group, so that a short load can report single invalid blocks to vLLM."""
        return len(self.groups) == 1 and self._plain

    @property
    def states(self) -> bool:
        """True if the groups are recurrent state and full attention only."""
        kinds = {group.kind for group in self.groups}
        return "state" in kinds and "window" not in kinds

    @property
    def tail_block_tokens(self) -> int:
        """A tail's record ends at a multiple of this number of tokens: whole blocks of every group.

        0: Tails have no records. Recurrent state has records at chunk ends only. With draft layers, vLLM drops the last
        block of a hit.
        """
        return 0 if self._drafts or any(group.kind == "state" for group in self.groups) else self._common

    @property
    def tail_may_end_prompt(self) -> bool:
        """True if a tail's record may include the prompt's last token, which is always computed again.

        False with windows: computing the last token needs one block more than a hit that ends with it.
        """
        return self._plain

    def keeps_tail(self, tables: Sequence[Sequence[int]], end_tokens: int) -> bool:
        """Return True if a request still holds all blocks that a hit up to ``end_tokens`` needs.

        Args:
            end_tokens: A multiple of :attr:`tail_block_tokens`.
        """
        for position, group in enumerate(self.groups):
            needed = tables[group.index][self._first_kept(position, end_tokens) : end_tokens // group.block_tokens]
            if NULL_BLOCK in needed or not needed:
                return False
        return True

    def bind(self, kv_cache_manager: Any) -> None:
        self._coordinator = kv_cache_manager.coordinator

    def kept(self, position: int, table: Sequence[int], tokens: int) -> list[int]:
        """Return a request's block table with the null block for blocks that vLLM frees after ``tokens`` tokens.

        Args:
            table: All blocks that the request was ever given.
        """
        first = min(self._first_kept(position, tokens), len(table))
        return [NULL_BLOCK] * first + list(table[first:])

    def saved_tokens(self, held_tokens: int, tokens: int) -> int:
        """Return the number of leading tokens of a request that can be saved on preemption and loaded again.

        - One group: all tokens.
        - Several groups: whole blocks of each. Whole chunks if a window has freed a needed block.
        - Recurrent state: all held tokens or none, because only the last state is certain to be kept.

        A few tokens after the last chunk are not saved: computing them is faster than fetching them.
        """
        if self._coordinator is None and not self.one:
            return 0
        if self.states:  # a chunk is one block here, and a tail costs as much to fetch as a chunk
            few = 0 < tokens % self.chunk_tokens < self.chunk_tokens // 16
            return tokens if tokens == held_tokens and not few else 0
        end = tokens
        if not self.one:
            end -= end % self._common
            positions = range(len(self.groups))
            if any(self._first_kept(position, held_tokens) > self._first_kept(position, end) for position in positions):
                end -= end % self.chunk_tokens
        behind = end % self.chunk_tokens
        return end if behind >= self.groups[0].block_tokens else end - behind

    def _first_kept(self, position: int, tokens: int) -> int:
        group = self.groups[position]
        if group.kind == "full":
            return 0
        manager = self._coordinator.single_type_managers[group.index]
        return int(manager.get_num_skipped_tokens(tokens)) // group.block_tokens

    def hit_tokens(self, present: Sequence[Flags], tokens: int, tail_tokens: int = 0) -> int:
        """Return the number of leading tokens of a prompt that can be loaded. The last token is always computed.

        Args:
            present: For each group, one flag per chunk: it is stored. With a tail, its flag is the last one.
        """
        if self._plain:
            count = min(map(leading, present))
            short = self.chunk_tokens - tail_tokens if tail_tokens and count == len(present[0]) else 0
            return min(count * self.chunk_tokens - short, tokens - 1)
        if self._coordinator is None:
            return 0
        if self.states and tail_tokens:
            # vLLM's rule only considers states at block ends; the tail's state is where a preempted request stopped.
            end = (len(present[0]) - 1) * self.chunk_tokens + tail_tokens
            full = [flags for group, flags in zip(self.groups, present, strict=True) if group.kind == "full"]
            if end < tokens and all(flags.all() for flags in full) and all(flags[-1] for flags in present):
                return end
            present, tail_tokens = [flags[:-1] for flags in present], 0
        ends = {
            group.index: self._ends(group, flags, tail_tokens)
            for group, flags in zip(self.groups, present, strict=True)
        }
        rule = copy.copy(self._coordinator)
        # vLLM may hash a prompt in steps that are shorter than every group's blocks.
        step = int(getattr(rule, "hash_block_size", self._block_tokens))
        pool = _StoredBlocks(step, ends)
        rule.block_pool = pool
        rule.single_type_managers = tuple(copy.copy(manager) for manager in rule.single_type_managers)
        for manager in rule.single_type_managers:
            manager.block_pool = pool
        # The fake pool identifies a block by the position of its end, so the positions serve as hashes.
        hashes = range(step, tokens + 1, step)
        return int(rule.find_longest_cache_hit(hashes, tokens - 1)[1])

    def with_tail(self, end_tokens: int, tokens: int) -> int:
        """Return the number of tokens of a prompt that can be loaded with a tail that ends at ``end_tokens``.

        The last token is always computed: the first output token is sampled from its hidden state. A recurrent state
        that includes the last token cannot be used.
        """
        return min(end_tokens, tokens - 1) if end_tokens < tokens or not self.states else 0

    def _ends(self, group: Group, present: Flags, tail_tokens: int) -> set[int]:
        """Return the end positions, in tokens, of the stored blocks of a group."""
        chunks = present[:-1] if tail_tokens else present
        blocks = np.zeros((len(chunks), group.chunk_blocks), np.bool_)
        blocks[:, -group.record_blocks :] = chunks[:, None]
        ends = set(((np.flatnonzero(blocks) + 1) * group.block_tokens).tolist())
        if tail_tokens and present[-1]:
            end = len(chunks) * group.chunk_blocks + tail_tokens // group.block_tokens
            tail = group.tail(range(1, end + 1), end * group.block_tokens)
            ends.update((tail[tail != NULL_BLOCK] * group.block_tokens).tolist())
        return ends


class _StoredBlocks:
    """A stand-in for vLLM's block pool in which exactly the stored blocks are cached."""

    def __init__(self, hash_block_size: int, ends: dict[int, set[int]]) -> None:
        self.hash_block_size = hash_block_size
        self.null_block = object()
        self._block = object()
        self._ends = ends
        self._common: dict[tuple[int, ...], set[int]] = {}

    def get_cached_block(self, end: int, groups: Sequence[int]) -> list[object] | None:
        """Return a block for each group, ``None`` if a group has no stored block that ends at ``end``."""
        # Hot path: vLLM calls this once per block, thousands of times for a long prompt.
        key = tuple(groups)
        common = self._common.get(key)
        if common is None:
            common = self._common[key] = set.intersection(*(self._ends.get(group, set()) for group in groups))
        return [self._block] * len(key) if end in common else None


def _first(spec: Any) -> Any:
    return next(iter(layer_specs(spec)))


def _group(index: int, spec: Any, chunk_tokens: int, drafts: bool) -> Group:
    blocks = chunk_tokens // spec.block_size
    name = type(spec).__name__
    if name == "MambaSpec":
        return Group(index, "state", spec.block_size, blocks, 1)
    if name in _FULL:
        return Group(index, "full", spec.block_size, blocks, blocks)
    # With draft layers, vLLM may look up one block more than the hit needs in any group, and drops it afterwards.
    record_blocks = blocks if drafts else _reachable(spec, chunk_tokens)
    last_chunks = max(1, -(-(_window(spec) - 1) // chunk_tokens))
    return Group(index, "window", spec.block_size, blocks, record_blocks, last_chunks)


def _window(spec: Any) -> int:
    return int(getattr(spec, "sliding_window", 0)) + int(getattr(spec, "extra_retained_tokens", 0))


def _reachable(spec: Any, chunk_tokens: int) -> int:
    """Return the number of last blocks of a chunk that a hit ending with a chunk can need, by vLLM's own rule."""
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    blocks = chunk_tokens // spec.block_size
    # Use the second chunk, so that blocks before and after it count.
    mask = KVCacheSpecRegistry.get_manager_class(spec).reachable_block_mask(
        start_block=blocks, end_block=2 * blocks, alignment_tokens=chunk_tokens, kv_cache_spec=spec, use_eagle=False
    )
    if mask is None:
        return int(blocks)
    kept = sum(mask)
    if not kept or not all(mask[-kept:]):
        raise UncacheableError(f"a hit needs blocks of a {type(spec).__name__} that are not the last of a chunk")
    return int(min(max(kept, -(-(_window(spec) - 1) // spec.block_size)), blocks))
