"""Measures prefetching the KV of requests that wait.

Method: real vLLM with blocks for one request. The first request computes 512 tokens and decodes 128; two requests
with stored prompts wait behind it. Their KV is in the data plane's memory (*resident*), behind a link of 1 Gbit/s or
on its SSD and prefetched while they wait (*prefetched*), or fetched when they have blocks (*fetched*). The time from
getting blocks to the first token counts. Answers must equal those without a cache.

Prediction: 50 ms *resident*, 1.02 times that *prefetched*; *fetched* over the link 310 ms. From the SSD *prefetched*
is 0.8 of *fetched*.
"""

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from shadowserve.errors import ShadowServeError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.layers import Bed
from shadowserve_tools.bench.parts.engine import prompt
from shadowserve_tools.bench.parts.options import folder_option
from shadowserve_tools.bench.parts.serving import VOCABULARY, Model, shape_options
from shadowserve_tools.bench.peers.network import linked
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Output, Report, output_options


class _System(NamedTuple):
    """Place of the KV of waiting requests: prefetched or not, on the SSD or in the store, or in memory already."""

    prefetches: bool = False
    on_ssd: bool = False
    resident: bool = False


_RESIDENT, _PREFETCHED, _FETCHED = "resident", "prefetched, link", "fetched, link"
_SSD_PREFETCHED, _SSD_FETCHED = "prefetched, SSD", "fetched, SSD"
_SYSTEMS: Final = {
    _RESIDENT: _System(resident=True),
    _PREFETCHED: _System(prefetches=True),
    _FETCHED: _System(),
    _SSD_PREFETCHED: _System(prefetches=True, on_ssd=True),
    _SSD_FETCHED: _System(on_ssd=True),
}
_WAITING: Final = 2
_SPARE: Final = 4 * _WAITING
"""Prompts that fit in the tiers' memory; a quarter of it is for prefetched KV."""
_FIRST, _WARM = 900, 901
"""Seeds of the prompt that is computed first, and of the one that shows that everything is connected."""
_RECONNECT_TIMEOUT_S: Final = 60.0
_RECONNECT_POLL_S: Final = 0.1
_FIRST_TOKENS: Final = 512
_FIRST_OUTPUT: Final = 128
"""Output of the first request. It holds the blocks, and the others are admitted between its steps."""
_BEHIND_S: Final = 0.1
"""Time after which the first request has been looked up."""


@click.command()
@shape_options(layers=12, hidden=256, heads=4, head_size=64)
@click.option(
    "--prompt", "tokens", default=4096, show_default=True, type=click.IntRange(DEFAULT_CHUNK_TOKENS),
    help="Tokens of each prompt.",
)  # fmt: skip
@click.option("--output-tokens", default=8, show_default=True, type=click.IntRange(1), help="Tokens of an answer.")
@click.option(
    "--link", "gbit_per_s", default=1.0, show_default=True, type=click.FloatRange(0.001, 100),
    help="Rate of the link to the store, Gbit/s.",
)  # fmt: skip
@folder_option("Folder on the SSD. [default: folder of temporary files]")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1, 50), help="Number of pairs.")
@output_options
def queue(
    model: Model,
    tokens: int,
    output_tokens: int,
    gbit_per_s: float,
    folder: Path | None,
    repeats: int,
    output: Output,
) -> None:
    """Measure prefetching for requests that wait behind another one."""
    with Programs() as programs:
        network = programs.enter_context(linked())
        network.limit(gbit_per_s)
        disk = programs.disk(folder)
        progress = programs.progress(len(_SYSTEMS) * repeats + 1)
        case = _Case(
            Bed(programs, programs.logs, network, model, tokens, 2, one_request=True),
            disk,
            model,
            tokens,
            output_tokens,
        )
        case.prepare()
        for number in range(repeats):
            for name in _SYSTEMS if number % 2 == 0 else reversed(_SYSTEMS):
                progress(name)
                case.run(name)
    case.report(gbit_per_s).finish(output)


class _Case:
    """The prompts and their results."""

    def __init__(self, bed: Bed, disk: Path, model: Model, tokens: int, output_tokens: int) -> None:
        self._bed = bed
        self._output = output_tokens
        self._tokens = tokens
        self._prompts = [prompt(seed, tokens, VOCABULARY) for seed in range(_WAITING)]
        self._first = prompt(_FIRST, _FIRST_TOKENS, VOCABULARY)
        self._warm = prompt(_WARM, DEFAULT_CHUNK_TOKENS + 1, VOCABULARY)
        self._stored = min(tokens // DEFAULT_CHUNK_TOKENS * DEFAULT_CHUNK_TOKENS, tokens - 1)
        self._answers: list[list[int]] = []
        prompt_bytes = (tokens + DEFAULT_CHUNK_TOKENS) * model.kv_bytes
        self._memory = {"memory_budget_bytes": _SPARE * prompt_bytes + (64 << 20), "scrub_bytes_per_s": 0}
        self._device = {"path": str(disk / "tier"), "size": _SPARE * prompt_bytes + (64 << 20)}
        self._turn_s: dict[str, list[list[float]]] = defaultdict(list)  # by run and prompt
        self._ttft_s: dict[str, list[float]] = defaultdict(list)

    def prepare(self) -> None:
        """Compute and store the prompts, and fill the device.

        Raises:
            ShadowServeError: The answer does not depend on the stored part.
        """
        self._bed.engine.call("reading", only=True)
        for seed, tokens in enumerate(self._prompts):
            answer = self._ask([tokens])[0]["answer"]
            other = [*prompt(seed + _FIRST + _WARM, self._stored, VOCABULARY), *tokens[self._stored :]]
            if self._ask([other])[0]["answer"] == answer:
                raise ShadowServeError("the answer does not depend on the prompt: equal answers would show nothing")
            self._answers.append(answer)
        for tokens in (*self._prompts, self._warm):
            self._bed.store(tokens)
        self._begin(_SYSTEMS[_SSD_FETCHED])
        self._fetch_all()

    def _ask(self, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Serve prompts, all others just after the first, and return their results."""
        orders = [
            {
                "prompt": list(tokens),
                "tokens": len(tokens),
                "output": _FIRST_OUTPUT if tokens is self._first else self._output,
                "at": _BEHIND_S * (place > 0),
            }
            for place, tokens in enumerate(prompts)
        ]
        results: list[dict[str, Any]] = self._bed.engine.call("serve", requests=orders)
        return results

    def _fetch_all(self) -> None:
        for tokens, answer in zip(self._prompts, self._answers, strict=True):
            self._check(self._ask([tokens])[0], answer)

    def _check(self, result: dict[str, Any], answer: list[int]) -> None:
        if result["cached"] != self._stored:
            raise ShadowServeError(f"{result['cached']} tokens were not computed, instead of {self._stored}")
        if result["answer"] != answer:
            raise ShadowServeError(f"{result['answer']} with a cache, {answer} without")

    def _begin(self, system: _System) -> None:
        """Restart the data plane, and wait until the engine uses it."""
        tiers: dict[str, Any] = self._memory | {"ahead_requests": None if system.prefetches else 0}
        if system.on_ssd:
            tiers["devices"] = [self._device]
        self._bed.restart_plane("--tiers", json.dumps(tiers), "--shutdown-timeout-s", "60")
        ends_s = time.monotonic() + _RECONNECT_TIMEOUT_S
        while self._ask([self._warm])[0]["cached"] != DEFAULT_CHUNK_TOKENS:
            if time.monotonic() > ends_s:
                raise ShadowServeError(
                    f"the engine fetched nothing from the restarted data plane within {_RECONNECT_TIMEOUT_S:g} s"
                )
            time.sleep(_RECONNECT_POLL_S)  # the plugin's circuit breaker may be open

    def run(self, name: str) -> None:
        """Let the prompts wait behind one that is computed, and record their times."""
        system = _SYSTEMS[name]
        self._begin(system)
        if system.resident:
            self._fetch_all()
        first, *waiting = self._ask([self._first, *self._prompts])
        if first["cached"]:
            raise ShadowServeError("the first prompt was to be computed")
        for result, answer in zip(waiting, self._answers, strict=True):
            self._check(result, answer)
        self._turn_s[name].append([result["retrieval_s"] + result["last_s"] for result in waiting])
        self._ttft_s[name].append(statistics.fmean(result["ttft_s"] for result in waiting))

    def report(self, gbit_per_s: float) -> Report:
        """Return the report."""
        report = Report("queue", ["system", "link_Gbit_per_s", "next_ms", "after_it_ms", "ttft_ms"], bars=["next_ms"])
        for name, system in _SYSTEMS.items():
            following = [statistics.median(times) * 1e3 for times in zip(*self._turn_s[name], strict=True)]
            report.row(
                system=name,
                link_Gbit_per_s="" if system.on_ssd or system.resident else gbit_per_s,
                next_ms=following[0],
                after_it_ms=following[1],
                ttft_ms=statistics.median(self._ttft_s[name]) * 1e3,
            )
        for ratio, name, other, goal in (
            ("prefetched_over_resident", _PREFETCHED, _RESIDENT, "at most 1.1"),
            ("prefetched_over_fetched", _PREFETCHED, _FETCHED, "none; what prefetch gains, over the link"),
            ("ssd_prefetched_over_resident", _SSD_PREFETCHED, _RESIDENT, "at most 1.1"),
            ("ssd_prefetched_over_fetched", _SSD_PREFETCHED, _SSD_FETCHED, "none; what prefetch gains, from the SSD"),
        ):
            pairs = zip(self._turn_s[name], self._turn_s[other], strict=True)
            report.ratio(ratio, [sum(mine) / sum(its) for mine, its in pairs], goal)
        return report
