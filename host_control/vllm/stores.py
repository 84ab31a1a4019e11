"""What the workers store of a request: records of whole chunks, of states, and of the tail behind the last chunk."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from host_control.layouts import NOWHERE
from host_control.lookup import PrefixLookup
from host_control.vllm.groups import NULL_BLOCK, Group
from host_control.vllm.metadata import StoreOperation
from shadowserve.keys import prefix_chain, tail_chunk_key
from shadowserve.pieces import Flags, leading

__all__ = ["Stores"]


class Stores:
    """Makes store operations, on the engine's thread.

    Args:
        model: digest that chunk keys begin with.
        chunk_tokens: tokens in a chunk.
        lookup: of the requests.
    """

    def __init__(self, model: bytes, chunk_tokens: int, lookup: PrefixLookup) -> None:
        self._model = model
        self._chunk_tokens = chunk_tokens
        self._lookup = lookup

    def extend(self, chunk_keys: list[bytes], request: Any, end: int) -> None:
        """Add the chunk keys of chunks up to ``end`` that end in generated tokens."""
        if len(chunk_keys) >= end:
            return
        tokens = list(request.all_token_ids[: end * self._chunk_tokens])
        extra = self._lookup.extra(request.request_id)
        chunk_keys[:] = prefix_chain(
            self._model, tokens, chunk_tokens=self._chunk_tokens, extra=extra, after=chunk_keys
        )

    def chunks(
        self,
        request_id: str,
        group: Group,
        table: Sequence[int],
        chunk_keys: Sequence[bytes],
        chunks: tuple[int, int],
        present: Flags | None,
        *,
        again: bool = False,
        published: bool = False,
        exact: bool = False,
        lasts_s: float = 0.0,
    ) -> Iterator[StoreOperation]:
        """Have those of the chunks stored that the engine keeps whole and that storage was not seen to hold.

        Args:
            request_id: whose.
            group: whose KV.
            table: the request's blocks of that group.
            chunk_keys: of the request's chunks.
            chunks: the first, and the one behind the last.
            present: which chunks storage was seen to hold; ``None`` where nobody could say.
            again: what was seen there could not be loaded.
            published: others may wait for them.
            exact: in the records that preempted requests are saved in.
            lasts_s: seconds after which they are not needed any more; 0: for good.
        """
        first, end = chunks
        rows = group.rows(table, first, end)
        ready = (rows != NULL_BLOCK).all(axis=1)
        if present is not None and not again:
            ready[: max(len(present) - first, 0)] &= ~present[first:end]
        place = 0
        while place < len(ready):
            count = leading(ready[place:])
            if count:
                begin = first + place
                yield StoreOperation(
                    request_id=request_id,
                    group=group.index,
                    chunk_keys=list(chunk_keys[begin : begin + count]),
                    previous=chunk_keys[begin - 1] if begin else None,
                    anchored=begin <= (0 if present is None else leading(present)),
                    blocks=rows[place : place + count].reshape(-1).tolist(),
                    published=published,
                    absent_seconds=self.absent_seconds(request_id, exact=exact),
                    lasts_s=lasts_s,
                    exact=exact,
                )
            place += count + 1

    def tail(
        self,
        request_id: str,
        group: Group,
        table: Sequence[int],
        chunk_keys: Sequence[bytes],
        chunk_key: bytes,
        end_tokens: int,
        *,
        place: int = 0,
        published: bool = False,
        exact: bool = False,
        lasts_s: float = 0.0,
    ) -> StoreOperation:
        """Have the tokens stored behind the last whole chunk: a chunk's record, with nothing behind them.

        Of a window that is shorter than a chunk, and of a state, what a hit needs that ends with them
        (:meth:`Group.tail`).

        Args:
            request_id, group, table, chunk keys, published, exact: as of :meth:`chunks`.
            chunk_key: of the tail.
            end_tokens: up to the tail's end.
            place: of the group.
            lasts_s: seconds after which nobody needs it any more; 0: it is stored as chunks are.
        """
        before = end_tokens // self._chunk_tokens
        blocks = group.tail(table, end_tokens)
        present = self._lookup.present(request_id, saved=exact)
        return StoreOperation(
            request_id=request_id,
            group=group.index,
            chunk_keys=[chunk_key],
            previous=chunk_keys[before - 1] if before else None,
            anchored=present is not None and before <= leading(present[place]),
            blocks=np.where(blocks == NULL_BLOCK, NOWHERE, blocks).tolist(),
            published=published,
            absent_seconds=self.absent_seconds(request_id, exact=exact),
            lasts_s=lasts_s,
            tail_tokens=end_tokens - before * self._chunk_tokens if group.whole and group.kind != "state" else 0,
            exact=exact,
        )

    def states(
        self, request: Any, groups: Sequence[Group], offered: Sequence[tuple[int, int, int]], *, again: bool
    ) -> Iterator[StoreOperation]:
        """Have states stored that a step leaves in blocks, before they can change.

        Args:
            request: of vLLM.
            groups: of the engine.
            offered: of each state its group, block and tokens.
            again: what storage was seen to hold of the request could not be loaded.
        """
        request_id = request.request_id
        chunk_keys, present = self._lookup.chunk_keys(request_id), self._lookup.present(request_id)
        places = {group.index: place for place, group in enumerate(groups) if group.kind == "state"}
        for group, block, tokens in offered:
            if group not in places or tokens % self._chunk_tokens or block == NULL_BLOCK or chunk_keys is None:
                continue
            end = tokens // self._chunk_tokens
            if present is not None and not again and end <= len(present[places[group]]):
                if present[places[group]][end - 1]:
                    continue
            self.extend(chunk_keys, request, end)
            yield StoreOperation(
                request_id=request_id,
                group=group,
                chunk_keys=chunk_keys[end - 1 : end],
                previous=None,
                anchored=True,
                blocks=[block],
                absent_seconds=self.absent_seconds(request_id),
            )

    def tail_chunk_key(self, chunk_keys: Sequence[bytes], request: Any, end_tokens: int) -> bytes:
        """Return the chunk key of what a request has behind its last whole chunk, up to ``end_tokens``."""
        before = end_tokens // self._chunk_tokens
        size = end_tokens - before * self._chunk_tokens
        tokens = list(request.all_token_ids[:end_tokens])
        extra = self._lookup.extra(request.request_id)
        return tail_chunk_key(
            self._model, tokens, size, chunk_tokens=self._chunk_tokens, extra=extra, after=chunk_keys[:before]
        )  # fmt: skip

    def absent_seconds(self, request_id: str, *, exact: bool = False) -> float | None:
        """Return how long ago storage was asked for a request's chunks; ``None`` where it could not say."""
        asked = self._lookup.asked(request_id, saved=exact)
        return time.monotonic() - asked if asked else None
