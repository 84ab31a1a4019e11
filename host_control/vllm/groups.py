"""KV cache groups: what a model's layers keep of a prompt, and how much of it a hit needs.

vLLM gives layers that keep the same of a prompt a table of blocks of their own: all of it (full attention, latents),
the last tokens (windows), or one state (Mamba, GDN, KDA), which stands for all tokens up to where it was taken. A
record holds what one group keeps of one chunk:

- full: all tokens of the chunk;
- a window: as many of its last tokens as a hit that ends with the chunk can need, all where the window is longer;
- a state: the one at the chunk's end.

How long a hit may be is not ours to guess. vLLM's own coordinator is asked, over blocks of which it is only known that
they exist: to a fixed point over all groups, aligned as it aligns, one block less where a draft layer's KV depends on
the token behind it (:meth:`Groups.hit_tokens`).
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
"""Stands in vLLM's tables for what is not kept; never read, never written."""
_FULL: Final = {"FullAttentionSpec", "MLAAttentionSpec"}


@dataclass(frozen=True)
class Group:
    """What the layers of one KV cache group keep.

    Attributes:
        index: of the group in vLLM's configuration, and of its table of blocks.
        kind: of what is kept.
        block_tokens: tokens in a block; of a state, between two that may be kept.
        chunk_blocks: blocks of a chunk.
        record_blocks: of them, the last that a record holds: 1 for a state.
    """

    index: int
    kind: Kind
    block_tokens: int
    chunk_blocks: int
    record_blocks: int

    @property
    def whole(self) -> bool:
        """Whether a record has all blocks of its chunk."""
        return self.record_blocks == self.chunk_blocks

    def rows(self, table: Sequence[int], first: int, end: int) -> npt.NDArray[np.int64]:
        """Return the blocks of the records of chunks ``first`` up to ``end``: [chunk, block], as the table has them.

        What the table has not (yet) is the null block.
        """
        begin = first * self.chunk_blocks
        blocks = np.full((end - first) * self.chunk_blocks, NULL_BLOCK, np.int64)
        there = np.asarray(table[begin : end * self.chunk_blocks], np.int64)
        blocks[: len(there)] = there
        return blocks.reshape(end - first, self.chunk_blocks)[:, -self.record_blocks :]

    def tail(self, table: Sequence[int], end_tokens: int) -> npt.NDArray[np.int64]:
        """Return the blocks of the record of the tail that ends there: [block], as the table has them.

        Those of a chunk's record, were it to end there; or, where that is all of a chunk, those behind its begin.
        """
        end = -(-end_tokens // self.block_tokens)
        first = (end - 1) // self.chunk_blocks * self.chunk_blocks if self.whole else end - self.record_blocks
        blocks = np.full(self.record_blocks, NULL_BLOCK, np.int64)
        there = np.asarray(table[max(first, 0) : end], np.int64)
        blocks[max(-first, 0) :][: len(there)] = there
        return blocks

    def wanted(
        self, table: Sequence[int], local_tokens: int, end_tokens: int, *, tail: bool = False
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return what a load up to ``end_tokens`` takes of this group: chunks, and where their blocks go.

        Args:
            table: the request's blocks of this group.
            local_tokens: that the engine has in its own prefix cache, whose blocks may be shared.
            end_tokens: of the hit.
            tail: whether its last tokens are in a tail's record (:meth:`tail`), and not in a chunk's.

        Returns:
            The chunks' numbers, and [chunk, block] of block numbers or :data:`~host_control.layouts.NOWHERE`.

        Raises:
            ValueError: a block that the engine expects to be filled is in no record.
        """
        chunk_tokens = self.chunk_blocks * self.block_tokens
        first, end = local_tokens // chunk_tokens, -(-end_tokens // chunk_tokens)
        target = np.asarray(table[: -(-end_tokens // self.block_tokens)], np.int64)
        target = np.where(target == NULL_BLOCK, NOWHERE, target)
        # The state at the hit's end is one block, whatever came before it.
        target[: local_tokens // self.block_tokens if self.kind != "state" else 0] = NOWHERE
        if tail and not self.whole:  # that record has all that a hit which ends there needs
            rows = np.full((end - first, self.record_blocks), NOWHERE, np.int64)
            rows[-1, max(self.record_blocks - len(target), 0) :] = target[-self.record_blocks :]
            outside = target[: -self.record_blocks]
        else:
            blocks = np.full(end * self.chunk_blocks, NOWHERE, np.int64)
            blocks[: len(target)] = target
            chunks = blocks.reshape(end, self.chunk_blocks)[first:]
            outside, rows = chunks[:, : self.chunk_blocks - self.record_blocks], chunks[:, -self.record_blocks :]
        if (outside != NOWHERE).any():
            raise ValueError(f"group {self.index} wants blocks that no record of {self.record_blocks} blocks holds")
        (needed,) = np.nonzero((rows != NOWHERE).any(axis=1))
        return first + needed, rows[needed]


class Groups:
    """The groups of one engine that are stored, and the length of their chunks.

    Args:
        vllm_config, kv_cache_config: of vLLM.
        config: of the host.

    Raises:
        UncacheableError: their blocks make no chunks.

    Attributes:
        groups: those that vLLM's own prefix cache has, too.
        chunk_tokens: tokens in a chunk: those configured, or as few more as make whole blocks of every group. Where
            there are states, those of a block: states are kept at the ends of blocks, and only a chunk's end is named.
        followed: whether what running requests hold can be saved: not where drafts are, or may have been, computed, nor
            of states beside windows.
        written_first: whether workers zero and copy blocks before they are asked to save what was in them, as vLLM's
            second model runner does. Where there are states, it zeroes every block that it hands out.
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
        # Of these every leading token is as good as any other, so that all but the last need no computing.
        self._plain, self._drafts = not drafts and all(group.kind == "full" for group in self.groups), drafts
        self._block_tokens = math.gcd(*(group.block_tokens for group in self.groups))
        self._common = common
        # Drafts that are taken back leave states in blocks that only the worker knows.
        self.followed = not drafts if not states else speculative is None and self.states
        self.written_first = bool(getattr(vllm_config, "use_v2_model_runner", True))
        self._coordinator: Any = None

    @property
    def one(self) -> bool:
        """Whether there is one group, whose blocks vLLM can be told of singly where a load falls short."""
        return len(self.groups) == 1 and self._plain

    @property
    def states(self) -> bool:
        """Whether there are states, and beside them nothing but full attention."""
        kinds = {group.kind for group in self.groups}
        return "state" in kinds and "window" not in kinds

    @property
    def tail_block_tokens(self) -> int:
        """Tokens in whose multiples a prompt's tail may end that has a record; 0 where tails have none.

        They are whole blocks of every group. Of states only a chunk's end has a record, and where drafts are computed,
        vLLM drops the last block of a hit.
        """
        return 0 if self._drafts or any(group.kind == "state" for group in self.groups) else self._common

    @property
    def tail_may_end_prompt(self) -> bool:
        """Whether a tail's record may hold a prompt's last token, which is computed again in any case.

        With windows it may not: the last token needs a block more than a hit that ends with it.
        """
        return self._plain

    def keeps_tail(self, tables: Sequence[Sequence[int]], end_tokens: int) -> bool:
        """Return whether a request still holds all that a hit needs which ends there.

        Args:
            tables: the request's blocks, by the indexes of groups.
            end_tokens: a multiple of :attr:`tail_block_tokens`.
        """
        for place, group in enumerate(self.groups):
            needed = tables[group.index][self._first_kept(place, end_tokens) : end_tokens // group.block_tokens]
            if NULL_BLOCK in needed or not needed:
                return False
        return True

    def bind(self, kv_cache_manager: Any) -> None:
        """Take the engine's own rules."""
        self._coordinator = kv_cache_manager.coordinator

    def kept(self, place: int, table: Sequence[int], tokens: int) -> list[int]:
        """Return a request's table of a group, with the null block for what vLLM lets go behind so many tokens.

        Args:
            place: of the group.
            table: as it has grown.
            tokens: that are computed.
        """
        first = min(self._first_kept(place, tokens), len(table))
        return [NULL_BLOCK] * first + list(table[first:])

    def saved_tokens(self, held_tokens: int, tokens: int) -> int:
        """Return how many leading tokens can be saved, and then loaded, of a request.

        All of them, where there is one group. Of several, whole blocks of each, or else chunks: a window may have let
        go of the block with which the one begins that ends a few tokens earlier. With states all that are held, or
        nothing: a state is that of its last token, and of others only vLLM knows whether they were kept. A few behind
        a chunk are sooner computed than fetched.

        Args:
            held_tokens: that it holds.
            tokens: of these, that are to be saved.
        """
        if self._coordinator is None and not self.one:
            return 0
        if self.states:  # a record of each group is fetched, whatever it stands for, where a chunk is a block
            few = 0 < tokens % self.chunk_tokens < self.chunk_tokens // 16
            return tokens if tokens == held_tokens and not few else 0
        end = tokens
        if not self.one:
            end -= end % self._common
            places = range(len(self.groups))
            if any(self._first_kept(place, held_tokens) > self._first_kept(place, end) for place in places):
                end -= end % self.chunk_tokens
        behind = end % self.chunk_tokens
        return end if behind >= self.groups[0].block_tokens else end - behind

    def _first_kept(self, place: int, tokens: int) -> int:
        group = self.groups[place]
        if group.kind == "full":
            return 0
        manager = self._coordinator.single_type_managers[group.index]
        return int(manager.get_num_skipped_tokens(tokens)) // group.block_tokens

    def hit_tokens(self, present: Sequence[Flags], tokens: int, tail_tokens: int = 0) -> int:
        """Return how many leading tokens can be loaded of a prompt; the last token is always left to be computed.

        Args:
            present: of each group, which chunks are stored, and then its tail if there is to be one.
            tokens: of the prompt.
            tail_tokens: that the tail has; 0 where there is none.
        """
        if self._plain:
            count = min(map(leading, present))
            short = self.chunk_tokens - tail_tokens if tail_tokens and count == len(present[0]) else 0
            return min(count * self.chunk_tokens - short, tokens - 1)
        if self._coordinator is None:
            return 0
        if self.states and tail_tokens:
            # vLLM's rule knows states at the ends of blocks alone; this one was taken where the request was.
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
        # vLLM hashes a prompt in steps of its own, which may be shorter than every block.
        step = int(getattr(rule, "hash_block_size", self._block_tokens))
        pool = _StoredBlocks(step, ends)
        rule.block_pool = pool
        rule.single_type_managers = tuple(copy.copy(manager) for manager in rule.single_type_managers)
        for manager in rule.single_type_managers:
            manager.block_pool = pool
        # A block is known by the tokens up to its end, which is all that vLLM asks of a hash here.
        hashes = range(step, tokens + 1, step)
        return int(rule.find_longest_cache_hit(hashes, tokens - 1)[1])

    def with_tail(self, end_tokens: int, tokens: int) -> int:
        """Return how many tokens of a prompt can be loaded with a tail that ends there.

        The last token is left to prefill: the first output token is sampled from its hidden state. A state that has
        seen it already is of no use.
        """
        return min(end_tokens, tokens - 1) if end_tokens < tokens or not self.states else 0

    def _ends(self, group: Group, present: Flags, tail_tokens: int) -> set[int]:
        """Return the ends, in tokens, of a group's blocks that are stored."""
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
    """What vLLM's rules ask of a pool of blocks: which of them there are."""

    def __init__(self, hash_block_size: int, ends: dict[int, set[int]]) -> None:
        self.hash_block_size = hash_block_size
        self.null_block = object()
        self._block = object()
        self._ends = ends
        self._common: dict[tuple[int, ...], set[int]] = {}

    def get_cached_block(self, end: int, groups: Sequence[int]) -> list[object] | None:
        """Return a block for each group, ``None`` where one of them has none that ends there."""
        # vLLM asks for each block of a long prompt, thousands of them: most of what a lookup costs the interpreter.
        asked = tuple(groups)
        common = self._common.get(asked)
        if common is None:
            common = self._common[asked] = set.intersection(*(self._ends.get(group, set()) for group in groups))
        return [self._block] * len(asked) if end in common else None


def _first(spec: Any) -> Any:
    return next(iter(layer_specs(spec)))


def _group(index: int, spec: Any, chunk_tokens: int, drafts: bool) -> Group:
    blocks = chunk_tokens // spec.block_size
    name = type(spec).__name__
    if name == "MambaSpec":
        return Group(index, "state", spec.block_size, blocks, 1)
    if name in _FULL:
        return Group(index, "full", spec.block_size, blocks, blocks)
    # vLLM may take any group for the draft's, and then asks for a block behind what a hit needs, and drops it.
    return Group(index, "window", spec.block_size, blocks, blocks if drafts else _reachable(spec, chunk_tokens))


def _reachable(spec: Any, chunk_tokens: int) -> int:
    """Return how many of a chunk's last blocks a hit can need that ends with a chunk, as vLLM's own rule has it.

    Raises:
        UncacheableError: they are not its last ones.
    """
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    blocks = chunk_tokens // spec.block_size
    # Of a chunk in the middle, so that those before and behind it count.
    mask = KVCacheSpecRegistry.get_manager_class(spec).reachable_block_mask(
        start_block=blocks, end_block=2 * blocks, alignment_tokens=chunk_tokens, kv_cache_spec=spec, use_eagle=False
    )
    if mask is None:
        return int(blocks)
    kept = sum(mask)
    if not kept or not all(mask[-kept:]):
        raise UncacheableError(f"a hit needs other blocks of a {type(spec).__name__} than the last of a chunk")
    more = getattr(spec, "extra_retained_tokens", 0)
    window = int(getattr(spec, "sliding_window", 0))
    return int(min(max(kept, -(-(window - 1 + more) // spec.block_size)), blocks))
