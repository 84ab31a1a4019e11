"""``shadowserve bench control``: what the control plane costs the engine's thread, and how long a lookup takes."""

import logging
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import click
import numpy as np

from host_control.config import HostConfig
from shadowserve.errors import ShadowServeError
from shadowserve_tools.bench.parts.workload import MODEL, Workload, client, llama_8b, put
from shadowserve_tools.processes import start_data_plane, start_storage
from shadowserve_tools.report import Chart, Output, Report, output_options

__all__ = ["control"]

BLOCK_TOKENS: Final = 16
STEPS: Final = 1024
"""Four times a chunk's tokens: each request completes four chunks by decoding, so their share of the cost is in it."""


@click.command()
@click.option("--requests", default=256, show_default=True, type=click.IntRange(1, 4096), help="Running requests.")
@click.option("--prompt-chunks", default=512, show_default=True, type=click.IntRange(1), help="Chunks of the lookup.")
@output_options
def control(requests: int, prompt_chunks: int, output: Output) -> None:
    """Time the connector's share of a scheduler iteration, and a lookup of a 128K-token prompt.

    The iteration is vLLM's own data structures with every request decoding one token, and no fetches: what a busy
    engine pays when ShadowServe has nothing to do for it. The lookup goes through the data plane to a storage server
    that holds the whole prompt; it runs on a thread of its own, so its time is latency, not the engine's.
    """
    report = Report("control", ["what", "median_ms", "worst_ms", "runs"])
    workload = llama_8b(prompt_chunks, layers=1)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        storage = stack.enter_context(start_storage(logs))
        data_plane = stack.enter_context(start_data_plane(logs, storage.address))
        put(workload, storage.address)
        side = _scheduler_side(workload, data_plane.address)
        stack.callback(side.close)
        steps = _steps(side, requests)
        lookups, round_trips = _lookups(side, workload, storage.address)
    for what, samples in ((f"iteration, {requests} running requests", steps), ("lookup", lookups)):
        report.row(what=what, median_ms=float(np.median(samples)), worst_ms=max(samples), runs=len(samples))
    report.ratio("iteration_over_0.2_ms", [sample / 0.2 for sample in steps], "at most 1")
    report.ratio("lookup_over_20_ms", [sample / 20 for sample in lookups], "at most 1")
    report.ratio("lookup_round_trips", [float(trips) for trips in round_trips], "exactly 1")
    bars = [("iteration", report.ratios["iteration_over_0.2_ms"]), ("lookup", report.ratios["lookup_over_20_ms"])]
    report.charts.append(
        Chart("Time over its budget", x="", y="ratio", series={"median": bars}, limits={"budget": 1}, kind="bars")
    )
    report.finish(output)


def _scheduler_side(workload: Workload, data_plane: str) -> Any:
    try:
        from host_control.vllm.metadata import WorkerHandshake
        from host_control.vllm.scheduler_side import SchedulerSide
    except ImportError as error:
        raise ShadowServeError(f"bench control runs vLLM's scheduler structures: {error}; run 'make setup'") from error
    config = HostConfig(data_plane=data_plane, lookup_timeout=10)
    logger = logging.getLogger(__name__)
    side = SchedulerSide(config, _one_group(config), fetch=True, store=True, problem="", logger=logger)
    side.start({0: WorkerHandshake(model=MODEL.digest(), namespaces=((0, 0, workload.layout.namespace),), problem="")})
    return side


def _one_group(config: HostConfig) -> Any:
    """Return what the connector makes of a model whose layers all keep all tokens."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from host_control.vllm.groups import Groups

    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    kept = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return Groups(SimpleNamespace(speculative_config=None), kept, config)


def _request(name: str, tokens: list[int]) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(name, tokens, SamplingParams(max_tokens=STEPS + 1), None)


def _steps(side: Any, count: int) -> list[float]:
    """Milliseconds of each of many iterations in which every request decodes one token."""
    from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, SchedulerOutput

    # Prompts of different lengths: one request in every step completes a chunk, not all of them in one.
    prompts = [1000 + index for index in range(count)]
    requests = {f"running-{length}": _request(f"running-{length}", [length] * length) for length in prompts}
    blocks = (list(range((prompts[-1] + STEPS) // BLOCK_TOKENS + 2)),)
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
        output.kv_connector_block_state = KVConnectorBlockState(set(requests), lambda _: blocks, {})
        for request in requests.values():
            request.append_output_token_ids(step)
        begin = time.perf_counter()
        side.step(output)
        samples.append((time.perf_counter() - begin) * 1e3)
    for request in requests.values():
        side.finished(request)
    return samples


def _lookups(side: Any, workload: Workload, storage: str) -> tuple[list[float], list[int]]:
    """Milliseconds from a prompt's arrival to its answer, hashing included, and commands that storage executed."""
    samples, round_trips = [], []
    with client(storage) as server:
        for index in range(20):
            request = _request(f"lookup-{index}", [*workload.tokens, 0])
            before = _commands(server)
            begin = time.perf_counter()
            side.on_new_request(request)
            _await_lookup(side, request)
            samples.append((time.perf_counter() - begin) * 1e3)
            round_trips.append(_commands(server) - before - 1)
            if side.matched_tokens(request, 0) != len(workload.tokens):
                raise ShadowServeError("the lookup did not find what is stored; please report this")
            side.finished(request)
    return samples[2:], round_trips[2:]


def _commands(server: Any) -> int:
    return int(server.info("stats")["total_commands_processed"])


def _await_lookup(side: Any, request: Any) -> None:
    deadline = time.monotonic() + 30
    while side.matched_tokens(request, 0) is None:
        if time.monotonic() > deadline:
            raise ShadowServeError("no answer to a lookup within 30 s")
        time.sleep(0.0002)
