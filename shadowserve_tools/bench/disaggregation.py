"""Measures P/D disaggregation: one engine computes a prompt, another one continues it.

Method: a prefill engine and a decode engine (``pd_role``) have a data plane each and share a storage node. A prompt
of 4,040 tokens goes to the first engine. As soon as that has answered, the prompt goes to the second one, while its
last chunks are still being stored. The time to the first token is compared with a warm hit of the same engine: a
prompt of the same length that was stored long before. "Warm hit beside storing" is such a hit while another prompt is
being stored: the limit of two cores.

Prediction: when the prefill engine answers, the last four chunks are not stored yet. Encoding, sending and receiving
them takes 70 ms, most of it hidden behind fetching the first twelve: 1.2 times a warm hit.
"""

import json
import socket
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import click

from shadowserve.addresses import split_address
from shadowserve.cores import on_cores
from shadowserve.errors import ShadowServeError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.parts.engine import BLOCK_TOKENS
from shadowserve_tools.bench.parts.serving import (
    Engine,
    Load,
    Model,
    Partition,
    model_options_with,
    plugin,
    started_engine,
    write_model,
)
from shadowserve_tools.processes import Programs, start_data_plane, start_storage
from shadowserve_tools.report import Output, Report, output_options

_REST_TOKENS: Final = 200
"""Tokens after a prompt's whole chunks; they are in the tail."""
_TIMEOUT_S: Final = 60
"""Long, so that a late transfer is measured as late and not computed instead."""
_BUDGET_BYTES_MIN: Final = 16 << 20
_STORED_SHARE: Final = 2 / 3
"""Size of a record in parts of its chunk. Evicted values have the same size as stored ones."""
_STEP_TOKENS: Final = 4 * DEFAULT_CHUNK_TOKENS
_STEPS: Final = ("prefill", "continued", "warm hit", "warm hit beside storing")


class _Pools:
    """A prefill engine and a decode engine, each with its own data plane, and one storage node."""

    def __init__(self, stack: ExitStack, folder: Path, model: Model, load: Load) -> None:
        partition = Partition.halves()
        # Keep the benchmark's own threads off the engines' cores.
        stack.enter_context(on_cores(partition.data_plane))
        write_model(folder, model, load)
        cores = {"prefill": partition.engine, "decode": partition.data_plane}
        chunk_bytes = DEFAULT_CHUNK_TOKENS * model.kv_bytes
        budget = max(_BUDGET_BYTES_MIN, (load.documents + 1) * load.chunks * chunk_bytes)
        limit = ("--memory-budget-bytes", str(budget))
        storage = stack.enter_context(start_storage(folder, "--cores", json.dumps(cores["decode"]), *limit))
        _fill(storage.address, budget, int(_STORED_SHARE * chunk_bytes))
        self.tokens = (load.chunks - 1) * DEFAULT_CHUNK_TOKENS + _REST_TOKENS
        self._held = self.tokens // BLOCK_TOKENS * BLOCK_TOKENS
        self._output = load.output
        # Answers of plain vLLM, in the same steps as the prefill engine. The second request computes the last tokens in
        # a step of their own, like a hit: the rounding of bfloat16 sums depends on the batch.
        with started_engine(
            "plain", folder, partition.engine, model, load, 1, step_tokens=_STEP_TOKENS, prefix_caching=True
        ) as plain:
            self._answers = [self._plain_answer(plain, seed) for seed in range(load.documents + 1)]
        engines = []
        for place in ("prefill", "decode"):
            (folder / place).mkdir()
            listen = f"unix:{folder}/{place}/dpu.sock"
            flags = ("--listen", listen, "--cores", json.dumps(cores[place]))
            with on_cores(cores[place]):
                stack.enter_context(start_data_plane(folder / place, storage.address, *flags))
            keys = {
                "data_plane": listen,
                "pd_role": place,
                "store_buffer_bytes": (load.chunks + 1) * chunk_bytes,
                "identity_cache": str(folder / "content.json"),
            }
            keys |= dict.fromkeys(
                ("pd_timeout_s", "lookup_timeout_s", "fetch_timeout_s", "store_timeout_s"), _TIMEOUT_S
            )
            # Chunks are stored while later ones are computed: prompts are longer than a step.
            engine = started_engine(
                place, folder, partition.engine, model, load, 1, plugin(keys), step_tokens=_STEP_TOKENS
            )
            engines.append(stack.enter_context(engine))
        self.prefill, self.decode = engines

    def _plain_answer(self, plain: Engine, seed: int) -> list[int]:
        self.serve(plain, seed, 1)
        result = self.serve(plain, seed)
        if result["cached"] != self._held:
            raise ShadowServeError(f"vLLM itself held {result['cached']} tokens of a prompt, instead of {self._held}")
        answer: list[int] = result["answer"]
        return answer

    def serve(self, engine: Engine, seed: int, output: int = 0) -> dict[str, Any]:
        request = {"seed": seed, "tokens": self.tokens, "output": output or self._output, "at": 0.0}
        (result,) = engine.call("serve", requests=[request])
        found: dict[str, Any] = result
        return found

    def hit(self, seed: int) -> dict[str, Any]:
        """Return the result of a prompt in the decode engine, which must compute the last block only.

        Raises:
            ShadowServeError: The engine computed more.
        """
        result = self.serve(self.decode, seed)
        if result["cached"] != self._held:
            raise ShadowServeError(f"{result['cached']} tokens of a prompt were not computed, instead of {self._held}")
        return result

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
        if continued["answer"] == before["answer"]:
            raise ShadowServeError("the answer does not depend on the prompt: equal answers would show nothing")
        self.serve(self.prefill, other, 1)
        beside = self.hit(seed)
        self.prefill.call("settle")
        return [computed, continued, warm | {"ttft_s": statistics.fmean([before["ttft_s"], warm["ttft_s"]])}, beside]


def _fill(store: str, size: int, value_bytes: int) -> None:
    """Fill a storage node, so that new values evict old ones.

    A store in operation is full. While it grows, it touches new pages, which are slow on a virtual machine.
    """
    address = split_address(store)
    try:
        with socket.create_connection(address, timeout=_TIMEOUT_S) as connection, connection.makefile("rb") as replies:
            for number in range(size // value_bytes):
                connection.sendall(b"*3\r\n$3\r\nSET\r\n$8\r\n%08d\r\n$%d\r\n" % (number, value_bytes))
                connection.sendall(bytes(value_bytes) + b"\r\n")
                if (reply := replies.readline()) != b"+OK\r\n":
                    raise ShadowServeError(f"filling the store at {store}: {reply.decode(errors='replace').strip()}")
    except OSError as error:
        raise ShadowServeError(f"filling the store at {store}: {error}") from error


@click.command()
@model_options_with(chunks=15, requests_max=1)
@click.option("--output-tokens", default=8, show_default=True, type=click.IntRange(2, 128), help="Tokens of an answer.")
@output_options
def disaggregation(output: Output, model: Model, load: Load, requests_max: int, output_tokens: int) -> None:
    """Compute prompts in one engine and continue them in another one."""
    load = Load(chunks=load.chunks + 1, documents=load.documents, output=output_tokens)
    turns: list[list[dict[str, Any]]] = []
    with Programs() as programs:
        progress = programs.progress(load.documents + 1)
        pools = _Pools(programs, programs.logs, model, load)
        pools.serve(pools.prefill, 0, 1)  # open connections, and touch memory for the first time
        pools.hit(0)
        for seed in range(1, load.documents + 1):
            progress(f"prompt {seed}")
            turns.append(pools.turn(seed, load.documents + seed))
    _report(turns, pools.tokens).finish(output)


def _report(turns: list[list[dict[str, Any]]], tokens: int) -> Report:
    report = Report("disaggregation", ["what", "ttft_ms", "tokens", "computed_tokens"], bars=["ttft_ms"])
    for index, what in enumerate(_STEPS):
        results = [turn[index] for turn in turns]
        computed = max(tokens - result["cached"] for result in results)
        ttft_ms = statistics.median(result["ttft_s"] for result in results) * 1e3
        report.row(what=what, ttft_ms=ttft_ms, tokens=tokens, computed_tokens=computed)
    both_ms = statistics.median(turn[0]["ttft_s"] + turn[1]["ttft_s"] for turn in turns) * 1e3
    report.row(what="prefill and continued", ttft_ms=both_ms, tokens=tokens)
    for name, other, goal in (
        ("warm_hit", 2, "at most 1.15"),
        ("hit_beside_storing", 3, "none"),
        ("prefill", 0, "none"),
    ):
        pairs, limits = ([turn[step]["ttft_s"] / turn[other]["ttft_s"] for turn in turns] for step in (1, 3))
        # The limit is a hit that waits for nothing, beside the same storing.
        report.ratio(f"disaggregation_ttft_over_{name}", pairs, goal, limits if name == "warm_hit" else ())
    return report
