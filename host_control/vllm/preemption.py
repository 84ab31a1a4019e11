"""Preempted requests: what they hold is saved before their blocks are others', and loaded when they run again.

While vLLM schedules a step it frees the blocks of requests that it preempts, and gives them to others, which write to
them in that step. A preempted request is nothing then but its tokens: its table of blocks is gone before the connector
hears of it, so that tables are followed here, step by step. At the beginning of that step, before anybody writes, the
workers copy what the request holds and storage does not to where chunks wait to be stored: chunks that were not stored
as they were completed, and all tokens behind the last, a *tail* (:mod:`host_control.disaggregation`). Then the step in
which it runs again computes one token of it, like any that decodes. With windows beside full attention a tail ends with
a block, since what a window has let go of is gone, and up to a block of tokens is computed. With states beside full
attention it has the states as they are, which stand for all tokens so far, and for no fewer.

Nobody but this request will ask for that tail, and only until it runs again. So it goes to the tiers of this host,
where there are any, and ends by itself.

A request goes on behind exactly the KV that it had. Where chunks are stored quantized, all that a preempted request
holds is saved, chunks that are stored included, in records of their own (:data:`host_control.lookup.SAVED`), which are
lossless. Their names are the request's own: another request with the same tokens may have loaded what this one has
computed. They end by themselves, as tails do.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from host_control.lookup import SAVED, LookupAnswer, PrefixLookup
from host_control.vllm.groups import Groups
from host_control.vllm.metadata import StoreOperation
from host_control.vllm.stores import Stores
from shadowserve.keys import private_chunk_keys

__all__ = ["Held", "Preemption", "Saved"]

TAIL_LASTS_S: Final = 600.0
"""A request that does not run again for so long has its last tokens computed."""


@dataclass
class Held:
    """What a running request has in the engine's memory.

    Attributes:
        request_id: whose.
        blocks: its table of each group.
        tokens: leading ones whose KV is there after its last step, drafts included.
    """

    request_id: str
    blocks: list[list[int]]
    tokens: int


@dataclass
class Saved:
    """What was saved of a request when it was preempted.

    Attributes:
        tokens: leading ones.
        chunk_tokens: tokens in a chunk.
        chunk_keys: of its chunks, and then of its tail if it has one.
        held: of these, of each group, what it held a block of, which a load will take again.
        preemptions: of the request, this one included.
        until: when (monotonic) nobody waits any more for it to be stored.
        ranks: that have not yet said that it is stored, or dropped.
        apart: in records of its own.
    """

    tokens: int
    chunk_tokens: int
    chunk_keys: list[bytes]
    held: list[list[bytes]]
    preemptions: int
    until: float
    ranks: int
    apart: bool = False

    @property
    def under_way(self) -> bool:
        """Whether it is still being stored."""
        return self.ranks > 0 and time.monotonic() < self.until

    @property
    def tail_tokens(self) -> int:
        """Tokens behind the last whole chunk."""
        return self.tokens % self.chunk_tokens

    @property
    def promise(self) -> LookupAnswer:
        """What a lookup will answer if nothing of it is dropped."""
        cut = SAVED if self.apart else 0
        return LookupAnswer(self.tokens - self.tail_tokens, "complete", cut=cut, tail=self.tail_tokens > 0)


class Preemption:
    """Follows what running requests hold, and has it saved. On the engine's thread alone.

    Args:
        groups: of full attention, and windows or states.
        lookup: of the requests.
        stores: makes operations.
        ranks: workers, each of which saves its part.
        timeout: seconds that a request waits at most for what is saved of it to be stored.
        apart: what is saved goes into records of its own, since the others are not exact.
    """

    def __init__(
        self,
        groups: Groups,
        lookup: PrefixLookup,
        stores: Stores,
        *,
        ranks: int,
        timeout: float,
        apart: bool = False,
    ) -> None:
        self._groups = groups
        self._chunk_tokens = groups.chunk_tokens
        # What is kept of every chunk is stored last: where a lookup sees that, it can have the rest.
        self._order = sorted(enumerate(groups.groups), key=lambda placed: placed[1].kind == "full")
        self._lookup = lookup
        self._stores = stores
        self._ranks = ranks
        self._timeout = timeout
        self._apart = apart
        self._salts: dict[str, bytes] = {}
        self._held: dict[str, Held] = {}
        self._saved: dict[str, Saved] = {}

    def follow(self, output: Any) -> list[Held]:
        """Take note of a step; return what the requests hold that it preempts, as far as no worker has written there.

        Costs some 0.1 us for each running request.
        """
        lost = [held for name in output.preempted_req_ids or () if (held := self._held.pop(name, None)) is not None]
        if lost and self._groups.written_first:
            self._cut(lost, output)
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            end = new.num_computed_tokens + scheduled[new.req_id]
            self._held[new.req_id] = Held(new.req_id, self._tables(new.block_ids), end)
        cached = output.scheduled_cached_reqs
        steps = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        for name, computed, blocks in steps:
            if blocks is not None and name in cached.resumed_req_ids:
                self._held[name] = Held(name, self._tables(blocks), computed + scheduled[name])
            elif (held := self._held.get(name)) is not None:
                held.tokens = computed + scheduled[name]
                if blocks is not None:
                    for group, table in zip(self._groups.groups, held.blocks, strict=True):
                        table += blocks[group.index]
        return lost

    def _tables(self, blocks: Sequence[Sequence[int]]) -> list[list[int]]:
        return [list(blocks[group.index]) for group in self._groups.groups]

    def _cut(self, lost: Sequence[Held], output: Any) -> None:
        """Leave out blocks that a worker has written before it is asked to save."""
        written = set(output.new_block_ids_to_zero or ())
        written.update(copy.dst_block_id for copy in output.kv_cache_block_copies or ())
        for held in lost if written else ():
            tokens, one = held.tokens, self._groups.one
            for place, table in enumerate(held.blocks):
                kept = self._groups.kept(place, table, tokens)
                if (whole := next((index for index, block in enumerate(kept) if block in written), None)) is not None:
                    # Of several, windows have let go of what a hit would need that ends earlier.
                    held.tokens = min(tokens, whole * self._groups.groups[0].block_tokens) if one else 0

    def save(self, request: Any, held: Held, *, again: bool, tokens_max: int | None) -> list[StoreOperation]:
        """Return what the workers have to store of a request that is preempted; nothing where that is not a block.

        Args:
            request: of vLLM.
            held: by it.
            again: what storage was seen to hold of it could not be loaded.
            tokens_max: of so many leading tokens chunks are stored at most.
        """
        request_id = request.request_id
        chunk_keys, present = self._lookup.chunk_keys(request_id), self._lookup.present(request_id, saved=self._apart)
        # The last token has been sampled and not been computed, and behind it there are drafts that came to nothing.
        # Where steps overlap, the next one may still be on its way, which a state waits for.
        tokens = min(held.tokens, request.num_tokens - (not self._groups.states))
        if tokens_max is not None:
            tokens = min(tokens, tokens_max)
        groups = self._groups
        tokens = groups.saved_tokens(held.tokens, tokens)
        if chunk_keys is None or tokens <= 0:
            return []
        end = tokens // self._chunk_tokens
        self._stores.extend(chunk_keys, request, end)
        names = self._names(request_id, chunk_keys[:end])
        saved = Saved(
            tokens,
            self._chunk_tokens,
            names[:],
            [[] for _ in groups.groups],
            request.num_preemptions,
            time.monotonic() + self._timeout,
            self._ranks,
            self._apart,
        )
        tables = [groups.kept(place, table, held.tokens) for place, table in enumerate(held.blocks)]
        operations = list[StoreOperation]()
        for place, group in self._order:
            there = present[place] if present is not None else None
            whole = tables[place], names, (0, end), there
            operations += self._stores.chunks(
                request_id,
                group,
                *whole,
                again=again,
                exact=self._apart,
                lasts_s=TAIL_LASTS_S if self._apart else 0.0,
            )
            rows = group.rows(tables[place], 0, end).tolist()
            saved.held[place] = [chunk_key for chunk_key, row in zip(names, rows, strict=True) if any(row)]
        if saved.tail_tokens:
            (chunk_key,) = self._names(request_id, [self._stores.tail_chunk_key(chunk_keys, request, tokens)])
            saved.chunk_keys.append(chunk_key)
            for place, group in self._order:
                saved.held[place].append(chunk_key)
                tail = group, tables[place], names, chunk_key, tokens
                operations.append(self._stores.tail(request_id, *tail, exact=self._apart, lasts_s=TAIL_LASTS_S))
        self._saved[request_id] = saved
        return operations

    def _names(self, request_id: str, chunk_keys: Sequence[bytes]) -> list[bytes]:
        """Return what chunks are saved under: their chunk keys, or names that no other request has."""
        if not self._apart:
            return list(chunk_keys)
        salt = self._salts.setdefault(request_id, secrets.token_bytes(32))
        return private_chunk_keys(chunk_keys, salt)

    def of(self, request: Any) -> Saved | None:
        """Return what was saved of a request when it was preempted last, if anything was."""
        saved = self._saved.get(request.request_id)
        return saved if saved is not None and saved.preemptions == request.num_preemptions else None

    def settled(self, request_id: str, ranks: int) -> None:
        """So many ranks more have stored or dropped what they save of a request."""
        if (saved := self._saved.get(request_id)) is not None:
            saved.ranks -= ranks

    def distrust(self) -> None:
        """Of what running requests hold some may be wrong: nothing of it counts until the next step has been planned.

        A load that the engine computed on has fallen short. vLLM takes back what was computed of it.
        """
        for held in self._held.values():
            held.tokens = 0

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._held.pop(request_id, None)
        self._saved.pop(request_id, None)
        self._salts.pop(request_id, None)

    def clear(self) -> None:
        """What requests hold, and what was saved of them, is no one's any more."""
        self._held.clear()
        self._saved.clear()
        self._salts.clear()
