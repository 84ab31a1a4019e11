"""Measures the cost of the connector on the engine's thread, and the latency of a lookup.

Method: the connector's share of a scheduler iteration, with 256 requests that each decode a token, on vLLM's own
structures; and a lookup of a prompt of 128K tokens, hashing included, through a data plane to a storage node that has
all of it. Both with one KV cache group and with three. Then the queue: 256 requests wait, and with each iteration one
starts, one arrives, one ends and every second time one is preempted.

Prediction: 0.04 ms for an iteration, 0.02 ms more with three groups; 12 ms for a lookup, 22 ms with three groups;
0.01 to 0.04 ms for the queue.
"""

import dataclasses
import functools
import logging
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, Final

from host_control.client import DataPlaneClient
from host_control.config import HostConfig
from host_control.lookup import RecordKeys
from host_control.waiting import WaitingQueue
from shadowserve import native, record
from shadowserve.chunk import Quantizer
from shadowserve.errors import ShadowServeError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.parts.options import benchmark, whole
from shadowserve_tools.bench.parts.workload import MODEL, Workload, client, keys_of, llama_8b, named_layout, put
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, timed

BLOCK_TOKENS: Final = 16
_WAITING: Final = 256
_WAITING_BLOCKS: Final = 256
_TIERS: Final = '{"memory_budget_bytes": "64MiB"}'
_STEP_S: Final = 0.002
"""Time between two iterations of the queue: shorter than a decode step."""
STEPS: Final = 1024
"""Four times a chunk's tokens: each request completes four chunks, so that their cost is included."""


@benchmark("what", "median_ms", "worst_ms", "runs", bars=["median_ms"])
@whole("--requests", 256, "Running requests.", most=4096)
@whole("--prompt-chunks", 512, "Chunks of the lookup.")
def control(report: Report, programs: Programs, requests: int, prompt_chunks: int) -> None:
    """Measure the connector's part of a scheduler iteration, and a long lookup."""
    whole_prompt = llama_8b(prompt_chunks, layers=1)
    three = [_small(whole_prompt, kind) for kind in ("full", "window", "state")]
    storage = programs.storage()
    data_plane = programs.data_plane(storage.address)

    def add(what: str, samples: list[float]) -> None:
        report.row(what=what, median_ms=statistics.median(samples), worst_ms=max(samples), runs=len(samples))

    for of, workloads, most_ms in (("", [whole_prompt], 0.2), (" of three groups", three, 0.4)):
        for workload in workloads:
            put(workload, storage.address)
        side = _scheduler_side(workloads, data_plane.address)
        programs.callback(side.close)
        steps = _steps(side, requests, len(workloads))
        lookups, commands = _lookups(side, whole_prompt, storage.address)
        add(f"iteration{of}, {requests} running requests", steps)
        add(f"lookup{of}", lookups)
        named = of.replace(" ", "_")
        report.ratio(f"iteration{named}_over_{most_ms}_ms", [each / most_ms for each in steps], "at most 1")
        report.ratio(f"lookup{named}_over_20_ms", [each / 20 for each in lookups], "at most 1")
        if len(workloads) == 1:
            report.ratio("lookup_round_trips", commands, "exactly 1")
        else:
            report.ratio(f"lookup{named}_commands", commands, "none")
    tiered = programs.data_plane(storage.address, "--tiers", _TIERS)
    queue_ms, told_ms = _queue_steps(programs, tiered.address)
    waiting = f"{_WAITING} of {_WAITING_BLOCKS} blocks wait"
    add(f"iteration's share of the queue, {waiting}", queue_ms)
    add(f"message of what has changed, {waiting}", told_ms)
    report.ratio("queue_step_ms", queue_ms, "at most 0.1; on the engine's thread")


def _small(workload: Workload, kind: str) -> Workload:
    """Return records of another group of the same prompt, as small as possible: a lookup does not read them."""
    layout = named_layout(1, 1, f"{kind} of three", kinds=1, vector_length=1, quantizer=Quantizer.PASSTHROUGH)
    keys = keys_of(layout, workload.tokens)
    records = [record.encode(key, native.Codec.NONE, layout, bytes(layout.raw_bytes)) for key in keys]
    return dataclasses.replace(workload, layout=layout, codec=native.Codec.NONE, keys=keys, records=records, crcs=[])


def _scheduler_side(workloads: Sequence[Workload], data_plane: str) -> Any:
    """Return the scheduler's half of the connector, for a model whose groups are stored as these workloads."""
    try:
        from host_control.vllm.metadata import WorkerHandshake
        from host_control.vllm.scheduler_side import SchedulerSide
    except ImportError as error:
        raise ShadowServeError(f"bench control runs vLLM's scheduler structures: {error}; run 'make setup'") from error
    config = HostConfig(data_plane=data_plane, lookup_timeout_s=10)
    logger = logging.getLogger(__name__)
    groups = _groups(config, len(workloads))
    side = SchedulerSide(config, groups, fetch=True, store=True, problem="", logger=logger)
    names = tuple((0, index, workload.layout.namespace) for index, workload in enumerate(workloads))
    side.start({0: WorkerHandshake(model=MODEL.digest(), namespaces=names, problem="")})
    return side


def _groups(config: HostConfig, count: int) -> Any:
    """Return the groups of the connector for a model with one group, or with three and vLLM's rules for them."""
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    from host_control.vllm.groups import Groups

    register_all_kvcache_specs(None)
    block = BLOCK_TOKENS if count == 1 else DEFAULT_CHUNK_TOKENS
    cell: dict[str, Any] = {"block_size": block, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    state: dict[str, Any] = {"shapes": ((64, 64),), "dtypes": (torch.float32,), "mamba_cache_mode": "align"}
    specs = [
        FullAttentionSpec(**cell),
        SlidingWindowSpec(**cell, sliding_window=1024),
        MambaSpec(block_size=block, **state),
    ][:count]
    described = [KVCacheGroupSpec([f"layer {index}"], spec) for index, spec in enumerate(specs)]
    kept = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=described)
    sizes = [spec.block_size for spec in specs]
    groups = Groups(SimpleNamespace(speculative_config=None), kept, config)
    groups.bind(
        KVCacheManager(
            kept,
            max_model_len=1 << 20,
            scheduler_block_size=math.lcm(*sizes),
            hash_block_size=math.gcd(*sizes),
        )
    )
    return groups


def _queue_steps(stack: ExitStack, address: str) -> tuple[list[float], list[float]]:
    """Milliseconds of many iterations in which a long queue changes; and of what tells a data plane of each."""
    plane = DataPlaneClient(address)
    stack.callback(plane.close)
    if not plane.wait_ready(10):
        raise ShadowServeError(f"the data plane at {address} does not answer")
    chunks = _WAITING_BLOCKS * BLOCK_TOKENS // DEFAULT_CHUNK_TOKENS
    keys = [[bytes([chunk, *index.to_bytes(4, "little")]).ljust(32, b"k") for chunk in range(chunks)]
            for index in range(_WAITING)]  # fmt: skip

    def look(name: str) -> RecordKeys:
        return {plane: [(bytes(32), keys[int(name) % _WAITING])]}

    queue = WaitingQueue(look, [plane])
    stack.callback(queue.close)
    notified_ms: list[float] = []
    tell = queue._send

    queue._send = lambda: notified_ms.append(1e3 * timed(tell, time.thread_time))  # type: ignore[method-assign]
    for index in range(_WAITING):
        queue.enqueue(str(index))
    samples = []
    for step in range(STEPS):
        begin = time.perf_counter()
        queue.begun(str(step))
        if step:
            queue.ended(str(step - 1))
        queue.enqueue(str(step + _WAITING))
        if step % 2:
            queue.sent_back(str(step))
            queue.begun(str(step))
        samples.append((time.perf_counter() - begin) * 1e3)
        time.sleep(_STEP_S)
    return samples, notified_ms


def _request(name: str, tokens: list[int]) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(name, tokens, SamplingParams(max_tokens=STEPS + 1), None)


def _steps(side: Any, count: int, groups: int) -> list[float]:
    """Return the milliseconds of iterations in which every request decodes one token.

    The last of three groups has recurrent state: vLLM names its blocks in the step that computes it.
    """
    from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, SchedulerOutput

    # Prompts have different lengths, so that one request completes a chunk in each step, and not all in the same one.
    prompts = [1000 + index for index in range(count)]
    requests = {f"running-{length}": _request(f"running-{length}", [length] * length) for length in prompts}
    block = BLOCK_TOKENS if groups == 1 else DEFAULT_CHUNK_TOKENS
    blocks = tuple(list(range(1, (prompts[-1] + STEPS) // block + 2)) for _ in range(groups))
    ends = dict(zip(requests, prompts, strict=True)) if groups > 1 else {}
    for request in requests.values():
        side.on_new_request(request)
        _await_lookup(side, request)
    samples = []
    for step in range(STEPS):
        cached = CachedRequestData.make_empty()
        cached.req_ids = list(requests)
        cached.num_computed_tokens = [length + step for length in prompts]
        cached.new_block_ids = [None] * count
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = cached
        output.num_scheduled_tokens = dict.fromkeys(requests, 1)
        done = {name: length + step + 1 for name, length in ends.items()}
        kept = {name: [(groups - 1, 1, end)] for name, end in done.items() if end % DEFAULT_CHUNK_TOKENS == 0}
        output.kv_connector_block_state = KVConnectorBlockState(set(requests), lambda _: blocks, kept)
        for request in requests.values():
            request.append_output_token_ids(step)
        samples.append(1e3 * timed(functools.partial(side.step, output)))
    for request in requests.values():
        side.finished(request)
    return samples


def _lookups(side: Any, workload: Workload, storage: str) -> tuple[list[float], list[float]]:
    """Milliseconds from a prompt's arrival to its answer, hashing included, and commands that storage executed.

    The data plane sends them together, one for 512 keys.
    """
    samples, commands = [], []

    def executed() -> int:
        return int(server.info("stats")["total_commands_processed"])

    with client(storage) as server:
        for index in range(20):
            request = _request(f"lookup-{index}", [*workload.tokens, 0])
            before = executed()
            begin = time.perf_counter()
            side.on_new_request(request)
            _await_lookup(side, request)
            samples.append((time.perf_counter() - begin) * 1e3)
            commands.append(float(executed() - before - 1))
            if side.matched_tokens(request, 0) != len(workload.tokens):
                raise ShadowServeError("the lookup did not find what is stored; please report this")
            side.finished(request)
    return samples[2:], commands[2:]


def _await_lookup(side: Any, request: Any) -> None:
    deadline = time.monotonic() + 30
    while side.matched_tokens(request, 0) is None:
        if time.monotonic() > deadline:
            raise ShadowServeError("no answer to a lookup within 30 s")
        time.sleep(0.0002)
