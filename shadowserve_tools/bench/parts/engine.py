"""A real vLLM engine in a process of its own, controlled over a pipe.

``python -m shadowserve_tools.bench.parts.engine`` runs vLLM's whole engine in one process and on its cores: scheduler,
worker and the plugin's threads. Requests of an open loop are added between two steps when their time has come, and each
token is stamped at the end of its step. No HTTP server, tokenizer or client shares the engine's cores.

The first line on standard input configures the engine; each further one is an order. Each is answered with one line on
the original standard output. vLLM's own output goes to standard error.
"""

import functools
import importlib
import json
import math
import os
import random
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

BLOCK_TOKENS: Final = 32
"""Smallest block of vLLM's CPU attention."""
IDLE_S: Final = 0.001
"""vLLM's own engine loop sleeps as long after a step in which nothing could run."""
SETTLING_STEPS: Final = 12
"""After a pause of 40 ms the first decode step took a quarter longer than the twelfth, which was normal."""
SPARE_STEPS: Final = 16
"""Decode steps that are left when the last phase ends."""
STORE_TIMEOUT_S: Final = 60.0
WEIGHTS_SPREAD: Final = 0.08
"""Standard deviation of the weights of :func:`write_weights`."""


def decoded_tokens(beside: int, steps: int) -> int:
    """Return the tokens of a request that decodes in ``beside`` phases with a load, and one without before and after
    each.
    """
    return (2 * beside + 1) * (SETTLING_STEPS + steps) + SPARE_STEPS


def model_config(
    *, layers: int, hidden: int, heads: int, head_size: int, vocabulary: int, tokens: int
) -> dict[str, Any]:
    """Return the ``config.json`` of a Llama: as many KV heads as heads, and the usual ratio of hidden to inner size."""
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


def write_weights(folder: Path, config: dict[str, Any]) -> None:
    """Write the weights of a model, always the same ones, next to its ``config.json``.

    vLLM's own dummy weights are so small that answers hardly depend on the prompt. Here attention is as sharp as in a
    trained model, so that wrong KV gives another answer.
    """
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    wide = config["num_attention_heads"] * config["head_dim"]
    shapes = {f"{name}.weight": (config["vocab_size"], hidden) for name in ("model.embed_tokens", "lm_head")}
    shapes["model.norm.weight"] = (hidden, 0)
    for layer in range(config["num_hidden_layers"]):
        parts = {f"self_attn.{name}_proj": (wide, hidden) for name in "qkv"}
        parts |= {"self_attn.o_proj": (hidden, wide), "mlp.down_proj": (hidden, inner)}
        parts |= {f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        parts |= {f"{name}_layernorm": (hidden, 0) for name in ("input", "post_attention")}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    header: dict[str, Any] = {}
    end = 0
    for name, (rows, columns) in shapes.items():
        begin, end = end, end + rows * max(1, columns) * 2
        shape = [rows, columns] if columns else [rows]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    generator = np.random.default_rng(1)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for rows, columns in shapes.values():
            values = np.ones(rows, np.float32)
            if columns:
                values = WEIGHTS_SPREAD * generator.standard_normal(rows * columns, dtype=np.float32)
            file.write((values.view(np.uint32) >> 16).astype("<u2").tobytes())


def prompt(seed: int, tokens: int, vocabulary: int) -> list[int]:
    """Return a prompt. The same arguments give the same tokens."""
    generator = random.Random(seed)
    return [generator.randrange(vocabulary) for _ in range(tokens)]


class _Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self._sampling = SamplingParams
        self._vocabulary: int = settings["vocabulary"]
        self._number = 0
        self._policy_runner: Any = None
        self._timing: Any = None
        self._llm = LLM(
            skip_tokenizer_init=True,
            enforce_eager=True,
            seed=0,
            disable_log_stats=False,
            gpu_memory_utilization=0.1,
            block_size=BLOCK_TOKENS,
            **settings["options"],
        )
        self._core: Any = self._llm.llm_engine
        self._watch = Watch(self._scheduler)

    @property
    def _scheduler(self) -> Any:
        return self._core.engine_core.engine_core.scheduler

    @property
    def _side(self) -> Any:
        """The scheduler's half of the connector."""
        return self._scheduler.connector._scheduler

    def _add(self, tokens: list[int], output: int) -> str:
        self._number += 1
        name = f"request-{self._number}"
        sampling = self._sampling(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        self._core.add_request(name, {"prompt_token_ids": tokens}, sampling)
        return name

    def serve(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Serve an open loop: requests arrive at fixed times, independent of the engine.

        Args:
            requests: Prompts in order of arrival: ``prompt``, or ``seed`` and ``tokens``; ``output`` tokens; ``at``
                in seconds.

        Returns:
            For each request: ``ttft_s``, ``request_s``, ``tpot_s``, the number of ``cached`` tokens and the
                ``answer``. If its KV was retrieved, also ``lookup_s`` (until the hit is known), ``allocation_s``
                (until it has blocks), ``retrieval_s`` (until the KV is in memory), ``last_s`` (until the first
                token), and ``blocked_s``, the part of it in which the engine computed nothing.
        """
        self._watch.clear()
        waiting = list(requests)
        known: dict[str, dict[str, Any]] = {}
        begin = time.perf_counter()
        while waiting or self._core.has_unfinished_requests():
            now = time.perf_counter() - begin
            while waiting and waiting[0]["at"] <= now:
                request = waiting.pop(0)
                tokens = request.pop("prompt", None) or prompt(request["seed"], request["tokens"], self._vocabulary)
                known[self._add(tokens, request["output"])] = dict(request)
            if not self._core.has_unfinished_requests():
                time.sleep(max(0.0, waiting[0]["at"] - now))
                continue
            if not self._step(known, begin):
                time.sleep(IDLE_S)
        return [_measured(request) | self._watch.steps(name, begin, request) for name, request in known.items()]

    def converse(self, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Serve turns of agents: a closed loop, in which a turn begins some time after another one has ended.

        Args:
            turns: ``parts`` of the prompt (seed and tokens of each), ``output`` tokens, and ``at``, in seconds after
                the end of turn ``after``, or after the begin if that is None.

        Returns:
            For each turn what :meth:`serve` returns, and the number of its ``tokens``.
        """
        self._watch.clear()
        made = functools.cache(lambda seed, tokens: tuple(prompt(seed, tokens, self._vocabulary)))
        prompts = [[token for part in turn["parts"] for token in made(*part)] for turn in turns]
        known: dict[str, dict[str, Any]] = {}
        waiting, names, ends = list(range(len(turns))), dict[int, str](), dict[int | None, float]({None: 0.0})
        begin = time.perf_counter()
        while waiting or self._core.has_unfinished_requests():
            now = time.perf_counter() - begin
            for number in list(waiting):
                turn = turns[number]
                if (at := ends.get(turn["after"], math.inf) + turn["at"]) <= now:
                    waiting.remove(number)
                    names[number] = self._add(prompts[number], turn["output"])
                    known[names[number]] = {"output": turn["output"], "at": at, "tokens": len(prompts[number])}
            if not self._core.has_unfinished_requests() or not self._step(known, begin):
                time.sleep(IDLE_S)
            for number, name in names.items():
                if number not in ends and len(known[name].get("answer", ())) == turns[number]["output"]:
                    ends[number] = known[name]["last"]
        served = (known[names[number]] for number in range(len(turns)))
        return [_measured(request) | {"tokens": request["tokens"]} for request in served]

    def _step(self, known: dict[str, dict[str, Any]], begin: float) -> int:
        stepping = time.perf_counter()
        outputs = self._core.step()
        self._watch.stepped(stepping)
        now = time.perf_counter() - begin
        for output in outputs:
            request = known[output.request_id]
            request.setdefault("first", now)
            request["last"] = now
            request["answer"] = list(output.outputs[0].token_ids)
            request["cached"] = output.num_cached_tokens or 0
        return len(outputs)

    def decode_start(self, batch: int, tokens: int, beside: int, steps: int) -> int:
        """Bring ``batch`` requests into decoding; :meth:`decode_steps` continues them phase by phase."""
        output = decoded_tokens(beside, steps)
        names = {self._add(prompt(seed, tokens, self._vocabulary), output) for seed in range(batch)}
        seen: set[str] = set()
        while seen != names:
            seen |= {output.request_id for output in self._core.step()}
        return len(seen)

    def decode_steps(self, steps: int) -> list[tuple[float, float]]:
        """Return the elapsed time and the CPU time of each decode step. Some steps that do not count come first."""
        durations = []
        for _ in range(SETTLING_STEPS + steps):
            begin, cpu = time.perf_counter(), time.process_time()
            while not self._core.step():  # overlapping steps may return without output
                if not self._core.has_unfinished_requests():
                    raise RuntimeError("the decoding requests have come to their end")
            durations.append((time.perf_counter() - begin, time.process_time() - cpu))
        return durations[SETTLING_STEPS:]

    def decode_stop(self) -> int:
        names = list(self._scheduler.requests)
        self._core.abort_request(names, internal=True)
        while self._core.has_unfinished_requests():
            self._core.step()
        return len(names)

    def store(self, seeds: Iterable[int], tokens: int) -> int:
        """Compute prompts, wait until their KV is stored, and return the number of stored chunks."""
        before = self.counters().get("stored_chunks", 0)
        for seed in seeds:  # one after the other: the store buffer does not hold all of them
            self.serve([{"seed": seed, "tokens": tokens, "output": 1, "at": 0.0}])
            self.settle()
        self.serve([{"seed": 0, "tokens": 2, "output": 2, "at": 0.0}])  # counters are updated with a step
        return self.counters()["stored_chunks"] - before

    def switch(self, asynchronous: bool) -> bool:
        """Switch asynchronous fetching on or off. No request may be running."""
        if self._core.has_unfinished_requests():
            raise RuntimeError("requests are still running")
        self._side.ways.in_step = not asynchronous
        return asynchronous

    def layerwise(self, on: bool) -> bool:
        self._side.ways.by_layers = on
        return on

    def layer_order(self, value: bool | str) -> bool | str:
        """Set ``layer_order``. The policy decides, and learns, with "auto" only."""
        side = self._side
        side._engine = replace(side._engine, config=side._engine.config.model_copy(update={"layer_order": value}))
        self.hits("decide" if value == "auto" else "fetch")
        self.layerwise(on=value is not False)
        return value

    def hits(self, way: str) -> str:
        """Set what the plugin does with stored prompts: "compute", "fetch", or "decide" (and learn from it)."""
        from host_control.vllm.timing import Timing

        side = self._side
        self._policy_runner, self._timing = self._policy_runner or side._policy_runner, self._timing or side._timing
        side._engine = replace(side._engine, fetch=way != "compute")
        side._policy_runner, side._timing = self._policy_runner, self._timing
        if way != "decide":
            side._policy_runner, side._timing = None, Timing(side._engine.config, counts=side.counts)
        return way

    def reading(self, only: bool) -> bool:
        """Switch storing off (``only``) or on."""
        side = self._side
        side._engine = replace(side._engine, store=not only)
        return only

    def pressure(self) -> dict[str, Any]:
        """Return the number of preempted requests since the last :meth:`serve`, and :attr:`Watch.computed`."""
        return {"preemptions": self._watch.preemptions, "steps": self._watch.computed}

    def counters(self) -> dict[str, int]:
        """Return the plugin's counters, as ``name`` or ``name/reason``, as of the last step."""
        found: dict[str, int] = {}
        for metric in self._llm.get_metrics():
            if metric.name.startswith("vllm:shadowserve_"):
                reason = f"/{metric.labels['reason']}" if "reason" in metric.labels else ""
                found[metric.name.removeprefix("vllm:shadowserve_") + reason] = int(metric.value)
        return found

    def settle(self) -> None:
        """Wait until the plugin has stored everything that it has gathered."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        if not get_kv_transfer_group()._worker.stores.queue.flush(STORE_TIMEOUT_S):
            raise RuntimeError("storing did not end")

    def reset(self) -> bool:
        """Empty vLLM's prefix cache."""
        return bool(self._llm.reset_prefix_cache())

    def threads(self) -> dict[str, int]:
        """Return the process's Python threads: kernel's number by name."""
        return {thread.name: thread.native_id or 0 for thread in threading.enumerate()}

    def close(self) -> None:
        self._core.engine_core.shutdown()


def _hide_llvmlite() -> None:
    """Hide llvmlite's library from vLLM 0.32, because it answers to every attribute name.

    Without Triton, vLLM searches the attributes of all modules for kernels to replace, and fails on that library. Peers
    install it.
    """
    try:
        ffi: Any = importlib.import_module("llvmlite.binding.ffi")
    except ImportError:
        return
    answer = ffi._lib_wrapper.__getattr__

    def getattribute(library: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return answer(library, name)

    ffi._lib_wrapper.__getattr__ = getattribute


def _plain(name: str) -> str:
    """Return a request's name without the random digits that vLLM appends."""
    return name.rpartition("-")[0]


def _measured(request: dict[str, Any]) -> dict[str, Any]:
    if len(request.get("answer", ())) != request["output"]:
        raise RuntimeError(f"{len(request.get('answer', ()))} tokens of {request['output']}")
    later = max(1, request["output"] - 1)
    return {
        "ttft_s": request["first"] - request["at"],
        "tpot_s": (request["last"] - request["first"]) / later,
        "request_s": request["last"] - request["at"],
        "end_s": request["last"],
        "cached": request["cached"],
        "answer": request["answer"],
    }


class Watch:
    """Times of requests' retrievals and of the engine's computing steps, observed where vLLM calls its connector.

    Attributes:
        computed: Computing steps since :meth:`clear`: seconds, requests, their tokens, and those tokens that an
            earlier step had computed already.
        preemptions: Number of preemptions since then.
    """

    def __init__(self, scheduler: Any) -> None:
        self._found: dict[str, float] = {}
        self._allocated: dict[str, float] = {}
        self._in_place: dict[str, float] = {}
        self._computing: list[tuple[float, float]] = []
        self._planned = (0, 0, 0)
        self._reached: dict[str, int] = {}
        self.computed: list[tuple[float, int, int, int]] = []
        self.preemptions = 0
        self._schedule = scheduler.schedule
        scheduler.schedule = self._scheduled
        if scheduler.connector is not None:
            self._match = scheduler.connector.get_num_new_matched_tokens
            self._allocate = scheduler.connector.update_state_after_alloc
            self._update = scheduler.connector.update_connector_output
            scheduler.connector.get_num_new_matched_tokens = self._matching
            scheduler.connector.update_state_after_alloc = self._allocating
            scheduler.connector.update_connector_output = self._updating

    def clear(self) -> None:
        self._found, self._allocated, self._in_place, self._computing = {}, {}, {}, []
        self._reached, self.computed, self.preemptions = {}, [], 0

    def _scheduled(self, *arguments: Any, **more: Any) -> Any:
        output = self._schedule(*arguments, **more)
        self.preemptions += len(output.preempted_req_ids or ())
        new, cached, again = output.scheduled_new_reqs, output.scheduled_cached_reqs, 0
        planned = [(each.req_id, each.num_computed_tokens) for each in new]
        for name, begin in [*planned, *zip(cached.req_ids, cached.num_computed_tokens, strict=True)]:
            end, reached = begin + output.num_scheduled_tokens[name], self._reached.get(name, 0)
            again += max(min(end, reached) - begin, 0)
            self._reached[name] = max(end, reached)
        self._planned = (len(output.num_scheduled_tokens), output.total_num_scheduled_tokens, again)
        return output

    def stepped(self, begin: float) -> None:
        """Record a step that began at ``begin`` and has ended."""
        if self._planned[1]:
            end = time.perf_counter()
            self._computing.append((begin, end))
            self.computed.append((end - begin, *self._planned))

    def _matching(self, request: Any, local: int) -> Any:
        found = self._match(request, local)
        if found[0]:
            self._found.setdefault(_plain(request.request_id), time.perf_counter())
        return found

    def _allocating(self, request: Any, blocks: Any, external: int) -> Any:
        if external:
            self._allocated.setdefault(_plain(request.request_id), time.perf_counter())
        return self._allocate(request, blocks, external)

    def _updating(self, output: Any) -> Any:
        for name in output.finished_recving or ():
            self._in_place[_plain(name)] = time.perf_counter()
        return self._update(output)

    def steps(self, name: str, begin: float, request: dict[str, Any]) -> dict[str, float]:
        """Return the times of a request's retrieval; empty if nothing was retrieved."""
        found, allocated, in_place = (each.get(name) for each in (self._found, self._allocated, self._in_place))
        if found is None or allocated is None or in_place is None:
            return {}
        arrived = begin + request["at"]
        hidden = sum(max(0.0, min(end, in_place) - max(start, arrived)) for start, end in self._computing)
        return {
            "lookup_s": found - arrived,
            "allocation_s": allocated - found,
            "retrieval_s": in_place - allocated,
            "last_s": begin + request["first"] - in_place,
            "blocked_s": in_place - arrived - hidden,
        }


def main() -> None:
    """Execute the orders on standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    if settings["packages"]:
        sys.path += settings["packages"]
        _hide_llvmlite()
    model = Path(settings["options"]["model"])
    if not model.exists():
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(settings["config"]))
    engine = _Engine(settings)
    answers.write(json.dumps({"result": "ready"}) + "\n")
    for line in sys.stdin:
        order = json.loads(line)
        operation = getattr(engine, order.pop("order"))
        answers.write(json.dumps({"result": operation(**order)}) + "\n")
    engine.close()


if __name__ == "__main__":
    main()
