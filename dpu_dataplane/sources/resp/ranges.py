"""An order's bytes, from the node that has each chunk: one round, or with a cluster as many as its nodes make of it.

A node that cannot be reached, and one that fails, cost the order its chunks from the first of theirs on; what comes
before is delivered. Chunks that a node says another one has are fetched again from there, a bounded number of times;
those that lie between them are not fetched twice.
"""

import asyncio
import functools
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from dpu_dataplane.jobs import Job, Stop
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.resp.links import DataLinks, Link, Node
from dpu_dataplane.sources.resp.servers import REDIRECTIONS_MAX, Servers
from dpu_dataplane.sources.source import Delivered, Order
from shadowserve import native
from shadowserve.errors import StorageError, StorageUnavailableError
from shadowserve.native import Result

__all__ = ["NODES_MAX", "Ranges"]

NODES_MAX: Final = 256
"""Of a cluster, in one round: the C core's limit. What more nodes have is fetched in the next one."""
_PASSING: Final = ("CLUSTERDOWN", "LOADING", "MASTERDOWN", "TRYAGAIN")
"""Errors of a cluster's node that may be over when it is asked again, or another one is."""


@dataclass
class _Course:
    """An order under way: who has each chunk, and how often that has changed."""

    order: Order
    nodes: list[Node | None]
    done: Delivered
    asking: list[bool] = field(default_factory=list)
    redirections: list[int] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    errors: dict[int, StorageError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.asking = [False] * len(self.nodes)
        self.redirections = [0] * len(self.nodes)


class Ranges:
    """Fetches orders, one at a time."""

    def __init__(
        self, pipeline: native.Pipeline, executor: Executor, servers: Servers, links: DataLinks, metrics: Metrics
    ) -> None:
        self._pipeline = pipeline
        self._executor = executor
        self._servers = servers
        self._links = links
        self._metrics = metrics

    async def run(self, job: Job, order: Order) -> Delivered:
        """Deliver an order, as :meth:`Source.deliver` wants it."""
        count = len(order.chunks)
        self._servers.check()
        self._links.keep(self._servers.nodes())
        nodes = self._servers.route(order.keys, master=order.authoritative)
        course = _Course(order, nodes, Delivered([Result.SKIPPED] * count))
        todo = list(range(count))
        done = course.done
        while todo and done.stop is None:
            try:
                todo = await self._step(job, course, todo)
            except Stop as stop:
                if done.result is Result.SKIPPED and done.count == 0:
                    raise
                done.stop = stop
        if done.count < count:
            self._explain(course)
        return done

    def _explain(self, course: _Course) -> None:
        """Say of the first chunk that was not delivered who was asked, what it said, and what may help."""
        done = course.done
        result, node, text = done.result, course.nodes[done.count], course.texts.get(done.count, "")
        done.error = course.errors.get(done.count)
        if text:
            done.said = f"{node}: {text}"
        elif self._servers.clustered and result in (Result.DISCONNECTED, Result.PROTOCOL):
            done.said = str(node)
        done.copy = result is Result.NOT_FOUND and node is not None and node.replica
        refused = self._servers.clustered and result is Result.REFUSED and text.startswith(_PASSING)
        if result is Result.DISCONNECTED or refused:
            done.recover = functools.partial(self._servers.recover, node)

    async def _step(self, job: Job, course: _Course, todo: list[int]) -> list[int]:
        """Run one round over as many of ``todo`` as can be had; return what is left of it."""
        links, batch = await self._reach(job, course, todo)
        if not batch:
            return []
        results = await self._round(job, course, batch, links)
        for index, result in zip(batch, results, strict=True):
            course.done.results[index] = result
        failed = next((i for i, r in zip(batch, results, strict=True) if r not in (Result.OK, Result.REDIRECTED)), None)
        again = [
            index
            for index, result in zip(batch, results, strict=True)
            if result is Result.REDIRECTED and (failed is None or index < failed)
        ]
        for index in again:
            if not self._redirect(course, index):
                again = again[: again.index(index)]
                failed = index
                break
        if failed is not None:
            return again
        rest = todo[len(batch) :]
        return sorted(again + (rest if not self._ends(course, rest) else []))

    def _ends(self, course: _Course, rest: list[int]) -> bool:
        """Return whether the first chunk that is left is known not to be had."""
        return bool(rest) and rest[0] in course.errors

    def _redirect(self, course: _Course, index: int) -> bool:
        """Send a chunk where a node's answer says it is; return False where it does not say, or says so too often."""
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
    ) -> tuple[dict[Node, list[Link]], Sequence[int]]:
        """Return links to the nodes of the leading chunks of ``todo``, and these chunks."""
        wanted: dict[Node, None] = {}
        end = len(todo)
        for position, index in enumerate(todo):
            node = course.nodes[index]
            if node is None:
                course.errors.setdefault(
                    index, StorageUnavailableError(f"storage {self._servers.name}: no node has the slot of this key")
                )
                self._mark(course, index)
                end = position
                break
            if node not in wanted and len(wanted) == NODES_MAX:
                end = position
                break
            wanted[node] = None
        opened = await job.within(self._links.open_all(list(wanted)), "connecting to storage")
        links: dict[Node, list[Link]] = {}
        for node, link in zip(wanted, opened, strict=True):
            if isinstance(link, list):
                links[node] = link
            elif not self._servers.clustered:
                raise link
            else:
                first = next(position for position, index in enumerate(todo) if course.nodes[index] == node)
                if first < end:
                    end = first
                course.errors[todo[first]] = link
                self._mark(course, todo[first])
        batch = todo[:end]
        used = {course.nodes[index] for index in batch}
        return {node: link for node, link in links.items() if node in used}, batch

    def _mark(self, course: _Course, index: int) -> None:
        course.done.results[index] = Result.DISCONNECTED

    async def _round(
        self, job: Job, course: _Course, batch: Sequence[int], links: dict[Node, list[Link]]
    ) -> list[Result]:
        all_chunks = course.order.chunks
        chunks: npt.NDArray[np.void] = all_chunks[list(batch)] if len(batch) < len(all_chunks) else all_chunks
        numbers = {node: number for number, node in enumerate(links)}
        chunks["node"] = [numbers[node] for node in (course.nodes[index] for index in batch) if node is not None]
        chunks["asking"] = [course.asking[index] for index in batch]
        round_ = course.order.make_round(chunks)
        try:
            with job.interruptible(round_.cancel):
                await asyncio.get_running_loop().run_in_executor(
                    self._executor, self._fetch, round_, [link for each in links.values() for link in each], len(links)
                )
        finally:
            round_.release()
            if not round_.sockets_in_sync and not self._servers.clustered:
                self._links.close()  # in a cluster those that are out of step, which are disconnected, are found so
        for index, text in zip(batch, chunks["error"], strict=True):
            if text:
                course.texts[index] = bytes(text).decode("utf-8", "replace")
        self._metrics.rounds += 1
        course.done.received_bytes += round_.received_bytes
        return round_.results

    def _fetch(self, round_: native.Round, links: Sequence[Link], nodes: int) -> Result:
        sessions = [link.session for link in links]
        encrypted = any(session is not None for session in sessions)
        return self._pipeline.fetch(
            round_, [link.fileno() for link in links], sessions=sessions if encrypted else (), nodes=nodes
        )
