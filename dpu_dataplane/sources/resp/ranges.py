"""An order's bytes, from the node that has each piece: one batch, or with a cluster as many as its nodes make of it.

Layer by layer, all from one server, they come in one stream where that pays (layers.py).

A node that cannot be reached, and one that fails, cost each group its pieces from the first chunk of theirs on, and
nothing else. Pieces that a node says another one has are fetched again from there, a bounded number of times; the
others are not fetched twice.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from typing import Final

import numpy as np
import numpy.typing as npt

from dpu_dataplane.config import NODES_MAX
from dpu_dataplane.jobs import Job, Stop
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.resp.layers import LayerRequest, Threshold, layer_request
from dpu_dataplane.sources.resp.links import DataLinks, Link, Node
from dpu_dataplane.sources.resp.servers import REDIRECTIONS_MAX, Servers
from dpu_dataplane.sources.source import Delivered, Failure, Order
from shadowserve import native
from shadowserve.errors import StorageError, StorageUnavailableError
from shadowserve.native import Origin, Result

__all__ = ["Ranges"]

_PASSING: Final = ("CLUSTERDOWN", "LOADING", "MASTERDOWN", "TRYAGAIN")
"""Errors of a cluster's node that may be over when it is asked again, or another one is."""
_RANGES: Final = {
    "cluster": "a fetch in the order of layers is asked for in ranges, as a Redis or Valkey cluster does not know "
    "KV.LAYERS; its layers share no link with those of others by a node's egress_policy",
    "several_nodes": "a fetch in the order of layers is asked for in ranges, as there are several storage nodes",
    "near_chunks": "a fetch in the order of layers is asked for in ranges, as tiers of this machine hold some of it",
    "no_layer_requests": "a fetch in the order of layers is asked for in ranges, as storage does not know KV.LAYERS; "
    "use a storage node of ShadowServe of this release",
}
"""Why layers are not asked for in one request. docs/combinations.md has the same reasons."""
_logger = logging.getLogger(__name__)
_ANY: Final = 1 << 32
"""Behind every chunk."""


class _Course:
    """An order under way: who has each piece, how often that has changed, and what has failed."""

    def __init__(self, order: Order, nodes: list[Node | None]) -> None:
        count = len(order.pieces)
        self.order = order
        self.nodes = nodes
        self.done = Delivered(np.full(count, Result.SKIPPED, np.uint32))
        self.asking = [False] * count
        self.redirections = [0] * count
        self.supplied: list[bool] = (order.pieces["origin"] != Origin.SERVER).tolist()
        self.texts: dict[int, str] = {}
        self.errors: dict[int, StorageError] = {}
        self._places = list(zip(order.pieces["group"].tolist(), order.pieces["chunk"].tolist(), strict=True))
        self._ends: dict[int, int] = {}  # of each group, the first chunk that cannot be had

    def fail(self, index: int, result: Result, error: StorageError | None = None) -> None:
        """Take note that a piece cannot be had."""
        group, chunk = self._places[index]
        self._ends[group] = min(chunk, self._ends.get(group, chunk))
        self.done.results[index] = result
        if error is not None:
            self.errors[index] = error

    def useful(self, indexes: Iterable[int]) -> list[int]:
        """Return those of some pieces that may still be of use, in order."""
        if not self._ends:
            return sorted(indexes)
        return sorted(
            index for index in indexes if self._places[index][1] < self._ends.get(self._places[index][0], _ANY)
        )


class Ranges:
    """Fetches orders, one at a time."""

    def __init__(
        self,
        pipeline: native.Pipeline,
        executor: Executor,
        servers: Servers,
        links: DataLinks,
        metrics: Metrics,
        threshold: Threshold | None,
    ) -> None:
        self._pipeline = pipeline
        self._executor = executor
        self._servers = servers
        self._links = links
        self._metrics = metrics
        self._threshold = threshold

    async def run(self, job: Job, order: Order) -> Delivered:
        """Deliver an order, as :meth:`Source.deliver` wants it."""
        self._servers.check()
        self._links.keep(self._servers.nodes())
        course = _Course(order, self._servers.route(order.keys, master=order.authoritative))
        todo = list(range(len(order.pieces)))
        done = course.done
        while todo and done.stop is None:
            try:
                todo = await self._step(job, course, todo)
            except Stop as stop:
                if (done.results == Result.SKIPPED).all():
                    raise
                done.stop = stop
        for index in np.flatnonzero((done.results != Result.OK) & (done.results != Result.SKIPPED)).tolist():
            done.failures[index] = self._explained(course, index)
        return done

    def _explained(self, course: _Course, index: int) -> Failure:
        """Say of a piece that was not delivered who was asked, what it said, and what may help."""
        result, node = Result(int(course.done.results[index])), course.nodes[index]
        text, clustered = course.texts.get(index, ""), self._servers.clustered
        said = f"{node}: {text}" if text else ""
        if not text and clustered and result in (Result.DISCONNECTED, Result.PROTOCOL):
            said = str(node)
        refused = clustered and result is Result.REFUSED and text.startswith(_PASSING)
        return Failure(
            result,
            course.errors.get(index),
            said,
            copy=result is Result.NOT_FOUND and node is not None and node.replica,
            recover=functools.partial(self._servers.recover, node)
            if result is Result.DISCONNECTED or refused
            else None,
        )

    async def _step(self, job: Job, course: _Course, todo: list[int]) -> list[int]:
        """Run one batch over as many of ``todo`` as can be had; return what is left of it."""
        links, batch, rest = await self._reach(job, course, todo)
        if not batch:
            return course.useful(rest)
        request = self._layer_request(course.order, batch, links)
        failure, results = await self._round(job, course, batch, links, request)
        course.done.results[batch] = results
        again = []
        for position in np.flatnonzero(results != Result.OK).tolist():
            index, result = batch[position], Result(int(results[position]))
            if result is Result.SKIPPED or (result is Result.REDIRECTED and self._redirect(course, index)):
                course.done.results[index] = Result.SKIPPED
                again.append(index)
            else:
                course.fail(index, result)
        if failure is not Result.OK and (results == Result.SKIPPED).all():
            course.fail(batch[0], failure)  # what ended the batch was no piece's
        return course.useful(again + rest)

    def _redirect(self, course: _Course, index: int) -> bool:
        """Send a piece where a node's answer says it is; return False where it does not say, or says so too often."""
        asked = course.nodes[index]
        assert asked is not None
        course.redirections[index] += 1
        if course.redirections[index] > REDIRECTIONS_MAX:
            course.texts[index] = f"redirected {REDIRECTIONS_MAX} times, last with: {course.texts[index]}"
            return False
        redirect = self._servers.redirect(asked, course.texts[index])
        if redirect is None:
            return False
        self._metrics.storage_redirections += 1
        course.nodes[index], course.asking[index] = redirect
        return True

    async def _reach(
        self, job: Job, course: _Course, todo: Sequence[int]
    ) -> tuple[dict[Node, list[Link]], list[int], list[int]]:
        """Return links to nodes that have pieces of ``todo``, the pieces of these, and those of still other nodes.

        Pieces that come by themselves are among the second.
        """
        wanted: dict[Node, list[int]] = {}
        supplied: list[int] = []
        rest: list[int] = []
        for index in todo:
            node = course.nodes[index]
            if course.supplied[index]:
                supplied.append(index)
            elif node is None:
                lacking = f"storage {self._servers.name}: no node has the slot of this key"
                course.fail(index, Result.DISCONNECTED, StorageUnavailableError(lacking))
            elif node in wanted or len(wanted) < NODES_MAX:  # what more have is fetched in the next batch
                wanted.setdefault(node, []).append(index)
            else:
                rest.append(index)
        opened = await job.within(self._links.open_all(list(wanted)), "connecting to storage")
        links: dict[Node, list[Link]] = {}
        for (node, indexes), link in zip(wanted.items(), opened, strict=True):
            if isinstance(link, list):
                links[node] = link
            elif not self._servers.clustered:
                raise link
            else:
                for index in indexes:
                    course.fail(index, Result.DISCONNECTED, link)
        batch = course.useful([*supplied, *(index for node in links for index in wanted[node])])
        used = {course.nodes[index] for index in batch if not course.supplied[index]}
        return {node: link for node, link in links.items() if node in used}, batch, rest

    async def _round(
        self,
        job: Job,
        course: _Course,
        batch: Sequence[int],
        links: dict[Node, list[Link]],
        request: LayerRequest | None,
    ) -> tuple[Result, npt.NDArray[np.uint32]]:
        all_pieces = course.order.pieces
        pieces: npt.NDArray[np.void] = all_pieces[list(batch)] if len(batch) < len(all_pieces) else all_pieces
        numbers: dict[Node | None, int] = {node: number for number, node in enumerate(links)}
        pieces["node"] = [0 if course.supplied[index] else numbers[course.nodes[index]] for index in batch]
        pieces["asking"] = [course.asking[index] for index in batch]
        used = [link for each in links.values() for link in each]
        batch_ = course.order.make_batch(pieces)
        if request is not None:
            used = used[:1]
            batch_.ask_by_layers(request.command, request.layers, request.keys)
        began_s = time.monotonic()
        try:
            with job.interruptible(batch_.cancel):
                result = await asyncio.get_running_loop().run_in_executor(
                    self._executor, self._fetch, batch_, used, len(links)
                )
        finally:
            self._take_note(batch_, time.monotonic() - began_s, used, request)
            batch_.release()
            if not batch_.sockets_in_sync and not self._servers.clustered:
                self._links.close()  # in a cluster those that are out of step, which are disconnected, are found so
        for index, text in zip(batch, pieces["error"], strict=True):
            if text:
                course.texts[index] = bytes(text).decode("utf-8", "replace")
        self._metrics.batches += 1
        course.done.received_bytes += batch_.received_bytes
        return result, pieces["result"]

    def _layer_request(self, order: Order, batch: Sequence[int], links: dict[Node, list[Link]]) -> LayerRequest | None:
        """Return what to ask for in one request, if anything."""
        if not order.layerwise or not links:
            return None
        if self._threshold is None and not self._servers.clustered:  # pieces are asked for one at a time
            return None
        if reason := self._not_one_request(order, batch, links):
            self._metrics.add_slower_path(reason, _RANGES[reason])
            return None
        assert self._threshold is not None, "a cluster is asked for ranges alone"
        [used] = links.values()
        bytes_min = self._threshold.bytes_min(min(link.latency_s for link in used))
        if order.pieces["body_length"][list(batch)].sum() < bytes_min:
            return None
        return layer_request(order, batch)

    def _not_one_request(self, order: Order, batch: Sequence[int], links: dict[Node, list[Link]]) -> str:
        """Return why storage cannot be asked for layers in one request; empty where it can."""
        if self._servers.not_by_layers:
            return self._servers.not_by_layers
        if (order.pieces["origin"][list(batch)] != Origin.SERVER).any():  # the server would send those, too
            return "near_chunks"
        [used] = links.values()
        return "" if used[0].takes_layers else "no_layer_requests"

    def _take_note(
        self, batch_: native.Batch, seconds: float, links: Sequence[Link], request: LayerRequest | None
    ) -> None:
        """Learn from a batch how fast the link is, and whether one request was understood."""
        if self._threshold is not None:
            self._threshold.note(batch_.received_bytes, seconds)
        if request is None:
            return
        if (refusal := batch_.refusal) is None:
            self._metrics.layer_batches += 1
        elif not refusal.startswith(("OOM", "TIMEOUT")):  # these are about the size of this one
            [link] = links
            _logger.info("storage %s does not answer KV.LAYERS (%s): it is asked for ranges", link.node, refusal)
            link.takes_layers = False

    def _fetch(self, batch_: native.Batch, links: Sequence[Link], nodes: int) -> Result:
        sessions = [link.session for link in links]
        encrypted = any(session is not None for session in sessions)
        return self._pipeline.fetch(
            batch_, [link.fileno() for link in links], sessions=sessions if encrypted else (), nodes=nodes
        )
