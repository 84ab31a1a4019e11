"""The connector's half in vLLM's scheduler: which prompts to load, and which finished chunks to store.

Everything here runs on the engine's thread, so it is cheap: lookups and hashing happen elsewhere, and a step in which
no request completes a chunk costs one comparison for each running request.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from host_control.client import DataPlaneClient
from host_control.config import HostConfig
from host_control.lookup import PrefixLookup
from host_control.vllm.epochs import Epochs
from host_control.vllm.identity.requests import RequestInputs
from host_control.vllm.metadata import (
    LoadOperation,
    ShadowServeMetadata,
    StoreOperation,
    WorkerHandshake,
    WorkerReport,
)
from host_control.vllm.metrics import Counts, FailureLog
from host_control.vllm.support import request_problem
from shadowserve.errors import ConfigurationError
from shadowserve.keys import Extra, chain_links

__all__ = ["SchedulerSide"]

_NEVER: Final = 1 << 62


@dataclass
class _Tracked:
    """A request, from arrival to end."""

    request: Any
    extra: Extra | Callable[[], Extra] = field(default_factory=Extra)  # see RequestInputs.extra()
    preemptions: int = 0  # at the time of the last lookup
    counted: bool = False
    refused: bool = False  # a load failed: never offer another, or vLLM would ask without end
    mixed: bool = False  # holds KV of earlier weights, or goes on behind some: stored under no name
    stored_chunks: int = 0  # leading chunks that are stored or on their way
    local_tokens: int = 0  # the engine's own prefix, when the last offer was made
    offered: list[bytes] | None = None  # links of the chunks that it could load
    offered_epoch: str = ""
    first_chunk: int = 0  # of the load that is under way
    load_chunks: int = 0  # of the same


class SchedulerSide:
    """Decides which prompts to load and which chunks to store; all of it runs on the engine's thread.

    Args:
        config: of the host.
        block_size: tokens in a block.
        fetch, store: whether this engine does either at all (``kv_role``, configuration).
        problem: why this engine is served without the cache, or empty.
        logger: where failures are logged.
        inputs: what requests' KV depends on beside tokens.
    """

    def __init__(
        self,
        config: HostConfig,
        block_size: int,
        *,
        fetch: bool,
        store: bool,
        problem: str,
        logger: logging.Logger,
        inputs: RequestInputs | None = None,
    ) -> None:
        self._config = config
        self._block_size = block_size
        self._chunk_tokens = config.chunk_tokens
        self._chunk_blocks = max(config.chunk_tokens // block_size, 1)
        self._fetch = fetch
        self._store = store
        self._logger = logger
        self._failures = FailureLog(logger)
        self._inputs = inputs or RequestInputs()
        self.epochs = Epochs()
        self._model = b""
        self._clients: list[DataPlaneClient] = []
        self._lookup: PrefixLookup | None = None
        self._tracked: dict[str, _Tracked] = {}
        self._boundary: dict[str, int] = {}
        self._new_loads: dict[str, LoadOperation] = {}
        self._loading: dict[str, LoadOperation] = {}
        # Synchronous loads that no worker has reported yet. The step that waits for one computes on it at once, and so
        # may every request that shares its blocks; if it falls short, they compute on garbage before vLLM hears of it.
        self._unconfirmed: set[str] = set()
        self._cancels: list[str] = []
        self.counts = Counts()
        self.problem = problem

    def start(self, handshakes: dict[int, WorkerHandshake]) -> None:
        """Take what the workers, one for each tensor-parallel rank, call the model and what they hold, and begin."""
        if self.problem:
            return  # the connector has said so
        if problem := next((shake.problem for shake in handshakes.values() if shake.problem), ""):
            self._turn_off(problem)
            return
        shakes = [handshakes[rank] for rank in sorted(handshakes)]
        self._model = shakes[0].model
        if any(shake.model != self._model for shake in shakes):
            self._turn_off("the ranks do not agree on what they compute: have they the same files and options?")
            return
        addresses = [self._config.data_plane_address(rank) for rank in range(len(shakes))]
        first_rank = {address: rank for rank, address in reversed(list(enumerate(addresses)))}
        try:
            # A data plane that serves several ranks is asked once for all of them.
            clients = {address: self._config.client(rank) for address, rank in first_rank.items()}
        except ConfigurationError as error:
            self._turn_off(str(error))
            return
        self._clients = list(clients.values())
        self._lookup = PrefixLookup(
            self._model,
            [(clients[address], shake.namespace) for address, shake in zip(addresses, shakes, strict=True)],
            chunk_tokens=self._chunk_tokens,
            timeout=self._config.lookup_timeout,
            threads=self._config.lookup_threads,
            enabled=self._fetch,
        )

    def _turn_off(self, problem: str) -> None:
        """Serve without the cache from now on; said here alone, once for all workers."""
        self.problem = problem
        self._logger.error("ShadowServe is off, every prompt is computed: %s", problem)

    # ------------------------------------------------------------------ arrival and lookup

    def on_new_request(self, request: Any) -> None:
        """Start looking a request up."""
        if self._lookup is None:
            return
        tracked = _Tracked(request)
        named = self._name(tracked)  # of all, in their order: an adapter's number may come to mean another one
        if (problem := request_problem(request)) is not None:
            self._failures.warn("a request is served without the cache", problem, "")
            return
        if not named:
            return
        self._tracked[request.request_id] = tracked
        # The list is vLLM's own and only grows; lookups read its head.
        self._lookup.submit(request.request_id, request.prompt_token_ids, tracked.extra)
        self._set_boundary(tracked)

    def matched_tokens(self, request: Any, local_tokens: int) -> int | None:
        """Return how many tokens beyond the local prefix can be loaded; ``None``: ask again."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or self._lookup is None:
            return 0
        tracked.local_tokens = local_tokens
        if request.num_preemptions != tracked.preemptions:
            # It comes back after a preemption: by now chunks of its own may be stored, generated tokens too.
            tracked.preemptions = request.num_preemptions
            self._lookup.submit(request.request_id, list(request.all_token_ids), tracked.extra)
        # vLLM asks for requests that hold nothing: all they will have is behind this prefix of the engine's own.
        tracked.mixed = local_tokens > 0 and self.epochs.own_cache_is_old
        self._set_boundary(tracked)
        if tracked.mixed or tracked.refused or not self._fetch or request.skip_reading_prefix_cache:
            return 0
        answer = self._lookup.poll(request.request_id)
        if answer is None:
            return None
        if not tracked.counted:
            tracked.counted = True
            self._count_lookup(request, answer.hits, answer.reason, answer.detail)
        tracked.stored_chunks = max(tracked.stored_chunks, answer.hits)
        # The last token is left to prefill: the first output token is sampled from its hidden state.
        usable = min(answer.hits * self._chunk_tokens, int(request.num_tokens) - 1) - local_tokens
        if usable < min(self._config.load_tokens_min, self._chunk_tokens - 1):
            return 0
        tracked.offered, tracked.offered_epoch = self._lookup.links(request.request_id), self.epochs.current
        return usable

    def _count_lookup(self, request: Any, hits: int, reason: str, detail: str) -> None:
        if reason == "short":
            return
        self.counts.add("lookup_requests")
        self.counts.add("lookup_tokens", request.num_prompt_tokens // self._chunk_tokens * self._chunk_tokens)
        self.counts.add("hit_tokens", hits * self._chunk_tokens)
        if reason != "complete":
            self.counts.add("lookup_failures", reason=reason)
            unnamed = reason == "unnamed"
            what = "a request is served without the cache" if unnamed else "lookup failed, prompts are computed"
            self._failures.warn(what, reason, detail)

    # ------------------------------------------------------------------ loads

    def allocated(self, request: Any, blocks: list[int], external_tokens: int) -> None:
        """Blocks exist for a request's tokens; load ``external_tokens`` of them, if any."""
        tracked = self._tracked.get(request.request_id)
        if not external_tokens or tracked is None or self._lookup is None:
            return
        assert tracked.offered is not None, "blocks for a load that was not offered"
        end_tokens = tracked.local_tokens + external_tokens
        first = tracked.local_tokens // self._chunk_tokens
        end = -(-end_tokens // self._chunk_tokens)
        # Whole chunks: the last may hold the token that is left to prefill, whose block exists.
        operation = LoadOperation(
            request_id=request.request_id,
            epoch=tracked.offered_epoch,
            links=tracked.offered[first:end],
            blocks=blocks[first * self._chunk_blocks : end * self._chunk_blocks],
            skip_blocks=tracked.local_tokens // self._block_size - first * self._chunk_blocks,
        )
        tracked.first_chunk, tracked.load_chunks = first, end - first
        self._new_loads[request.request_id] = operation
        if self._config.asynchronous_fetch:
            self._loading[request.request_id] = operation
        else:
            self._unconfirmed.add(request.request_id)

    def worker_output(self, finished: set[str] | None, report: WorkerReport) -> None:
        """Take what the workers report."""
        for request_id, chunks in report.loaded.items():
            self._unconfirmed.discard(request_id)
            if (tracked := self._tracked.get(request_id)) is None:
                continue
            if chunks == tracked.load_chunks:
                continue
            tracked.refused = True
            # What could not be loaded is computed, and then stored again.
            tracked.stored_chunks = min(tracked.stored_chunks, tracked.first_chunk + chunks)
            self._set_boundary(tracked)
        for request_id in finished or ():
            self._loading.pop(request_id, None)
        if self.epochs.current in report.outlived:
            self._logger.warning(
                "ShadowServe: the weights of this engine have changed, and nobody said so. What was stored before is "
                "not served any more, and what running requests hold is not stored. The engine's own prefix cache may "
                "still serve KV of the old weights; behind it nothing is loaded or stored until it is emptied. After a "
                "change of weights call reset_prefix_cache(reset_connector=True), or POST "
                "/reset_prefix_cache?reset_external=true"
            )
            self._begin_epoch()

    def finished(self, request: Any) -> None:
        """A request has ended or was aborted, perhaps while it was being loaded."""
        request_id = request.request_id
        if self._tracked.pop(request_id, None) is None:
            return
        self._boundary.pop(request_id, None)
        self._unconfirmed.discard(request_id)
        if self._lookup is not None:
            self._lookup.forget(request_id)
        if request_id in self._loading:
            # vLLM keeps the blocks until the workers report the load as ended, which they do once it is quiet.
            self._cancels.append(request_id)

    # ------------------------------------------------------------------ each step

    def step(self, output: Any) -> ShadowServeMetadata:
        """Return what the workers have to do in this step."""
        metadata = ShadowServeMetadata(self.epochs.current)
        if self._new_loads:
            metadata.loads = list(self._new_loads.values())
            self._new_loads = {}
        if self._cancels:
            metadata.cancels, self._cancels = self._cancels, []
        if not self._store or self._lookup is None or self._unconfirmed:
            return metadata  # what is complete now is stored after a later step
        scheduled, boundary = output.num_scheduled_tokens, self._boundary
        for new in output.scheduled_new_reqs:
            request_id = new.req_id
            if new.num_computed_tokens + scheduled[request_id] >= boundary.get(request_id, _NEVER):
                self._complete(output, metadata, request_id, new.num_computed_tokens + scheduled[request_id])
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            # The common case ends here, once for each running request and step.
            if computed + scheduled[request_id] >= boundary.get(request_id, _NEVER):
                self._complete(output, metadata, request_id, computed + scheduled[request_id])
        return metadata

    def _complete(self, output: Any, metadata: ShadowServeMetadata, request_id: str, computed: int) -> None:
        """Have the chunks stored that a request completes in this step."""
        assert self._lookup is not None
        tracked = self._tracked[request_id]
        links = self._lookup.links(request_id)
        if links is None:
            answer = self._lookup.poll(request_id)
            if answer is not None and answer.reason == "unnamed":
                self._boundary.pop(request_id, None)
            return  # still being hashed; ask again with the next step
        # Tokens that are drafts, or still being sampled, have no identity yet.
        end = min(computed, tracked.request.num_tokens) // self._chunk_tokens
        known = max(tracked.stored_chunks, 0 if tracked.refused else self._lookup.known(request_id))
        tracked.stored_chunks = max(known, end)
        self._set_boundary(tracked)
        table = output.kv_connector_block_state.get_block_ids(request_id)
        if end <= known or table is None or len(table[0]) < end * self._chunk_blocks:
            return
        self._extend(links, tracked, end)
        asked = self._lookup.asked(request_id)
        metadata.stores.append(
            StoreOperation(
                request_id=request_id,
                links=links[known:end],
                previous=links[known - 1] if known else None,
                anchored=known <= self._lookup.known(request_id),
                blocks=list(table[0][known * self._chunk_blocks : end * self._chunk_blocks]),
                absent_seconds=time.monotonic() - asked if asked else None,
            )
        )

    def _extend(self, links: list[bytes], tracked: _Tracked, end: int) -> None:
        """Add the links of chunks that end in generated tokens."""
        if len(links) >= end:
            return
        tokens = list(tracked.request.all_token_ids[: end * self._chunk_tokens])
        assert self._lookup is not None
        extra = self._lookup.extra(tracked.request.request_id)
        links[:] = chain_links(self._model, tokens, chunk_tokens=self._chunk_tokens, extra=extra, after=links)

    # ------------------------------------------------------------------ housekeeping

    def reset(self) -> bool:
        """Forget everything stored so far: nothing of it is served to this engine's requests again.

        Not to those that wait, either, nor to those that load: what they load is given up. What the engine computed
        before, for requests that run on or in its own prefix cache, is stored under no name from now on.
        """
        self._begin_epoch()
        return True

    def _begin_epoch(self) -> None:
        self.epochs.begin()
        for request_id, tracked in list(self._tracked.items()):
            request = tracked.request
            loading = request_id in self._loading or request_id in self._new_loads
            holds = tracked.local_tokens if loading else request.num_computed_tokens
            tracked.mixed = holds > 0
            tracked.stored_chunks = 0
            self._set_boundary(tracked)
            if self._lookup is None:
                continue
            if not self._name(tracked):
                del self._tracked[request_id], self._boundary[request_id]
                self._lookup.forget(request_id)
                continue
            tokens = list(request.all_token_ids) if request.num_preemptions else request.prompt_token_ids
            self._lookup.submit(request_id, tokens, tracked.extra)

    def _name(self, tracked: _Tracked) -> bool:
        """Give a request its name in this epoch; return whether it has one."""
        try:
            tracked.extra = self._inputs.extra(tracked.request, self.epochs.current)
        except Exception as error:  # an input of a kind that is not known here must not fail the request
            self._failures.warn("a request is served without the cache", "unnamed", str(error) or repr(error))
            return False
        return True

    def _set_boundary(self, tracked: _Tracked) -> None:
        """Note how many computed tokens make a request's next chunk complete."""
        wanted = self._store and not tracked.mixed
        self._boundary[tracked.request.request_id] = (
            (tracked.stored_chunks + 1) * self._chunk_tokens if wanted else _NEVER
        )

    def close(self) -> None:
        """End lookups."""
        if self._lookup is not None:
            self._lookup.close()
        for client in self._clients:
            client.close()
