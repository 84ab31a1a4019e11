"""A real vLLM engine in this process, and helpers for tests. Import it before vLLM."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from machine import WAIT_MAX_S, wait_for
from tiny_models import with_another_first_chunk

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    # The model is tiny: a second thread would only busy-wait.
    OMP_NUM_THREADS="1",
    # In each process, compiling vLLM's own small functions takes 15 s of a core.
    TORCHDYNAMO_DISABLE="1",
)

BLOCK: Final = 32
# An engine in the same process can delay the scripted data plane for seconds, and so can the machine.
PATIENT: Final = {
    "connect_timeout_s": WAIT_MAX_S,
    "fetch_timeout_s": WAIT_MAX_S,
    "lookup_timeout_s": WAIT_MAX_S,
    "store_timeout_s": WAIT_MAX_S,
    "close_timeout_s": WAIT_MAX_S,
}
SHORT_TIMEOUT_S: Final = 1.0


@contextmanager
def imports_aside() -> Iterator[None]:
    """Restrict garbage collection to the engine's objects, and inspect a model's class in this process.

    At each start and end vLLM collects several times over half a million objects of imports, and freezes or unfreezes
    all of them: five times the work of the engine itself. For CUDA's sake vLLM also inspects an unknown class in a
    separate process, which imports vLLM again: nine seconds each. Each engine searches all modules for the kernels that
    it replaces, half of its start; the first one in a process has replaced them.
    """
    from vllm.model_executor.models import registry
    from vllm.triton_utils import dispatcher

    with pytest.MonkeyPatch.context() as patch:
        for name in ("freeze", "unfreeze"):
            patch.setattr(gc, name, lambda: None)
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        if dispatcher._registry:
            patch.setattr(dispatcher, "register_kernels", lambda _: None)
        yield


class Engine:
    """One vLLM engine with helpers for tests."""

    def __init__(self, model: Path, data_plane: str | None, **options: Any) -> None:
        from vllm import LLM

        extra = options.pop("extra", {})
        policy = options.pop("policy", "recompute")
        if data_plane is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "ShadowServeConnector",
                "kv_connector_module_path": "host_control.vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": {
                    "data_plane": data_plane,
                    **PATIENT,
                    "breaker_backoff_max_s": 0.2,
                    "identity_cache": "none",  # not the user's own
                    **extra,
                },
            }
        settings: dict[str, Any] = dict(
            model=str(model),
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=8,
            block_size=BLOCK,
            enforce_eager=True,
            seed=0,
            disable_log_stats=False,
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=64 << 20,
        )
        settings.update(options)
        gc.collect()
        gc.freeze()
        with imports_aside():
            self.llm = LLM(**settings)

    @property
    def connector(self) -> Any:
        """The scheduler's half of the connector."""
        return self.scheduler.connector

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def problem(self) -> str:
        """Reason why the plugin is off; empty if it is on."""
        return str(self.connector._scheduler.problem)

    @property
    def worker(self) -> Any:
        """The worker's half."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    def generate(self, prompts: list[list[int]], tokens: int = 8, **sampling: Any) -> list[Any]:
        from vllm import SamplingParams

        options = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, **sampling}
        parameters = SamplingParams(max_tokens=tokens, **options)
        return list(self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False))

    def outputs(self, prompts: list[list[int]], tokens: int = 8) -> list[list[int]]:
        return [list(out.outputs[0].token_ids) for out in self.generate(prompts, tokens)]

    def served(self, prompt: list[int], tokens: int = 8, **sampling: Any) -> tuple[list[int], int]:
        """Return the output of one prompt, and the number of its tokens that were cached."""
        (output,) = self.generate([prompt], tokens, **sampling)
        return list(output.outputs[0].token_ids), int(output.num_cached_tokens or 0)

    def assert_sensitive(self, prompts: list[list[int]], outputs: list[list[int]]) -> None:
        """Check that another first chunk with the same rest changes the output of each prompt.

        Otherwise equal outputs would prove nothing about loaded KV. The engine also stores the KV of this check, so run
        the check last, or call :meth:`reset`.
        """
        others = self.outputs([with_another_first_chunk(prompt) for prompt in prompts], len(outputs[0]))
        for prompt, output, other in zip(prompts, outputs, others, strict=True):
            assert output != other, f"{len(prompt)} tokens with another first chunk give the same output {output}"

    def flush(self) -> None:
        """Wait until each worker has stored all gathered chunks."""

        def flush(_: Any) -> bool:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            store = get_kv_transfer_group()._worker.stores.queue
            return store is None or bool(store.flush(2 * WAIT_MAX_S))

        assert all(self.llm.collective_rpc(flush))

    @contextmanager
    def impatient(self) -> Iterator[None]:
        """Set short deadlines that must expire, for a peer that does not answer."""
        parts = [(self.connector._scheduler._lookup, "_timeout"), (self.worker.loads.managers[0], "_fetch_timeout")]
        parts += [(self.worker.stores.queue, "_timeout")]
        if self.connector._scheduler._preemption is not None:
            parts.append((self.connector._scheduler._preemption, "_timeout"))
        with pytest.MonkeyPatch.context() as patch:
            for part, name in parts:
                assert getattr(part, name) == WAIT_MAX_S
                patch.setattr(part, name, SHORT_TIMEOUT_S)
            yield

    @contextmanager
    def awaiting_lookups(self) -> Iterator[None]:
        """Let the step that polls a lookup wait for the answer, so that the order of answers does not matter."""
        lookup = self.connector._scheduler._lookup
        poll = lookup.poll
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lookup, "poll", lambda name: wait_for(lambda: poll(name)))
            yield

    def forget(self) -> None:
        """Clear the engine's own prefix cache, so that the next prompt comes from elsewhere."""
        assert self.llm.reset_prefix_cache()

    def counters(self) -> dict[str, int]:
        return {
            metric.name.removeprefix("vllm:shadowserve_")
            + (f"/{metric.labels['reason']}" if "reason" in metric.labels else ""): int(metric.value)
            for metric in self.llm.get_metrics()
            if metric.name.startswith("vllm:shadowserve_")
        }

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def close(self) -> None:
        with imports_aside():
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm
            gc.collect()

    def reset(self, plane: Any, *, records: bool = False) -> None:
        """Reset the script, the engine's own caches and the breakers; with ``records``, the stored records as well."""
        self.flush()
        plane.script.unstall.set()
        plane.script = type(plane.script)()
        plane.calls.clear()
        plane.fetches.clear()
        plane.layerwise_calls = 0
        plane.stores.clear()
        if records:
            plane.records.clear()
        worker, side = self.worker, self.connector._scheduler
        if worker.stores.queue is not None:
            worker.stores.queue.forget(list(worker.stores.queue._recent))
        for client in (worker._client, *side._clients):
            for breaker in client.breakers.values():
                breaker.report(success=True)
        self.forget()
        self.counted = self.counters()

    def counted_since(self) -> dict[str, int]:
        """Return the increase of each counter since :meth:`reset`."""
        return {
            name: count - self.counted.get(name, 0)
            for name, count in self.counters().items()
            if count != self.counted.get(name, 0)
        }
