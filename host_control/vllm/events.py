"""KV events: what the workers have stored, for vLLM's publisher (docs/guides/routers.md).

The scheduler side knows tokens and keys when it makes a store, and learns later which records the workers have stored.
vLLM collects events after each step.
"""

import array
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, Self

from vllm.distributed.kv_events import MEDIUM_STORAGE, AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from host_control.vllm.metadata import StoreOperation
from host_control.vllm.metrics import Counts
from shadowserve.keys import block_hash, record_keys

EVENTS_MAX: Final = 65_536
"""Events that wait for vLLM, which takes them after each step."""
_STORING_MAX: Final = 8_192
"""Records on their way to storage: 1 KB of tokens each. Those of a worker's store queue are far fewer."""
_PUBLISHED_MAX: Final = 262_144
_LINGER_S: Final = 1.0
"""For so long after its last store an idle engine goes on stepping, so that the workers can report. It costs a little
CPU time; later reports come with the next step."""
_OWNER: Final = "shadowserve"
_REMOTE: Final = "REMOTE"


def publishes(vllm_config: Any) -> bool:
    """Return whether the user has enabled vLLM's KV events."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


class EventQueue:
    """Events that wait for vLLM; beyond :data:`EVENTS_MAX` the oldest are dropped. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[Any] = deque(maxlen=EVENTS_MAX)
        self._dropped = 0

    def add(self, event: Any) -> None:
        with self._lock:
            self._dropped += len(self._events) == EVENTS_MAX
            self._events.append(event)

    def take(self) -> tuple[list[Any], int]:
        """Return the events, and how many were dropped before them."""
        if not self._events:
            return [], 0
        with self._lock:
            events, dropped = list(self._events), self._dropped
            self._events.clear()
            self._dropped = 0
        return events, dropped


class _Chunk(NamedTuple):
    """A record that a worker is storing, and the event that tells of it."""

    key: tuple[int, bytes]  # number of the group and chunk key
    parent: int | None
    tokens: "array.array[int]"
    lora: tuple[int | None, str | None]
    extra_keys: Any


class _Published(NamedTuple):
    """Records of a chunk that a router counts as stored, and the time of the last event about them."""

    since_s: float
    hashes: list[int]


class StoreEvents:
    """The events of one engine, on the engine's thread.

    A record that this engine has stored, and that a later lookup does not find, is removed.
    """

    def __init__(self, kv_cache_config: Any, chunk_tokens: int) -> None:
        self._specs = [
            (get_kv_cache_spec_kind(group.kv_cache_spec).value, get_kv_cache_spec_sliding_window(group.kv_cache_spec))
            for group in kv_cache_config.kv_cache_groups
        ]
        self._chunk_tokens = chunk_tokens
        self._counts = Counts()
        self._namespaces: dict[int, list[bytes]] = {}
        self._queue = EventQueue()
        self._storing: OrderedDict[int, _Chunk] = OrderedDict()  # by block hash
        self._published: OrderedDict[tuple[int, bytes], _Published] = OrderedDict()  # by group and chunk key
        self._epoch = ""
        self._until_s = 0.0

    def begin(self, namespaces: dict[int, list[bytes]], counts: Counts) -> Self:
        """Start, with the namespaces of the ranks' records of each group, by the group's index."""
        self._namespaces, self._counts = namespaces, counts
        return self

    def storing(self, request: Any, chunk_keys: Sequence[bytes], operations: Iterable[StoreOperation]) -> None:
        """Note stores of a request's chunks, which have ``chunk_keys``."""
        for operation in operations:
            self._note(request, chunk_keys, operation, chunk_keys.index(operation.chunk_keys[0]))
        while len(self._storing) > _STORING_MAX:
            self._storing.popitem(last=False)

    def _note(self, request: Any, chunk_keys: Sequence[bytes], operation: StoreOperation, first: int) -> None:
        end = first + len(operation.chunk_keys)
        named = chunk_keys[max(first - 1, 0) : end]
        size, lora = self._chunk_tokens, request.lora_request
        now_s = time.monotonic()
        asked_s = None if operation.absent_seconds is None else now_s - operation.absent_seconds
        self._until_s = now_s + _LINGER_S
        for namespace in self._namespaces.get(operation.group, ()):
            hashes: list[int | None] = [block_hash(key) for key in record_keys(namespace, named)]
            if not first:
                hashes.insert(0, None)
            for number in range(first, end):
                key = (operation.group, chunk_keys[number])
                known = self._published.get(key)
                if known is not None and (asked_s is None or known.since_s >= asked_s):
                    continue  # stored after the lookup, or nothing was looked up: the workers skip it
                begin = number * size
                extra, _ = generate_block_hash_extra_keys(request, begin, begin + size, 0)
                parent, own = hashes[number - first : number - first + 2]
                assert own is not None
                self._storing[own] = _Chunk(
                    key,
                    parent,
                    array.array("I", request.all_token_ids[begin : begin + size]),
                    (None, None) if lora is None else (lora.lora_int_id, lora.lora_name),
                    to_event_extra_keys([extra]) if extra else None,
                )
                if known is not None:  # stored before, and absent now
                    del self._published[key]
                    self._remove(operation.group, known.hashes)

    def _remove(self, group: int, hashes: list[int]) -> None:
        self._queue.add(
            BlockRemoved(
                block_hashes=hashes, medium=MEDIUM_STORAGE, group_idx=group, locality=_REMOTE, ownership=_OWNER
            )
        )

    def stored(self, hashes: Iterable[int]) -> None:
        """Make the events of records that workers have stored."""
        for each in hashes:
            if (chunk := self._storing.pop(each, None)) is None:
                continue  # another rank has stored it too, or the weights have changed
            group, _ = chunk.key
            kind, sliding_window = self._specs[group]
            self._queue.add(
                BlockStored(
                    block_hashes=[each],
                    parent_block_hash=chunk.parent,
                    token_ids=chunk.tokens.tolist(),
                    block_size=self._chunk_tokens,
                    lora_id=chunk.lora[0],
                    medium=MEDIUM_STORAGE,
                    lora_name=chunk.lora[1],
                    extra_keys=chunk.extra_keys,
                    group_idx=group,
                    kv_cache_spec_kind=kind,
                    kv_cache_spec_sliding_window=sliding_window,
                    locality=_REMOTE,
                    ownership=_OWNER,
                )
            )
            before = self._published.pop(chunk.key, None)
            self._published[chunk.key] = _Published(time.monotonic(), [*(before.hashes if before else ()), each])
        while len(self._published) > _PUBLISHED_MAX:
            self._published.popitem(last=False)

    def follow(self, epoch: str) -> None:
        """Clear everything when the engine's weights have changed: nothing stored before is loaded any more."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._storing.clear()
            self._published.clear()
            self._queue.add(AllBlocksCleared())

    @property
    def due(self) -> bool:
        """True while workers may report stores: vLLM asks them in steps only, so an idle engine goes on stepping."""
        return bool(self._storing) and time.monotonic() < self._until_s

    def take(self) -> list[Any]:
        """Return the events since the last call; after a loss, everything published before counts as gone."""
        events, dropped = self._queue.take()
        self._counts.add("events", len(events))
        self._counts.add("dropped_events", dropped)
        return [AllBlocksCleared(), *events] if dropped else events
