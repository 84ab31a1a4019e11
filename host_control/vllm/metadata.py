"""What the connector's two roles tell each other: plain data, pickled by vLLM between its own processes."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from host_control.disaggregation import Available

__all__ = ["GroupLoad", "LoadOperation", "ShadowServeMetadata", "StoreOperation", "WorkerHandshake", "WorkerReport"]


@dataclass
class GroupLoad:
    """What a load takes of one group.

    Attributes:
        chunk_keys: of the chunks, in order, which name them for all ranks.
        blocks: that their records go to, chunk after chunk; NOWHERE for those that hold the right KV already and may be
            shared, and for what vLLM keeps no block for.
        chunks: their numbers, counted from the load's first.
    """

    chunk_keys: list[bytes]
    blocks: list[int]
    chunks: list[int]


@dataclass
class LoadOperation:
    """Load chunks of a request.

    Attributes:
        request_id: of the request.
        epoch: that the keys belong to.
        shard_layout: whose records they are (:class:`host_control.vllm.parts.Part`).
        groups: what of each, by its index; none where the load is one that cannot be.
        layerwise: layer by layer, in the step that computes on it.
        in_step: all of it before the step that computes on it begins.
        available: how many of its chunks are there, where others still store the rest.
    """

    request_id: str
    epoch: str
    shard_layout: int
    groups: dict[int, GroupLoad]
    layerwise: bool = False
    in_step: bool = False
    available: Available | None = None


@dataclass
class StoreOperation:
    """Store consecutive chunks of a request and group, whose KV is complete after this step.

    Attributes:
        request_id: of the request.
        group: index of the group.
        chunk_keys: of the chunks, which name them for all ranks.
        previous: chunk key of the chunk before the first; ``None`` at the start of a prompt.
        anchored: whether that chunk is known to be stored.
        blocks: of the chunks' records, chunk after chunk; NOWHERE for what a tail's record has nothing in.
        published: others may wait for them.
        absent_seconds: so long ago the chunks were found absent; ``None`` where they were not looked up.
        lasts_s: seconds after which nobody needs them any more; 0: for good.
        tail_tokens: of a tail's record that has all blocks of its chunk, its tokens, which may end within one; else 0.
        exact: in the records that preempted requests are saved in.
    """

    request_id: str
    group: int
    chunk_keys: list[bytes]
    previous: bytes | None
    anchored: bool
    blocks: list[int]
    published: bool = False
    absent_seconds: float | None = None
    lasts_s: float = 0.0
    tail_tokens: int = 0
    exact: bool = False


@dataclass
class ShadowServeMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers, each step.

    Attributes:
        epoch: of the weights, as far as the scheduler knows; another one after each change.
        loads: to start.
        cancels: requests whose load should end early.
        available: of requests that load what others still store, how many of its chunks are there by now.
        stores: to gather once this step's KV is written.
        window_s: seconds that the step is expected to compute with each layer; 0 where that is not known, or without
            loads.
        saves: request -> to gather before this step writes any KV, of requests that it preempts.
        idle: nothing is computed, and every request of the engine waits for its load.
        doubts: how often the weights may have been changed so far (:class:`host_control.vllm.epochs.Epochs`).
        agreed: of these, the last after which all ranks have found the epoch's weights.
    """

    epoch: str = ""
    loads: list[LoadOperation] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    available: dict[str, Available] = field(default_factory=dict)
    stores: list[StoreOperation] = field(default_factory=list)
    window_s: float = 0.0
    saves: dict[str, list[StoreOperation]] = field(default_factory=dict)
    idle: bool = False
    doubts: int = 0
    agreed: int = 0


@dataclass
class WorkerHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Worker to scheduler, once, after the KV caches exist.

    Attributes:
        model: digest of the ``ModelIdentity``, that chunk keys begin with; empty where transfers are off.
        namespaces: of the records that this rank makes or can read, of each part cut, group and digest; likewise.
        problem: why they are off; empty where they are on.
        layerwise_chunks: that one load in the order of layers may have; 0 where there are none such.
        layers: of this rank.
        machine: what this rank computes on, for people.
        plain: whether its records are pages as they are, which stay in its data plane's tiers.
        chunk_bytes: that this rank is delivered for a chunk, of all groups together.
    """

    model: bytes
    namespaces: tuple[tuple[int, int, bytes], ...]
    problem: str
    layerwise_chunks: int = 0
    layers: int = 0
    machine: str = ""
    plain: bool = False
    chunk_bytes: int = 0


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler, with the outputs of a step.

    Attributes:
        loaded: request -> leading chunks in place, of loads that have ended early or were synchronous; the fewest of
            any rank.
        seconds: request -> from its turn to its outcome, of loads that have ended with all chunks or with their time;
            the longest of any rank.
        outlived: epochs whose weights are not those of the engine any more, as some rank has seen.
        layer_seconds: that the step has computed with each layer, of one that waited for them; the longest of any rank.
        saved: request -> ranks of which each has stored or dropped by now all that it was to save of it.
        settled: doubt about the weights -> ranks that have found their epoch's after it.
    """

    loaded: dict[str, int] = field(default_factory=dict)
    outlived: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)
    layer_seconds: float = 0.0
    saved: dict[str, int] = field(default_factory=dict)
    settled: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """Merge the report of another rank."""
        assert isinstance(other, WorkerReport)
        merged = dict(self.loaded)
        for request_id, chunks in other.loaded.items():
            merged[request_id] = min(chunks, merged.get(request_id, chunks))
        longest = dict(self.seconds)
        for request_id, seconds in other.seconds.items():
            longest[request_id] = max(seconds, longest.get(request_id, seconds))
        return WorkerReport(
            merged,
            self.outlived | other.outlived,
            longest,
            max(self.layer_seconds, other.layer_seconds),
            {name: self.saved.get(name, 0) + other.saved.get(name, 0) for name in self.saved | other.saved},
            {doubt: self.settled.get(doubt, 0) + other.settled.get(doubt, 0) for doubt in self.settled | other.settled},
        )
