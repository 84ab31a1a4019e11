"""A real vLLM engine as a process of its own that is told over a pipe what to serve.

``python -m shadowserve_tools.bench.parts.engine``. vLLM's whole engine runs in this one process and on this process's
cores: scheduler, worker and the plugin's threads. The requests of an open loop are added between two steps, when their
time has come, and each token is stamped as the step that made it ends. So no HTTP server, tokenizer or client shares
the engine's cores, and what is measured is the engine.

The first line on standard input says how the engine is made, each further one is an order; each is answered with one
line on what was standard output when the process began (vLLM writes there, too, and so to standard error instead).
"""

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

__all__ = ["main", "model_config", "prompt"]

BLOCK_TOKENS: Final = 32
"""The smallest that vLLM's CPU attention takes."""
IDLE_S: Final = 0.001
"""vLLM's own engine loop sleeps so long after a step in which nothing could run."""
STORE_TIMEOUT_S: Final = 60.0


def model_config(
    *, layers: int, hidden: int, heads: int, head_size: int, vocabulary: int, tokens: int
) -> dict[str, Any]:
    """Return a Llama's ``config.json``: as many KV heads as heads, and the usual ratio of hidden to inner size."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_size,
        "vocab_size": vocabulary,
        "max_position_embeddings": tokens,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def prompt(seed: int, tokens: int, vocabulary: int) -> list[int]:
    """Return a prompt: the same arguments, the same tokens."""
    generator = random.Random(seed)
    return [generator.randrange(vocabulary) for _ in range(tokens)]


class _Engine:
    """vLLM, and what can be asked of it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self._sampling = SamplingParams
        self._vocabulary: int = settings["vocabulary"]
        self._number = 0
        options: dict[str, Any] = {}
        if settings.get("connector"):
            options["kv_transfer_config"] = {
                "kv_connector": "ShadowServeConnector",
                "kv_connector_module_path": "host_control.vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": settings["connector"],
            }
        self._llm = LLM(
            model=settings["model"],
            load_format=settings["load_format"],
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=settings["max_tokens"],
            max_num_seqs=settings["max_requests"],
            enforce_eager=True,
            # Every request has to be fetched or computed: what an earlier one left in the engine must not serve it.
            enable_prefix_caching=False,
            seed=0,
            disable_log_stats=False,
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=settings["kv_cache_bytes"],
            block_size=BLOCK_TOKENS,
            **options,
        )
        self._core: Any = self._llm.llm_engine

    def _add(self, seed: int, tokens: int, output: int) -> str:
        self._number += 1
        name = f"request-{self._number}"
        sampling = self._sampling(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        self._core.add_request(name, {"prompt_token_ids": prompt(seed, tokens, self._vocabulary)}, sampling)
        return name

    def serve(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Serve an open loop: each request arrives ``at`` seconds after the beginning, whatever the engine does.

        Args:
            requests: ``seed`` and ``tokens`` of the prompt, ``output`` tokens, ``at``; in order of arrival.

        Returns:
            For each: ``ttft_s`` from its arrival, ``tpot_s``, and ``cached`` tokens that were not computed.
        """
        waiting = list(requests)
        known: dict[str, dict[str, Any]] = {}
        begin = time.perf_counter()
        while waiting or self._core.has_unfinished_requests():
            now = time.perf_counter() - begin
            while waiting and waiting[0]["at"] <= now:
                request = waiting.pop(0)
                known[self._add(request["seed"], request["tokens"], request["output"])] = dict(request)
            if not self._core.has_unfinished_requests():
                time.sleep(max(0.0, waiting[0]["at"] - now))
                continue
            if not self._step(known, begin):
                time.sleep(IDLE_S)
        return [_measured(request) for request in known.values()]

    def _step(self, known: dict[str, dict[str, Any]], begin: float) -> int:
        outputs = self._core.step()
        now = time.perf_counter() - begin
        for output in outputs:
            request = known[output.request_id]
            request.setdefault("first", now)
            request["last"] = now
            request["made"] = len(output.outputs[0].token_ids)
            request["cached"] = output.num_cached_tokens or 0
        return len(outputs)

    def decode_start(self, batch: int, tokens: int, steps_max: int) -> int:
        """Bring ``batch`` requests into decoding; :meth:`decode_steps` goes on with them."""
        names = {self._add(seed, tokens, steps_max) for seed in range(batch)}
        seen: set[str] = set()
        while seen != names:
            seen |= {output.request_id for output in self._core.step()}
        return len(seen)

    def decode_steps(self, steps: int) -> list[tuple[float, float]]:
        """Return the seconds that each of some decode steps takes, on the clock and of this process's CPU time."""
        durations = []
        for _ in range(steps):
            begin, cpu = time.perf_counter(), time.process_time()
            while not self._core.step():  # where steps overlap, one may return before it has anything to say
                if not self._core.has_unfinished_requests():
                    raise RuntimeError("the decoding requests have come to their end")
            durations.append((time.perf_counter() - begin, time.process_time() - cpu))
        return durations

    def decode_stop(self) -> int:
        """Abort every request."""
        names = list(self._core.engine_core.engine_core.scheduler.requests)
        self._core.abort_request(names, internal=True)
        while self._core.has_unfinished_requests():
            self._core.step()
        return len(names)

    def store(self, seeds: Iterable[int], tokens: int) -> int:
        """Compute prompts and wait until their KV is stored; return how many chunks were."""
        before = self._counter("stored_chunks")
        for seed in seeds:  # one after the other: the segment that they wait in is not made for all at once
            self.serve([{"seed": seed, "tokens": tokens, "output": 1, "at": 0.0}])
            if not self._worker._store.flush(STORE_TIMEOUT_S):
                raise RuntimeError("storing did not end")
        self.serve([{"seed": 0, "tokens": 2, "output": 2, "at": 0.0}])  # counts are taken with a step
        return self._counter("stored_chunks") - before

    @property
    def _worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    def _counter(self, name: str) -> int:
        found = [metric for metric in self._llm.get_metrics() if metric.name == f"vllm:shadowserve_{name}"]
        return int(sum(metric.value for metric in found))

    def switch(self, asynchronous: bool) -> bool:
        """Have the plugin fetch asynchronously from now on, or not; only while nothing runs."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        if self._core.has_unfinished_requests():
            raise RuntimeError("requests are under way")
        for connector in (self._core.engine_core.engine_core.scheduler.connector, get_kv_transfer_group()):
            connector._asynchronous = asynchronous
            side = connector._scheduler or connector._worker
            side._config = side._config.model_copy(update={"asynchronous_fetch": asynchronous})
        return asynchronous

    def threads(self) -> dict[str, int]:
        """Return the process's Python threads, name to kernel's number."""
        return {thread.name: thread.native_id or 0 for thread in threading.enumerate()}

    def close(self) -> None:
        self._core.engine_core.shutdown()


def _measured(request: dict[str, Any]) -> dict[str, Any]:
    if request.get("made") != request["output"]:
        raise RuntimeError(f"{request.get('made')} tokens of {request['output']}")
    later = max(1, request["output"] - 1)
    return {
        "ttft_s": request["first"] - request["at"],
        "tpot_s": (request["last"] - request["first"]) / later,
        "end_s": request["last"],
        "cached": request["cached"],
    }


def main() -> None:
    """Follow the orders on standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    model = Path(settings["model"])
    if not model.exists():
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(settings["config"]))
    engine = _Engine(settings)
    operations: dict[str, Callable[..., Any]] = {
        name: getattr(engine, name)
        for name in ("serve", "store", "decode_start", "decode_steps", "decode_stop", "switch", "threads")
    }
    answers.write(json.dumps({"result": "ready"}) + "\n")
    for line in sys.stdin:
        order = json.loads(line)
        answers.write(json.dumps({"result": operations[order.pop("order")](**order)}) + "\n")
    engine.close()


if __name__ == "__main__":
    main()
