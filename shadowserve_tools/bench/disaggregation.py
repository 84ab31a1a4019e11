"""Measures P/D disaggregation: one engine computes a prompt, another one continues it.

Method: a prefill engine and a decode engine (``pd_role``) have a data plane each and share a storage node. A prompt
of 4,040 tokens goes to the first engine. As soon as that has answered, the prompt goes to the second one, while its
last chunks are still being stored. The time to the first token is compared with a warm hit of the same engine: a
prompt of the same length that was stored long before. "Warm hit beside storing" is such a hit while another prompt is
being stored: the limit of two cores.

Prediction: when the prefill engine answers, the last four chunks are not stored yet. Encoding, sending and receiving
them takes 70 ms, most of it hidden behind fetching the first twelve: 1.2 times a warm hit.
"""

import statistics
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final

from shadowserve.errors import ShadowServeError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.parts.engine import BLOCK_TOKENS
from shadowserve_tools.bench.parts.lean import LeanSocket
from shadowserve_tools.bench.parts.options import benchmark, whole
from shadowserve_tools.bench.parts.serving import (
    Engine,
    Host,
    Load,
    Model,
    check_cached,
    check_depends,
    made_up,
    model_options,
    write_model,
)
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, over

_REST_TOKENS: Final = 200
"""Tokens after a prompt's whole chunks; they are in the tail."""
_TIMEOUT_S: Final = 60
_BUDGET_BYTES_MIN: Final = 16 << 20
_STORED_SHARE: Final = 2 / 3
"""Size of a record in parts of its chunk. Evicted values have the same size as stored ones."""
_STEP_TOKENS: Final = 4 * DEFAULT_CHUNK_TOKENS
_STEPS: Final = ("prefill", "continued", "warm hit", "warm hit beside storing")


class _Pools:
    """A prefill engine and a decode engine, each with its own data plane, and one storage node."""

    def __init__(self, host: Host) -> None:
        write_model(host.folder, host.model, host.load)
        load, partition = host.load, host.partition
        chunk_bytes = host.document_bytes // load.chunks
        budget = max(_BUDGET_BYTES_MIN, (load.documents + 1) * host.document_bytes)
        storage = host.start_storage("--memory-budget-bytes", str(budget))
        _fill(storage.address, budget, int(_STORED_SHARE * chunk_bytes))
        self.tokens = (load.chunks - 1) * DEFAULT_CHUNK_TOKENS + _REST_TOKENS
        self._held = self.tokens // BLOCK_TOKENS * BLOCK_TOKENS
        self._output = load.output
        steps: dict[str, Any] = {"max_num_batched_tokens": _STEP_TOKENS}
        # Answers of plain vLLM, in the same steps as the prefill engine. The second request computes the last tokens in
        # a step of their own, like a hit: the rounding of bfloat16 sums depends on the batch.
        with ExitStack() as stack:
            plain = host.start_engine(
                "plain", stack=stack, max_num_batched_tokens=_STEP_TOKENS, enable_prefix_caching=True
            )
            self._answers = [self._plain_answer(plain, seed) for seed in range(load.documents + 1)]
        engines = []
        for place, cores in (("prefill", partition.engine), ("decode", partition.data_plane)):
            plane = host.start_plane(storage.address, place=place, cores=cores)
            buffer_bytes = (load.chunks + 1) * chunk_bytes
            transfer = host.plugin(plane, pd_role=place, pd_timeout_s=_TIMEOUT_S, store_buffer_bytes=buffer_bytes)
            # Chunks are stored while later ones are computed: prompts are longer than a step.
            engines.append(host.start_engine(place, transfer, **steps))
        self.prefill, self.decode = engines

    def _plain_answer(self, plain: Engine, seed: int) -> list[int]:
        self.serve(plain, seed, 1)
        result = self.serve(plain, seed)
        check_cached(result, self._held, "vLLM itself")
        answer: list[int] = result["answer"]
        return answer

    def serve(self, engine: Engine, seed: int, output: int = 0) -> dict[str, Any]:
        return engine.ask(made_up(self.tokens, seed), output or self._output)

    def hit(self, seed: int) -> dict[str, Any]:
        """Return the result of a prompt in the decode engine, which must compute the last block only."""
        return self.decode.ask(made_up(self.tokens, seed), self._output, self._held)

    def turn(self, seed: int, other: int) -> list[dict[str, Any]]:
        """Return the results of each of _STEPS: a new prompt in the prefill and the decode engine, and warm hits
        around it.

        Then another prompt is computed, and while its end is stored the first one is hit again. That has the same work
        as disaggregation, but waits for nothing.
        """
        before = self.hit(seed - 1)
        computed = self.serve(self.prefill, seed, 1)
        continued = self.hit(seed)
        self.prefill.call("settle")
        warm = self.hit(seed)
        wanted = self._answers[seed]
        if not continued["answer"] == warm["answer"] == wanted:
            raise ShadowServeError(f"prompt {seed}: {continued['answer']}, then {warm['answer']}, instead of {wanted}")
        check_depends(continued["answer"], before["answer"])
        self.serve(self.prefill, other, 1)
        beside = self.hit(seed)
        self.prefill.call("settle")
        return [computed, continued, warm | {"ttft_s": statistics.fmean([before["ttft_s"], warm["ttft_s"]])}, beside]


def _fill(store: str, size: int, value_bytes: int) -> None:
    """Fill a storage node, so that new values evict old ones.

    A store in operation is full. While it grows, it touches new pages, which are slow on a virtual machine.
    """
    value = bytes(value_bytes)
    with LeanSocket(store) as connection:
        for number in range(size // value_bytes):
            connection.call("SET", f"{number:08d}", value)


@benchmark("what", "ttft_ms", "tokens", "computed_tokens", bars=["ttft_ms"])
@model_options(chunks=15, running_max=1)
@whole("--output-tokens", 8, "Tokens of an answer.", 2, 128)
def disaggregation(report: Report, programs: Programs, model: Model, load: Load, output_tokens: int) -> None:
    """Compute prompts in one engine and continue them in another one."""
    load = replace(load, chunks=load.chunks + 1, output=output_tokens)
    progress = programs.progress(load.documents + 1)
    pools = _Pools(Host(programs, programs.logs, model, load))
    pools.serve(pools.prefill, 0, 1)  # open connections, and touch memory for the first time
    pools.hit(0)
    turns = []
    for seed in range(1, load.documents + 1):
        progress(f"prompt {seed}")
        turns.append(pools.turn(seed, load.documents + seed))
    ttfts = {what: [turn[index]["ttft_s"] for turn in turns] for index, what in enumerate(_STEPS)}
    for index, what in enumerate(_STEPS):
        computed = max(pools.tokens - turn[index]["cached"] for turn in turns)
        ttft_ms = statistics.median(ttfts[what]) * 1e3
        report.row(what=what, ttft_ms=ttft_ms, tokens=pools.tokens, computed_tokens=computed)
    prefill, continued, warm, beside = ttfts.values()
    both_ms = statistics.median(map(sum, zip(prefill, continued, strict=True))) * 1e3
    report.row(what="prefill and continued", ttft_ms=both_ms, tokens=pools.tokens)
    # The limit is a hit that waits for nothing, beside the same storing.
    limits, name = over(beside, warm), "disaggregation_ttft_over"
    report.ratio(f"{name}_warm_hit", over(continued, warm), "at most 1.15", limits)
    report.ratio(f"{name}_hit_beside_storing", over(continued, beside), "none")
    report.ratio(f"{name}_prefill", over(continued, prefill), "none")
