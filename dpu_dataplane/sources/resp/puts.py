"""Puts of records: one SET each, sent by the C core from the store buffer.

A broken connection is made again once, in a cluster after the map of nodes was updated. Redirections are followed a
bounded number of times.
"""

import asyncio
import functools
from concurrent.futures import Executor

from dpu_dataplane.jobs import Job
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.resp.links import DataLinks, Link, Node
from dpu_dataplane.sources.resp.routing import REDIRECTIONS_MAX, Router
from dpu_dataplane.sources.source import Encoded
from shadowserve import native
from shadowserve.errors import StorageUnavailableError
from shadowserve.native import Result


class RecordWriter:
    """Puts records, one at a time."""

    def __init__(
        self, pipeline: native.Pipeline, executor: Executor, router: Router, links: DataLinks, metrics: Metrics
    ) -> None:
        self._pipeline = pipeline
        self._executor = executor
        self._router = router
        self._links = links
        self._metrics = metrics
        self._last_node: Node | None = None

    async def put(self, job: Job, key: bytes, record: Encoded) -> tuple[Result, str]:
        """Put one record; see :meth:`Source.put`."""
        result, text = Result.CANCELLED, ""
        for last in (False, True):
            self._last_node = None
            try:
                result, text = await self._put_redirected(job, key, record)
            except StorageUnavailableError:
                if last or not self._router.clustered:
                    raise
                result = Result.DISCONNECTED
            if job.cancelled or result is not Result.DISCONNECTED or last:
                break
            await job.within(self._router.recover(self._last_node), "looking for a node of the cluster")
        return result, text

    async def _put_redirected(self, job: Job, key: bytes, record: Encoded) -> tuple[Result, str]:
        """Put one record on its node, and follow redirections."""
        [node] = self._router.route([key], master=True)
        asking = False
        for _ in range(REDIRECTIONS_MAX + 1):
            if node is None:
                raise StorageUnavailableError(f"storage {self._router.name}: no node has the slot of this key")
            self._last_node = node
            [link] = await job.within(self._links.open(node), "connecting to storage")
            if asking:
                await job.within(self._send_asking(link), "sending ASKING")
            result, text = await self._put_on(job, record, link)
            redirect = self._router.redirect(node, text) if result is Result.REFUSED else None
            if redirect is None:
                return result, text
            self._metrics.totals["storage_redirections"] += 1
            node, asking = redirect
        return Result.REFUSED, f"redirected {REDIRECTIONS_MAX} times, last with: {text}"

    async def _send_asking(self, link: Link) -> None:
        async with self._router.dialer.deadline("ASKING", str(link.node)):
            await link.exchange([[b"ASKING"]])

    async def _put_on(self, job: Job, record: Encoded, link: Link) -> tuple[Result, str]:
        result, text = Result.CANCELLED, ""
        try:
            with job.interruptible(link.shut_down):
                result, text = await asyncio.get_running_loop().run_in_executor(
                    self._executor,
                    functools.partial(
                        self._pipeline.put,
                        record.batch,
                        record.position,
                        record.header,
                        link.fileno(),
                        job.deadline_ns,
                        session=link.session,
                    ),
                )
        finally:
            if result not in (Result.OK, Result.REFUSED):
                self._links.close()
        return result, text
