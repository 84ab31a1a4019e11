"""A plan's bytes, from the node that has each chunk: one round, or with a cluster as many as its nodes make of it.

A node that cannot be reached, and one that fails, cost the plan its chunks from the first of theirs on; what comes
before is delivered. Chunks that a node says another one has are fetched again from there, a bounded number of times;
those that lie between them are not fetched twice.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from dpu_dataplane.destinations import Destination
from dpu_dataplane.jobs import Job, Stop
from dpu_dataplane.links import DataLinks, Link, Node
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.rounds import FetchPlan
from dpu_dataplane.storage import REDIRECTIONS_MAX, Storage
from shadowserve import native
from shadowserve.errors import StorageError, StorageUnavailableError
from shadowserve.native import Result

__all__ = ["NODES_MAX", "Transfer", "Transferred"]

NODES_MAX: Final = 256
"""Of a cluster, in one round: the C core's limit. What more nodes have is fetched in the next one."""


@dataclass
class Transferred:
    """What became of a plan.

    Attributes:
        results: of each chunk.
        received_bytes: over the wire.
        error: why the node of the first chunk that was not delivered could not be reached, if that is why.
        node: that was asked for it.
        text: what it answered.
        stop: the job ended between two rounds.
    """

    results: list[Result]
    received_bytes: int = 0
    error: StorageError | None = None
    node: Node | None = None
    text: str = ""
    stop: Stop | None = None

    @property
    def count(self) -> int:
        """Leading chunks that were delivered."""
        return next((index for index, each in enumerate(self.results) if each is not Result.OK), len(self.results))

    @property
    def result(self) -> Result:
        """Of the first chunk that was not delivered; OK where there is none."""
        return self.results[self.count] if self.count < len(self.results) else Result.OK


@dataclass
class _Course:
    """A plan under way: who has each chunk, and how often that has changed."""

    plan: FetchPlan
    nodes: list[Node | None]
    done: Transferred
    asking: list[bool] = field(default_factory=list)
    redirections: list[int] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    errors: dict[int, StorageError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.asking = [False] * len(self.nodes)
        self.redirections = [0] * len(self.nodes)


class Transfer:
    """Runs plans, one at a time."""

    def __init__(
        self, pipeline: native.Pipeline, executor: Executor, storage: Storage, links: DataLinks, metrics: Metrics
    ) -> None:
        self._pipeline = pipeline
        self._executor = executor
        self._storage = storage
        self._links = links
        self._metrics = metrics

    async def run(
        self, job: Job, destination: Destination, offset: int, plan: FetchPlan, keys: Sequence[bytes], *, master: bool
    ) -> Transferred:
        """Deliver a plan's chunks from ``offset`` of a destination; returns once nothing touches it any more.

        Args:
            job: that this is for.
            destination: to deliver to.
            offset: of the first chunk.
            plan: at least one chunk.
            keys: of its chunks, and perhaps more.
            master: leave a cluster's replicas alone.

        Raises:
            StorageUnavailableError, StorageRefusedError: the storage server, which is no cluster, cannot be reached.
            Stop: cancelled, or out of time, before a round began.
        """
        count = len(plan.chunks)
        self._storage.check()
        self._links.keep(self._storage.nodes())
        nodes = self._storage.route(keys[:count], master=master)
        course = _Course(plan, nodes, Transferred([Result.SKIPPED] * count))
        todo = list(range(count))
        done = course.done
        while todo and done.stop is None:
            try:
                todo = await self._step(job, destination, offset, course, todo)
            except Stop as stop:
                if done.result is Result.SKIPPED and done.count == 0:
                    raise
                done.stop = stop
        if done.count < count:
            done.node = course.nodes[done.count]
            done.text = course.texts.get(done.count, "")
            done.error = course.errors.get(done.count)
        return done

    async def _step(
        self, job: Job, destination: Destination, offset: int, course: _Course, todo: list[int]
    ) -> list[int]:
        """Run one round over as many of ``todo`` as can be had; return what is left of it."""
        links, batch = await self._reach(job, course, todo)
        if not batch:
            return []
        results = await self._round(job, destination, offset, course, batch, links)
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
        redirect = self._storage.redirect(asked, course.texts[index])
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
                    index, StorageUnavailableError(f"storage {self._storage.name}: no node has the slot of this key")
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
            elif not self._storage.clustered:
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
        self,
        job: Job,
        destination: Destination,
        offset: int,
        course: _Course,
        batch: Sequence[int],
        links: dict[Node, list[Link]],
    ) -> list[Result]:
        layout, plan = destination.layout, course.plan
        chunks: npt.NDArray[np.void] = plan.chunks[list(batch)] if len(batch) < len(plan.chunks) else plan.chunks
        numbers = {node: number for number, node in enumerate(links)}
        chunks["node"] = [numbers[node] for node in (course.nodes[index] for index in batch) if node is not None]
        chunks["asking"] = [course.asking[index] for index in batch]
        round_ = native.Round(
            chunks=chunks,
            slices=plan.slices,
            quantizer=layout.quantizer,
            dtype=layout.dtype,
            vector_length=layout.vector_length,
            scale_vectors=layout.scale_tokens,
            destination=destination.region(offset, len(plan.chunks) * layout.raw_bytes),
            deadline_ns=job.deadline_ns,
        )
        try:
            with job.interruptible(round_.cancel):
                await asyncio.get_running_loop().run_in_executor(
                    self._executor, self._fetch, round_, [link for each in links.values() for link in each], len(links)
                )
        finally:
            round_.release()
            if not round_.sockets_in_sync and not self._storage.clustered:
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
