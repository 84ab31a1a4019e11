"""vLLM's own scheduler with its OffloadingConnector and tiers, and a worker with synthetic KV: no CUDA is needed.

The GPU is an array of blocks. The KV of a step is a function of its prompt's tokens, so the test can compare loaded KV
with expected KV.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from identity_support import engine_config
from machine import WAIT_MAX_S, wait_for

BLOCK = 16
CHUNK = 4 * BLOCK
TIER: dict[str, Any] = {
    "type": "ShadowServeTier",
    "module_path": "host_control.vllm.tier",
    "identity_cache": "none",
    **dict.fromkeys(("connect_timeout_s", "lookup_timeout_s", "fetch_timeout_s", "store_timeout_s"), WAIT_MAX_S),
    "fetch_buffer_bytes": "8MiB",
    "store_buffer_bytes": "8MiB",
    "breaker_backoff_max_s": 0.2,
}


def specs(dtype: str = "bfloat16", windows: bool = False, **changed: Any) -> list[Any]:
    """Return groups of caches as vLLM creates them."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

    shape: dict[str, Any] = {
        "block_size": BLOCK,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": getattr(torch, dtype),
        **changed,
    }
    groups = [KVCacheGroupSpec(["full.0", "full.1"], FullAttentionSpec(**shape))]
    if windows:
        groups.append(KVCacheGroupSpec(["window.0", "window.1"], SlidingWindowSpec(**shape, sliding_window=CHUNK)))
    return groups


class Worker:
    """Does the work of vLLM's workers for one step's metadata, synchronously."""

    def __init__(self, blocks: int, block_bytes: int, rows: np.ndarray, blocks_per_chunk: int) -> None:
        self.gpu = np.zeros((blocks, block_bytes), np.uint8)
        self._rows = rows
        self._per_chunk = blocks_per_chunk

    def transfer(self, job: Any, load: bool) -> None:
        gpu, cpu = (job.dst_spec, job.src_spec) if load else (job.src_spec, job.dst_spec)
        chunks, begin = iter(cpu.block_ids.tolist()), 0
        size = self.gpu.shape[1]
        for count, first in zip(gpu.group_sizes, gpu.block_indices, strict=True):
            chunk = None
            for index, block in enumerate(gpu.block_ids[begin : begin + count].tolist(), first):
                if chunk is None or index % self._per_chunk == 0:
                    chunk = next(chunks)
                place = self._rows[chunk][index % self._per_chunk * size :][:size]
                if load:
                    self.gpu[block] = place
                else:
                    place[:] = self.gpu[block]
            begin += count


class OffloadingEngine:
    """One engine without its model."""

    def __init__(self, model: Path, address: str, *, groups: list[Any] | None = None, rows: int = 64, **tier: Any):
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import (
            get_request_block_hasher,
            init_none_hash,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
        from vllm.v1.structured_output import StructuredOutputManager

        groups = groups or specs()
        of_engine = {name: tier.pop(name) for name in list(tier) if name in ("engine", "transfer", "offload")}
        page = groups[0].kv_cache_spec.page_size_bytes
        block_bytes, blocks = 2 * page, 256
        extra = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": rows * CHUNK // BLOCK * block_bytes,
            "block_size": CHUNK,
            "secondary_tiers": [{**TIER, "data_plane": address, **tier}],
            **of_engine.get("offload", {}),
        }
        config = engine_config(
            model,
            block_size=BLOCK * 2,  # the CPU's block size; the groups have the scheduler's
            max_num_seqs=8,
            kv_transfer_config={
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
                **of_engine.get("transfer", {}),
            },
            kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
            **of_engine.get("engine", {}),
        )
        config.cache_config.block_size = BLOCK
        config.cache_config.num_gpu_blocks = blocks
        config.cache_config.kv_cache_layout = "LBHNC"
        tensors = [
            KVCacheTensor(
                size=block_bytes * blocks, layers=list(group.layer_names), layer_stride=page * blocks, block_stride=page
            )
            for group in groups
        ]
        caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)
        block_size, hash_size = resolve_kv_cache_block_sizes(caches, config)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=caches,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_size,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_size, sha256)
        self.connector = self.scheduler.connector
        self.manager = self.connector.connector_scheduler.manager
        (self.tier,) = self.manager.secondary_tiers
        view = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self.worker = Worker(blocks, block_bytes, view, CHUNK // BLOCK)
        self.stats = OffloadingConnectorStats()
        self.loaded: dict[str, int] = {}
        self.wrong: list[tuple[str, int, int]] = []
        self._requests = 0

    def close(self) -> None:
        """Close like vLLM; the memory can only be released after all views of it are deleted."""
        del self.worker
        self.scheduler.shutdown()

    def request(self, tokens: list[int], **more: Any) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._requests += 1
        sampling = SamplingParams(max_tokens=1)
        sampling.update_from_generation_config({}, 0)
        request = Request(
            request_id=f"request-{self._requests}",
            prompt_token_ids=tokens,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            **more,
        )
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        """Run one step of the engine."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output = self.scheduler.schedule()
        meta, done, received = output.kv_connector_metadata, OffloadingWorkerMetadata(), set()
        for number, job in meta.load_jobs.items():
            self.worker.transfer(job, load=True)
            self._check(job)
            done.mark_completed(number)
            received.add(job.req_id)
        scheduled = [self.scheduler.requests[name] for name in output.num_scheduled_tokens]
        sampled = []
        for request in scheduled:
            end = request.num_computed_tokens
            self._compute(request, end - output.num_scheduled_tokens[request.request_id], end)
            sampled.append([7] if end >= request.num_tokens else [])
        for number, job in meta.store_jobs.items():
            self.worker.transfer(job, load=False)
            done.mark_completed(number)
        names = [request.request_id for request in scheduled]
        made = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(finished_recving=received, kv_connector_worker_meta=done),
        )
        for outputs in self.scheduler.update_from_output(output, made).values():
            if outputs.scheduler_stats is not None and outputs.scheduler_stats.kv_connector_stats:
                self.stats.aggregate(type(self.stats)(data=outputs.scheduler_stats.kv_connector_stats))

    def _check(self, job: Any) -> None:
        request, begin = self.scheduler.requests[job.req_id], 0
        for group, count in enumerate(job.dst_spec.group_sizes):
            first = job.dst_spec.block_indices[group]
            for index, block in enumerate(job.dst_spec.block_ids[begin : begin + count].tolist(), first):
                if (self.worker.gpu[block] != self.kv(request.prompt_token_ids, index, group)).any():
                    self.wrong.append((job.req_id, group, index))
            begin += count
            if not group:
                self.loaded[job.req_id] = count * BLOCK

    def _compute(self, request: Any, first: int, end: int) -> None:
        for group, blocks in enumerate(self.scheduler.kv_cache_manager.get_block_ids(request.request_id)):
            for index in range(first // BLOCK, -(-end // BLOCK)):
                if blocks[index]:
                    self.worker.gpu[blocks[index]] = self.kv(request.prompt_token_ids, index, group)

    def kv(self, tokens: list[int], index: int, group: int = 0) -> np.ndarray:
        """Return the KV of a block, which depends on its tokens and all before them, as bfloat16 in a narrow range."""
        prefix = tokens[: (index + 1) * BLOCK]
        random = np.random.default_rng([group, len(prefix), *prefix])
        values = random.normal(size=self.worker.gpu.shape[1] // 2).astype(np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)

    def serve(self, tokens: list[int]) -> int:
        """Serve one prompt; return the number of loaded tokens. The loaded KV must equal the computed KV."""
        request = self.request(tokens)
        wait_for(lambda: (self.step(), request.is_finished())[1])
        assert not self.wrong, "wrong KV in blocks (request, group, index)"
        return self.loaded.get(request.request_id, 0)

    def settle(self) -> None:
        """Run steps until no job is in flight."""
        wait_for(lambda: (self.step(), not self.manager.has_pending_work())[1])

    def forget(self) -> None:
        """Empty vLLM's own caches, on the GPU and in its CPU tier, like a restart."""
        self.settle()
        self.scheduler.kv_cache_manager.reset_prefix_cache()
        self.manager.primary_tier.reset_cache()
        self.worker.gpu[:] = 0
