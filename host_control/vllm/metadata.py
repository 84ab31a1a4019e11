"""What the connector's two roles tell each other: plain data, pickled by vLLM between its own processes."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

__all__ = ["LoadOperation", "ShadowServeMetadata", "StoreOperation", "WorkerHandshake", "WorkerReport"]


@dataclass
class LoadOperation:
    """Load consecutive chunks of a request.

    Attributes:
        request_id: of the request.
        epoch: that the keys belong to.
        links: of the chunks, which name them for all ranks.
        blocks: the request's blocks from the first chunk's first on, as many as the chunks cover.
        skip_blocks: leading ones that hold the right KV already and may be shared: never written.
    """

    request_id: str
    epoch: str
    links: list[bytes]
    blocks: list[int]
    skip_blocks: int


@dataclass
class StoreOperation:
    """Store consecutive chunks of a request, whose KV is complete after this step.

    Attributes:
        request_id: of the request.
        links: of the chunks, which name them for all ranks.
        previous: link of the chunk before the first; ``None`` at the start of a prompt.
        anchored: whether that chunk is known to be stored.
        blocks: of the chunks.
        absent_seconds: so long ago the chunks were found absent; ``None`` where they were not looked up.
    """

    request_id: str
    links: list[bytes]
    previous: bytes | None
    anchored: bool
    blocks: list[int]
    absent_seconds: float | None = None


@dataclass
class ShadowServeMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers, each step.

    Attributes:
        epoch: of the weights, as far as the scheduler knows; another one after each change.
        loads: to start.
        cancels: requests whose load should end early.
        stores: to gather once this step's KV is written.
    """

    epoch: str = ""
    loads: list[LoadOperation] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    stores: list[StoreOperation] = field(default_factory=list)


@dataclass
class WorkerHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Worker to scheduler, once, after the KV caches exist.

    Attributes:
        model: digest of the ``ModelIdentity``, that links begin with; empty where transfers are off.
        namespace: of the chunks that this rank holds; likewise.
        problem: why they are off; empty where they are on.
    """

    model: bytes
    namespace: bytes
    problem: str


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler, with the outputs of a step.

    Attributes:
        loaded: request -> leading chunks in place, of loads that have ended early or were synchronous; the fewest of
            any rank.
        outlived: epochs whose weights are not those of the engine any more, as some rank has seen.
    """

    loaded: dict[str, int] = field(default_factory=dict)
    outlived: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """Merge the report of another rank."""
        assert isinstance(other, WorkerReport)
        merged = dict(self.loaded)
        for request_id, chunks in other.loaded.items():
            merged[request_id] = min(chunks, merged.get(request_id, chunks))
        return WorkerReport(merged, self.outlived | other.outlived)
