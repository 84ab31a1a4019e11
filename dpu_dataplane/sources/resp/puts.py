"""Records to the server that takes each: one SET, sent by the C core from where the record was encoded.

A connection that broke is made again once, in a cluster after a look at who has what now; and where a node says that
another one takes the key, the record goes there, a bounded number of times.
"""

import asyncio
import functools
from concurrent.futures import Executor

from dpu_dataplane.jobs import Job
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.resp.links import DataLinks, Link, Node
from dpu_dataplane.sources.resp.servers import REDIRECTIONS_MAX, Servers
from dpu_dataplane.sources.source import Encoded
from shadowserve import native
from shadowserve.errors import StorageUnavailableError
from shadowserve.native import Result

__all__ = ["Puts"]


class Puts:
    """Puts records, one at a time."""

    def __init__(
        self, pipeline: native.Pipeline, executor: Executor, servers: Servers, links: DataLinks, metrics: Metrics
    ) -> None:
        self._pipeline = pipeline
        self._executor = executor
        self._servers = servers
        self._links = links
        self._metrics = metrics
        self._asked: Node | None = None  # last, for the record in hand

    async def run(self, job: Job, key: bytes, record: Encoded) -> tuple[Result, str]:
        """Put one record, as :meth:`Source.put` wants it."""
        result, text = Result.CANCELLED, ""
        for last in (False, True):
            self._asked = None
            try:
                result, text = await self._put_where_it_belongs(job, key, record)
            except StorageUnavailableError:
                if last or not self._servers.clustered:
                    raise
                result = Result.DISCONNECTED
            if job.cancelled or result is not Result.DISCONNECTED or last:
                break
            await job.within(self._servers.recover(self._asked), "looking for a node of the cluster")
        return result, text

    async def _put_where_it_belongs(self, job: Job, key: bytes, record: Encoded) -> tuple[Result, str]:
        """Put one record on the node that takes it, going where a cluster's nodes send us."""
        [node] = self._servers.route([key], master=True)
        asking = False
        for _ in range(REDIRECTIONS_MAX + 1):
            if node is None:
                raise StorageUnavailableError(f"storage {self._servers.name}: no node has the slot of this key")
            self._asked = node
            [link] = await job.within(self._links.open(node), "connecting to storage")
            if asking:
                await job.within(self._say_asking(link), "asking a node of the cluster")
            result, text = await self._put_on(job, record, link)
            redirect = self._servers.redirect(node, text) if result is Result.REFUSED else None
            if redirect is None:
                return result, text
            self._metrics.storage_redirections += 1
            node, asking = redirect
        return Result.REFUSED, f"redirected {REDIRECTIONS_MAX} times, last with: {text}"

    async def _say_asking(self, link: Link) -> None:
        async with self._servers.dialer.deadline("ASKING", str(link.node)):
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
                        record.head,
                        link.fileno(),
                        job.deadline_ns,
                        session=link.session,
                    ),
                )
        finally:
            if result not in (Result.OK, Result.REFUSED):
                self._links.close()
        return result, text
