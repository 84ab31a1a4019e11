"""Messages between the connector's scheduler side and worker side: plain data that vLLM pickles between processes."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from host_control.disaggregation import Available
from host_control.interference.table import LayerWait


@dataclass
class GroupLoad:
    """Chunks that a load takes of one KV cache group.

    Attributes:
        blocks: Blocks of the chunks' records, chunk after chunk; NOWHERE for blocks that hold valid KV already and may
            be shared, and for blocks that vLLM does not keep.
        chunks: Numbers of the chunks, counted from the load's first.
    """

    chunk_keys: list[bytes]
    blocks: list[int]
    chunks: list[int]


@dataclass
class LoadOperation:
    """A load of a request.

    Attributes:
        shard_layout: Shard layout of the records (:class:`host_control.vllm.shards.Shard`).
        groups: Chunks and blocks of each group, by the group's index; empty where the load is impossible.
        layerwise: Layer by layer, in the step that computes on it.
        in_step: All of it before the step that computes on it begins.
        available: Chunks that can be fetched by now, where other engines still store the rest; None: all.
        context: Context of the request's span; empty for none.
    """

    request_id: str
    epoch: str
    shard_layout: int
    groups: dict[int, GroupLoad]
    layerwise: bool = False
    in_step: bool = False
    available: Available | None = None
    context: str = ""


@dataclass
class StoreOperation:
    """A store of consecutive chunks of a request and group, whose KV is complete after this step.

    Attributes:
        previous: Key of the chunk before the first; None at the start of a prompt.
        anchored: True if that chunk is known to be stored.
        blocks: Blocks of the chunks' records, chunk after chunk; NOWHERE where a tail's record is empty.
        position: Position of the first chunk's first token in the prompt.
        published: Other engines may wait for them.
        absent_seconds: Time since a lookup found them absent; None where they were not looked up.
        lasts_s: Seconds after which they are of no use; 0: for good.
        tail_tokens: Tokens of a tail whose record has all blocks of a chunk; they may end within a block. Else 0.
        exact: Store them in the records of preempted requests.
        own: No other request can use them: they may stay in the data plane's local tiers.
    """

    request_id: str
    group: int
    chunk_keys: list[bytes]
    previous: bytes | None
    anchored: bool
    blocks: list[int]
    position: int
    published: bool = False
    absent_seconds: float | None = None
    lasts_s: float = 0.0
    tail_tokens: int = 0
    exact: bool = False
    own: bool = False


@dataclass
class ShadowServeMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler side to workers, each step.

    Attributes:
        epoch: Epoch of the weights, as far as the scheduler side knows; a new one after each change.
        cancels: Requests whose load should end early.
        available: Chunks that are available by now, of loads that wait for more.
        stores: Stores to gather once this step's KV is written.
        window_s: Seconds that the step is expected to compute with each layer; 0 if unknown, or without loads.
        saves: Stores to gather before this step writes any KV, of requests that it preempts.
        idle: The step computes nothing, and every request of the engine waits for its load.
        doubts: How often the weights may have been changed so far (:class:`host_control.vllm.epochs.Epochs`).
        agreed: The last of these after which all ranks have found the epoch's weights.
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
    """Worker to scheduler side, once, after the KV caches exist.

    Attributes:
        model: Digest of the ``ModelIdentity``, with which chunk keys begin; empty where transfers are off.
        namespaces: Shard layout, group and namespace of the records that this rank makes or can read.
        problem: Why transfers are off, or empty.
        layers: Layers that this rank can load one by one.
        plain: Its records are pages as they are, which stay in its data plane's tiers.
        chunk_bytes: Bytes that this rank is delivered for a chunk, of all groups together.
    """

    model: bytes
    namespaces: tuple[tuple[int, int, bytes], ...]
    problem: str
    layers: int = 0
    machine: str = ""
    plain: bool = False
    chunk_bytes: int = 0


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler side, with the outputs of a step.

    Attributes:
        loaded: Leading chunks in place, of loads that fell short or that a step waited for; the fewest of any rank.
        outlived: Epochs whose weights are not the engine's any more, as some rank has found.
        seconds: Time from start to outcome, of loads that ended complete or out of time; the longest of any rank.
        layer_seconds: Time that the step computed with each layer, if it waited for layers; the longest of any rank.
        saved: Number of ranks that have stored or dropped all of a request's save.
        settled: Number of ranks that have found their epoch's weights after a doubt, by doubt.
        reasons: Why loads fell short, as some rank tells.
        layer_waits: How the step waited for each layer, by request; of the rank that waited longest.
        stored: Block hashes of stored records, where KV events are enabled.
    """

    loaded: dict[str, int] = field(default_factory=dict)
    outlived: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)
    layer_seconds: float = 0.0
    saved: dict[str, int] = field(default_factory=dict)
    settled: dict[int, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    layer_waits: dict[str, list[LayerWait]] = field(default_factory=dict)
    stored: list[int] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            _merged(min, self.loaded, other.loaded),
            self.outlived | other.outlived,
            _merged(max, self.seconds, other.seconds),
            max(self.layer_seconds, other.layer_seconds),
            _merged(operator.add, self.saved, other.saved),
            _merged(operator.add, self.settled, other.settled),
            other.reasons | self.reasons,
            _merged(_longer, self.layer_waits, other.layer_waits),
            self.stored + other.stored,
        )


def _longer(one: list[LayerWait], other: list[LayerWait]) -> list[LayerWait]:
    return max(one, other, key=lambda waits: sum(wait.seconds for wait in waits))


def _merged(how: Callable[[Any, Any], Any], one: dict[Any, Any], other: dict[Any, Any]) -> dict[Any, Any]:
    return one | {key: how(one[key], value) if key in one else value for key, value in other.items()}
