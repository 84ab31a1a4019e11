"""Store operations of a request: records of whole chunks, of recurrent state, and of the tail behind the last chunk."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from host_control.layouts import NOWHERE
from host_control.lookup import PrefixLookup
from host_control.transfer import Reason
from host_control.vllm.disaggregation import LET_GO, count_tail
from host_control.vllm.events import StoreEvents
from host_control.vllm.groups import NULL_BLOCK, Groups
from host_control.vllm.metadata import StoreOperation
from host_control.vllm.metrics import SlowerPaths
from host_control.vllm.requests import NEVER, RequestState
from shadowserve.keys import prefix_chain, tail_chunk_key
from shadowserve.pieces import Flags, leading


class Stores:
    """Makes the store operations of each step, on the engine's thread."""

    def __init__(
        self,
        model: bytes,
        groups: Groups,
        lookup: PrefixLookup,
        slower: SlowerPaths,
        *,
        enabled: bool = True,
        events: StoreEvents | None = None,
    ) -> None:
        self._model = model
        self._groups = groups
        self._chunk_tokens = groups.chunk_tokens
        self._lookup = lookup
        self._slower = slower
        self._enabled = enabled
        self._events = events
        # Other engines take a chunk for stored once its records of full attention are: these are stored last.
        self._order = sorted(enumerate(groups.groups), key=lambda numbered: numbered[1].kind == "full")

    # ------------------------------------------------------------------ what a step completes

    def schedule(self, state: RequestState) -> None:
        """Compute how many computed tokens complete a request's next chunk or tail."""
        end = (state.stored_chunks + 1) * self._chunk_tokens
        if state.tail_end and not state.tail_stored:
            end = min(end, state.tail_end)
        wanted = self._enabled and not state.mixes_weights and state.disaggregation.may_store(end)
        state.store_at = end if wanted else NEVER

    def completed(self, state: RequestState, block_state: Any, computed: int) -> list[StoreOperation]:
        """Return the stores of the chunks, and of the tail, that a request completes in a step.

        Args:
            computed: Tokens that are computed after the step.
        """
        request = state.request
        answer = self._lookup.poll(request.request_id)
        chunk_keys = self._lookup.chunk_keys(request.request_id)
        if answer is None or chunk_keys is None:
            if answer is not None and answer.reason == Reason.UNNAMED:
                state.store_at = NEVER
            return []  # the lookup still runs: the next step asks again
        # Drafts, and tokens that are still being sampled, have no identity yet.
        computed = min(computed, request.num_tokens)
        if (most := state.disaggregation.store_tokens_max) is not None:
            computed = min(computed, most)
        present = self._lookup.present(request.request_id)
        known = max(state.stored_chunks, 0 if present is None or state.refused else self._complete_chunks(present))
        end = computed // self._chunk_tokens
        state.stored_chunks = max(known, end)
        tables = block_state.get_block_ids(request.request_id)
        tail = self._completes_tail(state, tables, computed)
        state.tail_stored |= tail
        self.schedule(state)
        if (end <= known and not tail) or tables is None:
            return []
        self.extend(chunk_keys, request, end)
        tables = [tables[group.index] for group in self._groups.groups]
        published = state.disaggregation.publishes > 0
        lasts_s, span = state.hints.ttl_s, (known, end)
        stores = self.chunks(state, tables, chunk_keys, span, states=False, published=published, lasts_s=lasts_s)
        tail_keys = self._lookup.tail(request.request_id) if tail else []
        if tail:
            stores += self.tails(
                state, tables, chunk_keys, tail_keys[0], state.tail_end, published=published, lasts_s=lasts_s
            )
        if published:
            self._lookup.publications.computed(request.request_id, [*chunk_keys[known:end], *tail_keys])
        return stores

    def _complete_chunks(self, present: Sequence[Flags]) -> int:
        """Return the leading chunks of which every group is stored; recurrent state is kept of some chunks only."""
        groups = zip(self._groups.groups, present, strict=True)
        return min((leading(flags) for group, flags in groups if group.kind != "state"), default=0)

    def _completes_tail(self, state: RequestState, tables: Any, computed: int) -> bool:
        if state.tail_stored or not 0 < state.tail_end <= computed:
            return False
        if tables is not None and not self._groups.keeps_tail(tables, state.tail_end):
            state.tail_end = 0
            count_tail(self._slower, state.disaggregation, LET_GO, self._chunk_tokens)
            return False
        return True

    def states(self, state: RequestState, offered: Sequence[tuple[int, int, int]]) -> Iterator[StoreOperation]:
        """Yield the stores of recurrent state that a step leaves in blocks, before those can change.

        Args:
            offered: Group, block and tokens of each state.
        """
        request_id = state.request.request_id
        chunk_keys, present = self._lookup.chunk_keys(request_id), self._lookup.present(request_id)
        numbers = {group.index: number for number, group in self._order if group.kind == "state"}
        for group, block, tokens in offered:
            if group not in numbers or tokens % self._chunk_tokens or block == NULL_BLOCK or chunk_keys is None:
                continue
            end = tokens // self._chunk_tokens
            stored = present[numbers[group]] if present is not None and not state.refused else ()
            if end <= len(stored) and stored[end - 1]:
                continue
            self.extend(chunk_keys, state.request, end)
            store = StoreOperation(
                request_id=request_id,
                group=group,
                chunk_keys=chunk_keys[end - 1 : end],
                previous=None,
                anchored=True,
                blocks=[block],
                position=tokens - self._chunk_tokens,
                absent_seconds=self._absent_seconds(request_id),
                lasts_s=state.hints.ttl_s,
            )
            if self._events is not None:
                self._events.storing(state.request, chunk_keys, [store])
            yield store

    # ------------------------------------------------------------------ operations

    def extend(self, chunk_keys: list[bytes], request: Any, end: int) -> None:
        """Append the keys of chunks that end in generated tokens, up to chunk ``end``."""
        if len(chunk_keys) >= end:
            return
        tokens = list(request.all_token_ids[: end * self._chunk_tokens])
        extra = self._lookup.extra(request.request_id)
        chunk_keys[:] = prefix_chain(
            self._model, tokens, chunk_tokens=self._chunk_tokens, extra=extra, after=chunk_keys
        )

    def chunks(
        self,
        state: RequestState,
        tables: Sequence[Sequence[int]],
        chunk_keys: Sequence[bytes],
        chunks: tuple[int, int],
        *,
        states: bool = True,
        published: bool = False,
        exact: bool = False,
        lasts_s: float = 0.0,
    ) -> list[StoreOperation]:
        """Return stores of those chunks that the engine keeps whole and that storage lacks.

        Args:
            tables: The request's block table of each group, in the groups' order.
            chunks: First chunk, and the one behind the last.
            states: Also of recurrent state.
            published, exact, lasts_s: As in the operations.
        """
        request_id, (first, end) = state.request.request_id, chunks
        found = self._lookup.present(request_id, saved=exact)
        stores = list[StoreOperation]()
        for number, group in self._order:
            if group.kind == "state" and not states:
                continue
            present = None if found is None else found[number]
            rows = group.rows(tables[number], first, end)
            ready = (rows != NULL_BLOCK).all(axis=1)
            # Refused: they could not be loaded, so they are stored again. None: not known what is stored.
            if present is not None and not state.refused:
                ready[: max(len(present) - first, 0)] &= ~present[first:end]
            index = 0
            while index < len(ready):
                if count := leading(ready[index:]):
                    begin = first + index
                    stores.append(
                        StoreOperation(
                            request_id=request_id,
                            group=group.index,
                            chunk_keys=list(chunk_keys[begin : begin + count]),
                            previous=chunk_keys[begin - 1] if begin else None,
                            anchored=begin <= (0 if present is None else leading(present)),
                            blocks=rows[index : index + count].reshape(-1).tolist(),
                            position=begin * self._chunk_tokens,
                            published=published,
                            absent_seconds=self._absent_seconds(request_id, exact=exact),
                            lasts_s=lasts_s,
                            exact=exact,
                            own=exact,
                        )
                    )
                index += count + 1
        if self._events is not None and not exact:
            self._events.storing(state.request, chunk_keys, stores)
        return stores

    def tails(
        self,
        state: RequestState,
        tables: Sequence[Sequence[int]],
        chunk_keys: Sequence[bytes],
        tail_key: bytes,
        end_tokens: int,
        *,
        published: bool = False,
        exact: bool = False,
        own: bool = False,
        lasts_s: float = 0.0,
    ) -> list[StoreOperation]:
        """Return the stores of the tokens behind the last whole chunk, as a chunk's record padded with zeros.

        Of a window that is shorter than a chunk, and of recurrent state, the record has what a hit needs that ends
        with the tail (:meth:`Group.tail`).
        """
        request_id, before = state.request.request_id, end_tokens // self._chunk_tokens
        present = self._lookup.present(request_id, saved=exact)
        stores = list[StoreOperation]()
        for number, group in self._order:
            blocks = group.tail(tables[number], end_tokens)
            tokens = end_tokens - before * self._chunk_tokens if group.whole and group.kind != "state" else 0
            stores.append(
                StoreOperation(
                    request_id=request_id,
                    group=group.index,
                    chunk_keys=[tail_key],
                    previous=chunk_keys[before - 1] if before else None,
                    anchored=present is not None and before <= leading(present[number]),
                    blocks=np.where(blocks == NULL_BLOCK, NOWHERE, blocks).tolist(),
                    position=before * self._chunk_tokens,
                    published=published,
                    absent_seconds=self._absent_seconds(request_id, exact=exact),
                    lasts_s=lasts_s,
                    tail_tokens=tokens,
                    exact=exact,
                    own=own,
                )
            )
        return stores

    def tail_chunk_key(self, chunk_keys: Sequence[bytes], request: Any, end_tokens: int) -> bytes:
        """Return the chunk key of the tokens behind the last whole chunk, up to ``end_tokens``."""
        before = end_tokens // self._chunk_tokens
        size = end_tokens - before * self._chunk_tokens
        tokens = list(request.all_token_ids[:end_tokens])
        extra = self._lookup.extra(request.request_id)
        return tail_chunk_key(
            self._model, tokens, size, chunk_tokens=self._chunk_tokens, extra=extra, after=chunk_keys[:before]
        )

    def _absent_seconds(self, request_id: str, *, exact: bool = False) -> float | None:
        """Return how long ago a lookup found chunks absent; ``None``: no lookup answered."""
        asked_at = self._lookup.asked(request_id, saved=exact)
        return time.monotonic() - asked_at if asked_at else None
