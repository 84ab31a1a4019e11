"""Measures prefetching the KV of requests that wait.

Method: real vLLM with blocks for one request. The first request computes 512 tokens and decodes 128; two requests
with stored prompts wait behind it. Their KV is in the data plane's memory (*resident*), behind a link of 1 Gbit/s or
on its SSD and prefetched while they wait (*prefetched*), or fetched when they have blocks (*fetched*). The time from
getting blocks to the first token counts. Answers must equal those without a cache.

Prediction: 50 ms *resident*, 1.02 times that *prefetched*; *fetched* over the link 310 ms. From the SSD *prefetched*
is 0.8 of *fetched*.
"""

import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from shadowserve.errors import ShadowServeError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.parts.options import benchmark, folder_option, real, repeats_option, whole
from shadowserve_tools.bench.parts.reading import Bed, held_tokens
from shadowserve_tools.bench.parts.serving import Model, check_answer, check_cached, made_up, shape_options
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, in_turns, over


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
_FIRST_TOKENS: Final = 512
_FIRST_OUTPUT: Final = 128
"""Output of the first request. It holds the blocks, and the others are admitted between its steps."""
_BEHIND_S: Final = 0.1
"""Time after which the first request has been looked up."""
_RATIOS: Final = (
    ("prefetched_over_resident", _PREFETCHED, _RESIDENT, "at most 1.1"),
    ("prefetched_over_fetched", _PREFETCHED, _FETCHED, "none; what prefetch gains, over the link"),
    ("ssd_prefetched_over_resident", _SSD_PREFETCHED, _RESIDENT, "at most 1.1"),
    ("ssd_prefetched_over_fetched", _SSD_PREFETCHED, _SSD_FETCHED, "none; what prefetch gains, from the SSD"),
)


@benchmark("system", "link_Gbit_per_s", "next_ms", "after_it_ms", "ttft_ms", bars=["next_ms"])
@shape_options(layers=12, hidden=256, heads=4, head_size=64)
@whole("--prompt tokens", 4096, "Tokens of each prompt.", DEFAULT_CHUNK_TOKENS)
@whole("--output-tokens", 8, "Tokens of an answer.")
@real("--link gbit_per_s", 1.0, "Rate of the link to the store, Gbit/s.", 0.001, 100)
@folder_option("Folder on the SSD. [default: folder of temporary files]")
@repeats_option(5)
def queue(
    report: Report, programs: Programs, model: Model, tokens: int, output_tokens: int, gbit_per_s: float,
    folder: Path | None, repeats: int,
) -> None:  # fmt: skip
    """Measure prefetching for requests that wait behind another one."""
    bed = Bed(programs, model, tokens, one_request=True)
    bed.network.limit(gbit_per_s)
    case = _Case(bed, programs.disk(folder), model, tokens, output_tokens)
    case.prepare()
    runs = {name: functools.partial(case.run, system) for name, system in _SYSTEMS.items()}
    found = in_turns(repeats, runs, warm_up=0)
    turns = {
        name: [[each["retrieval_s"] + each["last_s"] for each in run] for run in own] for name, own in found.items()
    }
    for name, system in _SYSTEMS.items():
        next_s, after_it_s = (statistics.median(times) for times in zip(*turns[name], strict=True))
        ttfts = [statistics.fmean(each["ttft_s"] for each in run) for run in found[name]]
        report.row(
            system=name, link_Gbit_per_s="" if system.on_ssd or system.resident else gbit_per_s, next_ms=next_s * 1e3,
            after_it_ms=after_it_s * 1e3, ttft_ms=statistics.median(ttfts) * 1e3,
        )  # fmt: skip
    for ratio, own, other, goal in _RATIOS:
        report.ratio(ratio, over(map(sum, turns[own]), map(sum, turns[other])), goal)


class _Case:
    """The prompts that wait, and their answers."""

    def __init__(self, bed: Bed, disk: Path, model: Model, tokens: int, output_tokens: int) -> None:
        self._bed, self._tokens, self._output = bed, tokens, output_tokens
        self._prompts = [made_up(tokens, seed) for seed in range(_WAITING)]
        self._first = made_up(_FIRST_TOKENS, _FIRST)
        self._warm = made_up(DEFAULT_CHUNK_TOKENS + 1, _WARM)
        self._answers: list[list[int]] = []
        room = _SPARE * (tokens + DEFAULT_CHUNK_TOKENS) * model.kv_bytes + (64 << 20)
        self._memory = {"memory_budget_bytes": room}
        self._device = {"path": str(disk / "tier"), "size": room}

    def prepare(self) -> None:
        held = held_tokens(self._tokens)
        for seed, tokens in enumerate(self._prompts):
            self._answers.append(self._bed.serve_computed(tokens, held, self._output, seed + _FIRST + _WARM))
        for tokens in (*self._prompts, self._warm):
            self._bed.store(tokens)
        self._begin(_SYSTEMS[_SSD_FETCHED])
        self._fetch_all()

    def _fetch_all(self) -> None:
        for tokens, answer in zip(self._prompts, self._answers, strict=True):
            self._check(self._bed.engine.ask(tokens, self._output), answer)

    def _check(self, result: dict[str, Any], answer: Sequence[int]) -> None:
        check_cached(result, held_tokens(self._tokens))
        check_answer(result, list(answer))

    def _begin(self, system: _System) -> None:
        """Restart the data plane, and wait until the engine uses it."""
        tiers: dict[str, Any] = self._memory | {"ahead_requests": None if system.prefetches else 0}
        if system.on_ssd:
            tiers["devices"] = [self._device]
        self._bed.restart_tiers(self._warm, **tiers)

    def run(self, system: _System) -> list[dict[str, Any]]:
        """Let the prompts wait behind one that is computed, and return their results."""
        self._begin(system)
        if system.resident:
            self._fetch_all()
        orders = [{"prompt": self._first, "output": _FIRST_OUTPUT, "at": 0.0}]
        orders += [{"prompt": tokens, "output": self._output, "at": _BEHIND_S} for tokens in self._prompts]
        first, *waiting = self._bed.engine.call("serve", requests=orders)
        if first["cached"]:
            raise ShadowServeError("the first prompt was to be computed")
        for result, answer in zip(waiting, self._answers, strict=True):
            self._check(result, answer)
        return list(waiting)
