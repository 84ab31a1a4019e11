"""Reads of a plan's pieces from the nodes that have them: one batch, or several for a cluster.

A fetch in layer order from storage nodes may be one request to each, answered as one stream (layers.py). The streams
are joined at the layer: a layer is complete when each stream has brought its part.

A node that cannot be reached, or fails, costs each group the pieces from its first chunk on that node on, and nothing
else. Redirected pieces are read again from the other node, a bounded number of times; other pieces are not read twice.
"""

import asyncio
import functools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dpu_dataplane.config import NODES_MAX
from dpu_dataplane.jobs import Job, Stop
from dpu_dataplane.plan import FetchPlan
from dpu_dataplane.sources.resp.layers import LayerRequest, Threshold, layer_request
from dpu_dataplane.sources.resp.links import DataLinks, Dialer, Link, Node
from dpu_dataplane.sources.source import Delivered, Failure, Resources
from shadowserve import native
from shadowserve.errors import StorageError, StorageUnavailableError
from shadowserve.native import Origin, Result

REDIRECTIONS_MAX: Final = 5
"""Most redirections of one key in one plan: enough for a slot that moves twice; Redis's own clients allow 16."""
_TRANSIENT: Final = ("CLUSTERDOWN", "LOADING", "MASTERDOWN", "TRYAGAIN")
"""Errors of a cluster's node that a retry, on this node or another one, may not meet."""
_NO_LAYERS: Final = ("ERR unknown command", "NOPERM")
"""Errors of servers without KV.LAYERS, and of those that allow this user no KV.LAYERS."""
_LOW_RATE: Final = "ERR a rate of "
"""Error of a storage node whose layers_bits_per_s_min is above the rate."""
_RANGE_REASONS: Final = {
    "cluster": "a Redis or Valkey cluster does not know KV.LAYERS; a node's egress_policy does not apply to this fetch",
    "no_layer_requests": "storage does not know KV.LAYERS; use a storage node of ShadowServe of this release",
}
"""Why a fetch in layer order uses range requests. docs/reference/combinations.md lists the same reasons."""

_logger = logging.getLogger(__name__)


class Redirect(NamedTuple):
    """A redirection by a cluster's node; ``asking``: only for this request, with ASKING before the command."""

    node: Node
    asking: bool


class Router(ABC):
    """One server, or the nodes of a cluster."""

    name: str  # name for messages
    dialer: Dialer  # makes data connections
    clustered: bool  # keys are spread over nodes. Otherwise there is one node, and no other one to try

    @abstractmethod
    def check(self) -> None:
        """Raise the StorageError of the current outage, if there is one."""

    @abstractmethod
    def nodes(self) -> Sequence[Node]:
        """Return all nodes that :meth:`route` may return."""

    @abstractmethod
    def route(self, keys: Sequence[bytes], *, master: bool) -> list[Node | None]:
        """Return the node of each key, with ``master`` the one that accepts writes; None if no node is known."""

    def redirect(self, source: Node, text: str) -> Redirect | None:
        """Return the redirection in a node's error, and update the map; None if it is no redirection."""
        return None

    async def recover(self, node: Node | None) -> None:
        """Update the map of nodes after a node has failed."""
        return

    def note_failure(self, node: Node) -> None:
        """Note that a node's connection broke, or could not be made."""
        return

    def note_rates(self, bytes_per_us: Mapping[Node, float]) -> None:
        """Note how fast a batch has received from each node."""
        return


class _PlanState:
    """A plan in progress: each piece's node, redirections and errors."""

    def __init__(self, plan: FetchPlan, nodes: list[Node | None]) -> None:
        count = len(plan.pieces)
        self.plan = plan
        self.nodes = nodes
        self.done = Delivered(np.full(count, Result.SKIPPED, np.uint32))
        self.asking = [False] * count
        self.redirections = [0] * count
        self.supplied: list[bool] = (plan.pieces["origin"] != Origin.SERVER).tolist()
        self.texts: dict[int, str] = {}
        self.errors: dict[int, StorageError] = {}
        self._chunks = list(zip(plan.pieces["group"].tolist(), plan.pieces["chunk"].tolist(), strict=True))
        self._ends: dict[int, int] = {}  # of each group, the first chunk that failed

    def fail(self, piece: int, result: Result, error: StorageError | None = None) -> None:
        """Record the failure of a piece."""
        group, chunk = self._chunks[piece]
        self._ends[group] = min(chunk, self._ends.get(group, chunk))
        self.done.results[piece] = result
        if error is not None:
            self.errors[piece] = error

    def useful(self, piece_ids: Iterable[int]) -> list[int]:
        """Return the pieces before the first failed chunk of their group, in order."""
        if not self._ends:
            return sorted(piece_ids)
        return sorted(piece for piece in piece_ids if self._is_useful(*self._chunks[piece]))

    def _is_useful(self, group: int, chunk: int) -> bool:
        end = self._ends.get(group)
        return end is None or chunk < end


class PieceReader:
    """Delivers plans, one at a time."""

    def __init__(self, resources: Resources, router: Router, links: DataLinks, threshold: Threshold | None) -> None:
        self._resources = resources
        self._metrics = resources.metrics
        self._router = router
        self._links = links
        self._threshold = threshold

    async def deliver(self, job: Job, plan: FetchPlan) -> Delivered:
        self._router.check()
        self._links.keep(self._router.nodes())
        state = _PlanState(plan, self._router.route(plan.keys, master=plan.authoritative))
        remaining = list(range(len(plan.pieces)))
        done = state.done
        while remaining and done.stop is None:
            try:
                remaining = await self._deliver_batch(job, state, remaining)
            except Stop as stop:
                if (done.results == Result.SKIPPED).all():
                    raise
                done.stop = stop
        for piece in np.flatnonzero((done.results != Result.OK) & (done.results != Result.SKIPPED)).tolist():
            done.failures[piece] = self._failure_of(state, piece)
        return done

    def _failure_of(self, state: _PlanState, piece: int) -> Failure:
        """Return the failure of a piece: the node, its error, and whether a retry may help."""
        result, node = Result(int(state.done.results[piece])), state.nodes[piece]
        text, clustered = state.texts.get(piece, ""), self._router.clustered
        if result is Result.DISCONNECTED and node is not None:
            self._router.note_failure(node)
        reply = f"{node}: {text}" if text else ""
        if not text and clustered and result in (Result.DISCONNECTED, Result.PROTOCOL):
            reply = str(node)
        transient = clustered and result is Result.REFUSED and text.startswith(_TRANSIENT)
        return Failure(
            result,
            state.errors.get(piece),
            reply,
            from_replica=result is Result.NOT_FOUND and node is not None and node.replica,
            recover=functools.partial(self._router.recover, node)
            if result is Result.DISCONNECTED or transient
            else None,
        )

    async def _deliver_batch(self, job: Job, state: _PlanState, remaining: list[int]) -> list[int]:
        """Run one batch of as many remaining pieces as possible; return the pieces that remain."""
        links, piece_ids, rest = await self._connect(job, state, remaining)
        if not piece_ids:
            return state.useful(rest)
        requests = self._layer_requests(state, piece_ids, links)
        result, results = await self._run_batch(job, state, piece_ids, links, requests)
        state.done.results[piece_ids] = results
        redirected = []
        for row in np.flatnonzero(results != Result.OK).tolist():
            piece, failure = piece_ids[row], Result(int(results[row]))
            if failure is Result.SKIPPED or (failure is Result.REDIRECTED and self._redirect(state, piece)):
                state.done.results[piece] = Result.SKIPPED
                redirected.append(piece)
            else:
                state.fail(piece, failure)
        if result is not Result.OK and (results == Result.SKIPPED).all():
            state.fail(piece_ids[0], result)  # the batch failed as a whole, not with one of its pieces
        return state.useful(redirected + rest)

    def _redirect(self, state: _PlanState, piece: int) -> bool:
        """Follow the redirection of a piece; return False if there is none, or too many."""
        node = state.nodes[piece]
        assert node is not None
        state.redirections[piece] += 1
        if state.redirections[piece] > REDIRECTIONS_MAX:
            state.texts[piece] = f"redirected {REDIRECTIONS_MAX} times, last with: {state.texts[piece]}"
            return False
        redirect = self._router.redirect(node, state.texts[piece])
        if redirect is None:
            return False
        self._metrics.totals["storage_redirections"] += 1
        state.nodes[piece], state.asking[piece] = redirect
        return True

    async def _connect(
        self, job: Job, state: _PlanState, remaining: Sequence[int]
    ) -> tuple[dict[Node, list[Link]], list[int], list[int]]:
        """Connect to the nodes of the remaining pieces.

        Returns the links by node; the pieces of these nodes and those that a hook supplies; the other nodes' pieces.
        """
        by_node: dict[Node, list[int]] = {}
        supplied: list[int] = []
        rest: list[int] = []
        for piece in remaining:
            node = state.nodes[piece]
            if state.supplied[piece]:
                supplied.append(piece)
            elif node is None:
                error = StorageUnavailableError(f"storage {self._router.name}: no node has the slot of this key")
                state.fail(piece, Result.DISCONNECTED, error)
            elif node in by_node or len(by_node) < NODES_MAX:  # pieces of further nodes go into the next batch
                by_node.setdefault(node, []).append(piece)
            else:
                rest.append(piece)
        opened = await job.within(self._links.open_all(list(by_node)), "connecting to storage")
        links: dict[Node, list[Link]] = {}
        for (node, piece_ids), link in zip(by_node.items(), opened, strict=True):
            if isinstance(link, list):
                links[node] = link
            elif not self._router.clustered:
                raise link
            else:
                for piece in piece_ids:
                    state.fail(piece, Result.DISCONNECTED, link)
        chosen = state.useful([*supplied, *(piece for node in links for piece in by_node[node])])
        used = {state.nodes[piece] for piece in chosen if not state.supplied[piece]}
        return {node: link for node, link in links.items() if node in used}, chosen, rest

    async def _run_batch(
        self,
        job: Job,
        state: _PlanState,
        piece_ids: Sequence[int],
        links_by_node: dict[Node, list[Link]],
        requests: dict[Node, LayerRequest],
    ) -> tuple[Result, npt.NDArray[np.uint32]]:
        """Run a batch through the pipeline; return its result, and the result of each piece."""
        batch = state.plan.batch(piece_ids)
        pieces = batch.pieces
        numbers: dict[Node | None, int] = {node: number for number, node in enumerate(links_by_node)}
        pieces["node"] = [0 if state.supplied[piece] else numbers[state.nodes[piece]] for piece in piece_ids]
        pieces["asking"] = [state.asking[piece] for piece in piece_ids]
        links = [link for each in links_by_node.values() for link in (each[:1] if requests else each)]
        if requests:
            batch.ask_by_layers({numbers[node]: each for node, each in requests.items()})
        began_s = time.monotonic()
        try:
            with job.interruptible(batch.cancel):
                result = await asyncio.get_running_loop().run_in_executor(
                    self._resources.fetching, self._receive, batch, links, len(links_by_node)
                )
        finally:
            self._note_batch(batch, time.monotonic() - began_s, links, len(requests))
            if self._router.clustered and not state.plan.rate:  # beside decoding, that rate sets the time, not the link
                self._note_rates(pieces, began_s, list(links_by_node))
            batch.release()
            if not batch.sockets_in_sync and not self._router.clustered:
                self._links.close()  # a cluster's links that are out of sync are disconnected, and found to be so
        for piece, text in zip(piece_ids, pieces["error"], strict=True):
            if text:
                own, _, _ = bytes(text).partition(b"\0")  # behind it may be the end of a longer, earlier error
                state.texts[piece] = own.decode("utf-8", "replace")
        self._metrics.totals["batches"] += 1
        state.done.received_bytes += batch.received_bytes
        return result, pieces["result"]

    def _layer_requests(
        self, state: _PlanState, piece_ids: Sequence[int], links: dict[Node, list[Link]]
    ) -> dict[Node, LayerRequest]:
        """Return the one request to each node for its pieces in layer order; none for nodes with range requests."""
        plan = state.plan
        requests: dict[Node, LayerRequest] = {}
        if not plan.layerwise or not links:
            return requests
        if self._threshold is None:
            self._note_ranges("cluster")
            return requests
        ids = np.array(piece_ids)
        far = ids[plan.pieces["origin"][ids] == Origin.SERVER].tolist()
        latency_s = min(link.latency_s for node_links in links.values() for link in node_links)
        if plan.pieces["body_length"][far].sum() < self._threshold.bytes_min(latency_s):
            return requests
        by_node: dict[Node | None, list[int]] = {}
        for piece in far:
            by_node.setdefault(state.nodes[piece], []).append(piece)
        for node, (link, *_) in links.items():
            if not link.takes_layers:
                self._note_ranges("no_layer_requests")
            elif request := layer_request(plan if link.takes_rates else replace(plan, rate=0), by_node[node]):
                requests[node] = request
        return requests

    def _note_ranges(self, reason: str) -> None:
        detail = f"a fetch in the order of layers uses range requests: {_RANGE_REASONS[reason]}"
        self._metrics.add_slower_path(reason, detail)

    def _note_batch(self, batch: native.Batch, seconds: float, links: Sequence[Link], requests: int) -> None:
        """Update the links' rate, and whether servers take KV.LAYERS and its rates, after a batch."""
        if self._threshold is not None:
            self._threshold.note(batch.received_bytes, seconds)
        refusals = batch.refusals
        self._metrics.totals["layer_batches"] += requests > len(refusals)
        for node, refusal in refusals.items():
            link = links[node]
            if refusal.startswith(_NO_LAYERS):  # other errors are about this request
                _logger.info("storage %s does not answer KV.LAYERS (%s): using range requests", link.node, refusal)
                link.takes_layers = False
            elif refusal.startswith(_LOW_RATE):
                _logger.info("storage %s refuses a rate (%s): KV.LAYERS without a rate follows", link.node, refusal)
                link.takes_rates = False

    def _note_rates(self, pieces: npt.NDArray[np.void], began_s: float, nodes: Sequence[Node]) -> None:
        arrived = (pieces["origin"] == Origin.SERVER) & (pieces["result"] == Result.OK)
        ended_us = pieces["ended_ns"] / 1e3 - 1e6 * began_s
        rates = {}
        for number, node in enumerate(nodes):
            if (own := arrived & (pieces["node"] == number)).any():
                rates[node] = float(pieces["body_length"][own].sum() / max(ended_us[own].max(), 1.0))
        if rates:
            self._router.note_rates(rates)

    def _receive(self, batch: native.Batch, links: Sequence[Link], nodes: int) -> Result:
        sessions = [link.session for link in links]
        encrypted = any(session is not None for session in sessions)
        return self._resources.pipeline.fetch(
            batch, [link.fileno() for link in links], sessions=sessions if encrypted else (), nodes=nodes
        )
