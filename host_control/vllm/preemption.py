"""Preempted requests: their KV is saved before their blocks are reused, and loaded when they run again.

While vLLM schedules a step it frees the blocks of the requests that it preempts and gives them to other requests, which
write to them in that step. The connector learns of a preemption when the block table is gone, so it follows the tables
of all running requests. Before any write of the step, the workers copy the KV that storage lacks into the store buffer:
chunks, and the tokens behind the last chunk, a *tail* (:mod:`host_control.disaggregation`). With windows a tail ends
with a block, because KV behind a window is gone. With recurrent state it holds the state, which stands for all tokens.
Only this request needs the tail, and only until it runs again: it is stored in the local tiers, if any, and expires.

A request continues with exactly the KV that it had. Where chunks are stored quantized, everything that it holds is
saved, in lossless records (:data:`host_control.lookup.SAVED`). Their names belong to the request: another request with
the same tokens may have loaded KV that this one computed. They expire, as tails do.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from host_control.lookup import PrefixLookup
from host_control.transfer import State
from host_control.vllm.groups import Groups
from host_control.vllm.metadata import StoreOperation
from host_control.vllm.requests import Held, RequestState, Save
from host_control.vllm.stores import Stores
from shadowserve.keys import private_chunk_keys

TAIL_LASTS_S: Final = 600.0
"""A request that waits longer computes its last tokens again."""


class Preemption:
    """Follows the KV that running requests hold, and saves it. Used on the engine's thread only.

    Args:
        groups: KV cache groups: full attention, and windows or recurrent state.
        apart: Saves have records of their own, because the others are not exact.
    """

    def __init__(
        self,
        requests: Mapping[str, RequestState],
        groups: Groups,
        lookup: PrefixLookup,
        stores: Stores,
        *,
        ranks: int,
        timeout: float,
        apart: bool = False,
    ) -> None:
        self._requests = requests
        self._groups = groups
        self._chunk_tokens = groups.chunk_tokens
        self._lookup = lookup
        self._stores = stores
        self._ranks = ranks
        self._timeout = timeout
        self._apart = apart

    def follow(self, output: Any) -> list[Held]:
        """Follow a step; return what the requests that it preempts hold and no worker has overwritten.

        Costs about 0.1 us for each running request.
        """
        requests = self._requests
        lost = []
        for name in output.preempted_req_ids or ():
            if (state := requests.get(name)) is not None and state.held is not None:
                lost.append(state.held)
                state.held = None
        if lost and self._groups.written_first:
            self._drop_overwritten(lost, output)
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            end = new.num_computed_tokens + scheduled[new.req_id]
            self._hold(new.req_id, new.block_ids, end)
        cached = output.scheduled_cached_reqs
        steps = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        for name, computed, blocks in steps:
            if blocks is not None and name in cached.resumed_req_ids:
                self._hold(name, blocks, computed + scheduled[name])
            elif (state := requests.get(name)) is not None and (held := state.held) is not None:
                held.tokens = computed + scheduled[name]
                if blocks is not None:
                    for group, table in zip(self._groups.groups, held.blocks, strict=True):
                        table += blocks[group.index]
        return lost

    def _hold(self, name: str, blocks: Sequence[Sequence[int]], tokens: int) -> None:
        if (state := self._requests.get(name)) is not None:
            state.held = Held(name, [list(blocks[group.index]) for group in self._groups.groups], tokens)

    def _drop_overwritten(self, lost: Sequence[Held], output: Any) -> None:
        """Shorten the save to end before the first block that is overwritten before it is saved."""
        written = set(output.new_block_ids_to_zero or ())
        written.update(copy.dst_block_id for copy in output.kv_cache_block_copies or ())
        for held in lost if written else ():
            tokens, one = held.tokens, self._groups.one
            for number, table in enumerate(held.blocks):
                kept = self._groups.kept(number, table, tokens)
                if (whole := next((index for index, block in enumerate(kept) if block in written), None)) is not None:
                    # With several groups, windows have freed the KV that a shorter hit would need.
                    held.tokens = min(tokens, whole * self._groups.groups[0].block_tokens) if one else 0

    def save(self, state: RequestState, held: Held) -> list[StoreOperation]:
        """Start a save; return the workers' stores, none where less than a block can be saved."""
        request = state.request
        chunk_keys = self._lookup.chunk_keys(held.request_id)
        # The last token is sampled and not computed, and drafts behind it were rejected. Where steps overlap, the
        # next step may still run, and recurrent state includes it.
        tokens = min(held.tokens, request.num_tokens - (not self._groups.states))
        if (most := state.disaggregation.store_tokens_max) is not None:
            tokens = min(tokens, most)
        tokens = self._groups.saved_tokens(held.tokens, tokens)
        if chunk_keys is None or tokens <= 0:
            return []
        end = tokens // self._chunk_tokens
        self._stores.extend(chunk_keys, request, end)
        names = self._names(state, chunk_keys[:end])
        save = Save(
            state=State.QUEUED,
            tokens=tokens,
            chunk_tokens=self._chunk_tokens,
            chunk_keys=names[:],
            held=[[] for _ in self._groups.groups],
            preemptions=request.num_preemptions,
            until=time.monotonic() + self._timeout,
            ranks=self._ranks,
            apart=self._apart,
        )
        tables = [self._groups.kept(number, table, held.tokens) for number, table in enumerate(held.blocks)]
        exact, lasts_s = self._apart, TAIL_LASTS_S if self._apart else state.hints.ttl_s
        operations = self._stores.chunks(state, tables, names, (0, end), exact=exact, lasts_s=lasts_s)
        for number, group in enumerate(self._groups.groups):
            rows = group.rows(tables[number], 0, end).tolist()
            save.held[number] = [chunk_key for chunk_key, row in zip(names, rows, strict=True) if any(row)]
        if save.tail_tokens:
            (tail_key,) = self._names(state, [self._stores.tail_chunk_key(chunk_keys, request, tokens)])
            save.chunk_keys.append(tail_key)
            for held_keys in save.held:
                held_keys.append(tail_key)
            operations += self._stores.tails(
                state, tables, names, tail_key, tokens, exact=exact, own=True, lasts_s=TAIL_LASTS_S
            )
        state.save = save
        return operations

    def _names(self, state: RequestState, chunk_keys: Sequence[bytes]) -> list[bytes]:
        """Return the names that chunks are saved under: their chunk keys, or names of this request alone."""
        if not self._apart:
            return list(chunk_keys)
        state.salt = state.salt or secrets.token_bytes(32)
        return private_chunk_keys(chunk_keys, state.salt)

    def invalidate(self) -> None:
        """Forget the KV of running requests until the next step is planned.

        A load that the engine computed on has fallen short, and vLLM takes back what it computed.
        """
        for state in self._requests.values():
            if state.held is not None:
                state.held.tokens = 0

    def clear(self) -> None:
        """Forget all held and saved KV."""
        for state in self._requests.values():
            state.held, state.save, state.salt = None, None, b""
