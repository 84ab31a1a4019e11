"""Scripted requests and steps for the connector's scheduler half."""

import math
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from machine import wait_for
from scripted import ScriptedDataPlane

from host_control.config import HostConfig
from host_control.lookup import SAVED
from host_control.vllm.groups import Groups
from shadowserve.keys import Extra, prefix_chain, record_keys, tail_chunk_key

BLOCK, CHUNK = 16, 64
MODEL = b"m" * 32
NAMESPACES = {rank: bytes([rank]) * 32 for rank in (0, 1)}


def namespace_of(rank: int, group: int) -> bytes:
    """Return the namespace of a rank's records of a group."""
    return bytes([rank]) * 31 + bytes([rank + group])


def groups_of(*specs: Any, drafts: bool = False, chunk_tokens: int = CHUNK) -> Any:
    """Return the groups of an engine; the default is one group of full attention."""
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    register_all_kvcache_specs(None)
    described = [KVCacheGroupSpec([f"layer {index}"], spec) for index, spec in enumerate(specs or (full(),))]
    return Groups(
        SimpleNamespace(speculative_config=SimpleNamespace(use_eagle_block_drop=lambda: True) if drafts else None),
        SimpleNamespace(kv_cache_groups=described),
        HostConfig(chunk_tokens=chunk_tokens),
    )


def attention(kind: str, **options: Any) -> Any:
    """Return vLLM's specification of the cache of an attention layer."""
    from vllm.v1 import kv_cache_interface

    given = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
    return getattr(kv_cache_interface, kind)(**{**given, **options})


def full(**options: Any) -> Any:
    return attention("FullAttentionSpec", **options)


def window(tokens: int, **options: Any) -> Any:
    return attention("SlidingWindowSpec", sliding_window=tokens, **options)


def local(tokens: int, **options: Any) -> Any:
    return attention("ChunkedLocalAttentionSpec", attention_chunk_size=tokens, **options)


def state(**options: Any) -> Any:
    from vllm.v1.kv_cache_interface import MambaSpec

    given = {"block_size": BLOCK, "shapes": ((4, 4),), "dtypes": (torch.float32,), "mamba_cache_mode": "align"}
    return MambaSpec(**{**given, **options})


def kv_cache_manager(*specs: Any, eagle: Sequence[int] = (), drafts: bool = False, hash_block: int = 0) -> Any:
    """Return vLLM's own block manager; ``eagle``: Groups of draft layers that are marked as such."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    register_all_kvcache_specs(None)
    sizes = [spec.block_size for spec in specs]
    described = [KVCacheGroupSpec([f"{index}"], spec, index in eagle) for index, spec in enumerate(specs)]
    return KVCacheManager(
        KVCacheConfig(2000, [], described),
        max_model_len=1 << 14,
        scheduler_block_size=math.lcm(*sizes),
        hash_block_size=hash_block or math.gcd(*sizes),
        use_eagle=drafts,
    )


def saved_namespace_of(rank: int, group: int) -> bytes:
    """Return the namespace of a rank's records of preempted requests; its other records are quantized."""
    return bytes([100 + rank]) * 31 + bytes([100 + rank + group])


def handshake(rank: int, groups: Any, *, quantized: bool = False) -> Any:
    """Return the worker's report of a rank that holds one part of each group."""
    from host_control.vllm.metadata import WorkerHandshake

    names = tuple((0, group.index, namespace_of(rank, group.index)) for group in groups.groups)
    if quantized:
        names += tuple((SAVED, group.index, saved_namespace_of(rank, group.index)) for group in groups.groups)
    return WorkerHandshake(MODEL, names, "")


class Request(SimpleNamespace):
    """The attributes of vLLM's request that the connector reads."""

    def __init__(self, request_id: str, tokens: list[int], **attributes: Any) -> None:
        given: dict[str, Any] = dict(
            request_id=request_id,
            prompt_token_ids=tokens,
            all_token_ids=list(tokens),
            prompt_embeds=None,
            kv_transfer_params=None,
            pooling_params=None,
            sampling_params=None,
            lora_request=None,
            mm_features=[],
            cache_salt=None,
            resumable=False,
            skip_reading_prefix_cache=False,
            num_preemptions=0,
            priority=0,
            num_computed_tokens=0,
            max_tokens=16,
            trace_headers=None,
            arrival_time=time.time(),
        )
        super().__init__(**{**given, **attributes})

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


_GROUPS_MAX = 4


def step(
    new: dict[str, tuple[int, int]] | None = None,
    cached: dict[str, tuple[int, int]] | None = None,
    tables: dict[str, Sequence[list[int]]] | None = None,
    states: dict[str, list[tuple[int, int, int]]] | None = None,
    preempted: Sequence[str] = (),
) -> Any:
    """Return a scheduler output: request -> (computed, scheduled) tokens.

    Block tables, one for each group, have by default the blocks 1000, 1001, ...; states are (group, block, tokens).
    A request's first step contains whole tables.
    """
    new, cached = new or {}, cached or {}
    scheduled_tokens = {name: scheduled for name, (_, scheduled) in {**new, **cached}.items()}

    def table(name: str) -> Any:
        return tuple((tables or {}).get(name, [list(range(1000, 1100)) for _ in range(_GROUPS_MAX)]))

    return SimpleNamespace(
        num_scheduled_tokens=scheduled_tokens,
        total_num_scheduled_tokens=sum(scheduled_tokens.values()),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed, block_ids=table(name))
            for name, (computed, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            num_computed_tokens=[computed for computed, _ in cached.values()],
            new_block_ids=[None] * len(cached),
            resumed_req_ids=set(),
        ),
        preempted_req_ids=set(preempted),
        new_block_ids_to_zero=None,
        kv_cache_block_copies=None,
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=table,
            boundary_state_offloads=states or {},
        ),
    )


def chunk_keys(tokens: list[int], extra: Extra | None = None) -> list[bytes]:
    return prefix_chain(MODEL, tokens, chunk_tokens=CHUNK, extra=extra)


def keys(rank: int, tokens: list[int], group: int = 0) -> list[bytes]:
    return record_keys(namespace_of(rank, group), chunk_keys(tokens))


def matched(side: Any, request: Request, local: int = 0) -> int:
    found: list[int | None] = []

    def answered() -> bool:
        found.append(side.matched_tokens(request, local))
        return found[-1] is not None

    wait_for(answered)
    return int(found[-1] or 0)


def arrive(side: Any, plane: ScriptedDataPlane, tokens: list[int], stored: int = 0, **attributes: Any) -> Request:
    request = Request(attributes.pop("name", "r"), tokens, **attributes)
    for rank in NAMESPACES:
        plane.records.update(dict.fromkeys(keys(rank, tokens)[:stored], b""))
    side.on_new_request(request)
    return request


def report(*arguments: Any, **named: Any) -> Any:
    """Return the workers' reports; vLLM is loaded only here."""
    from host_control.vllm.metadata import WorkerReport

    return WorkerReport(*arguments, **named)


TOKENS = list(range(5 * CHUNK + 10))


def put(plane: ScriptedDataPlane, names: Sequence[bytes], group: int = 0, namespace: Any = namespace_of) -> None:
    """Store records of rank 0 under the given chunk keys."""
    plane.records.update(dict.fromkeys(record_keys(namespace(0, group), list(names)), b""))


def tail_of(tokens: list[int], end: int) -> bytes:
    """Return the chunk key of the tail after the last whole chunk of the tokens up to ``end``."""
    before = chunk_keys(tokens[:end])
    return tail_chunk_key(MODEL, tokens, end - len(before) * CHUNK, chunk_tokens=CHUNK, after=before)


def names_of(operations: Sequence[Any]) -> list[bytes]:
    """Return the chunk keys of stores."""
    return [chunk_key for each in operations for chunk_key in each.chunk_keys]


class Pool:
    """The attributes of vLLM's block pool that are read."""

    num_gpu_blocks = 10

    def __init__(self, cached: int = 0, used: int = 0) -> None:
        self.used = used
        self.cached_block_hash_to_block = {str(number): number for number in range(cached)}

    def get_num_free_blocks(self) -> int:
        return self.num_gpu_blocks - 1 - self.used


class Scene:
    """The scheduler half of an engine, and one request that it serves step by step.

    Attributes:
        request: The request that arrived last. The other methods are about it.
    """

    def __init__(self, side: Any, plane: ScriptedDataPlane) -> None:
        self.side, self.plane = side, plane
        self.request: Any = None

    @property
    def name(self) -> str:
        return str(self.request.request_id)

    def arrive(self, tokens: Sequence[int] = TOKENS, stored: int = 0, **attributes: Any) -> Request:
        """Let a request arrive after the given number of its chunks was stored."""
        self.request = arrive(self.side, self.plane, list(tokens), stored, **attributes)
        return self.request

    def ask(self, local: int = 0) -> int | None:
        """Ask once, as vLLM does, how many tokens can be loaded."""
        found: int | None = self.side.matched_tokens(self.request, local)
        return found

    def matched(self, local: int = 0) -> int:
        """Ask until there is an answer."""
        return matched(self.side, self.request, local)

    def look_up(self) -> None:
        """Start a lookup by a question, and wait for the lookup's answer."""
        self.ask()
        wait_for(lambda: self.side._lookup.poll(self.name))

    def load(self, tables: Sequence[list[int]] = (range(100, 300),) * _GROUPS_MAX, local: int = 0) -> Any:
        """Load what is offered; return the operation for the workers."""
        self.side.allocated(self.request, [list(table) for table in tables], self.matched(local))
        (operation,) = self.side.step(step()).loads
        return operation

    def begin(self, count: int, first: int = 0, **more: Any) -> Any:
        """Compute tokens in the request's first step; return the stores."""
        return self.side.step(step(new={self.name: (first, count)}, **more)).stores

    def go_on(self, first: int, count: int, blocks: Sequence[int] | None = None, **more: Any) -> Any:
        """Compute tokens in a later step, with further blocks; return the stores."""
        output = step(cached={self.name: (first, count)}, **more)
        output.scheduled_cached_reqs.new_block_ids = [(list(blocks),) if blocks is not None else None]
        return self.side.step(output).stores

    def resume(self, first: int, count: int, blocks: Sequence[int], **more: Any) -> Any:
        """Compute tokens in the first step after a preemption, in new blocks; return the metadata."""
        output = step(cached={self.name: (first, count)}, **more)
        output.scheduled_cached_reqs.new_block_ids = [(list(blocks),)]
        output.scheduled_cached_reqs.resumed_req_ids = {self.name}
        return self.side.step(output)

    def preempt(self, **changes: Any) -> list[Any]:
        """Preempt the request, in a step with the given changes of vLLM's output; return its saves."""
        self.request.num_preemptions += 1
        output = step(preempted=[self.name])
        vars(output).update(changes)
        return list(self.side.step(output).saves.get(self.name, []))

    def report(self, *loaded: dict[str, int], finished: Sequence[str] = (), **named: Any) -> None:
        """Let the workers report."""
        self.side.worker_output(set(finished), report(*loaded, **named))

    def available(self) -> Any:
        """Return the news of the load's available chunks in the next step; None if there is none."""
        return self.side.step(step()).available.get(self.name)

    def finish(self) -> Any:
        return self.side.finished(self.request)

    def counted(self, prefix: str = "") -> dict[str, float]:
        """Return the counters since the last call whose names begin with ``prefix``."""
        taken = self.side.counts.take()
        return {name: count for name, count in (taken.data if taken else {}).items() if name.startswith(prefix)}
