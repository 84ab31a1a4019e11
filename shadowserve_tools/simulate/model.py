"""The model of the pipeline on BlueField-3, and of CacheGen-Async beside it. docs/design/simulation.md describes it in
words.

Everything is a closed form but for the load that a system can carry, which is where a falling curve crosses a line and
is found by bisection. There is no randomness, so there is no seed.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from shadowserve_tools.simulate.assumptions import PAPER_TOKENS, Fitted, Given, described, last

CHANGES: Final = ("fusion", "slices", "huffman", "kvrans")
"""The help of 'simulate bluefield' describes them."""
PAPER_SLICE_BYTES: Final = 2 << 20
PAPER_CHUNK_TOKENS: Final = 256
_ITERATIONS: Final = 60


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Workload of a system: the link to storage, which may be infinite, and prompts of whole, stored chunks."""

    bandwidth_gbps: float
    prompt_tokens: int = PAPER_TOKENS
    output_tokens: int = 16
    chunk_tokens: int = PAPER_CHUNK_TOKENS

    @property
    def chunks(self) -> int:
        return math.ceil(self.prompt_tokens / self.chunk_tokens)


@dataclass(frozen=True)
class Design:
    """The paper's design with some of our changes.

    Attributes:
        slice_bytes: decoded bytes of a slice where ``slices`` is among them.
        pipelined: false is the paper's "No CP".
        managed: false is the paper's "No MM": a chunk's buffers are registered when it comes.
    """

    changes: frozenset[str] = frozenset()
    slice_bytes: int = 256 << 10
    pipelined: bool = True
    managed: bool = True

    @property
    def name(self) -> str:
        return " + ".join(change for change in CHANGES if change in self.changes) or "ShadowServe"


@dataclass(frozen=True)
class Result:
    """Predictions for a system in one setting.

    Attributes:
        fetch_gbps, loaded_fetch_gbps: Rate of incoming compressed bytes, unloaded and at the highest load.
        ttft_s: Mean time to first token, unloaded.
        tpot_s: Mean time per output token at the highest load, ``requests_per_s``.
        ttft_at_rate_s: Mean time to first token at the given rate; None if that exceeds the highest load.
    """

    fetch_gbps: float
    ttft_s: float
    tpot_s: float
    requests_per_s: float
    loaded_fetch_gbps: float
    ttft_at_rate_s: float | None


class Model:
    """Both systems, for one set of given numbers; fits what has to be fitted when made."""

    def __init__(self, given: Given | None = None) -> None:
        self.given = given = given or Given()
        self._token_gbit = given.token_bytes * 8 / 1e9 / 2  # symbols: one byte for each element of two
        self.fitted = Fitted()
        for fit in (self._fit_cachegen, self._fit_contention, self._fit_rest, self._fit_load):
            self.fitted = dataclasses.replace(self.fitted, **fit())

    # ---- The two systems -----------------------------------------------------------------------------------------

    def shadowserve(self, setting: Setting, design: Design | None = None, rate: float = 0) -> Result:
        """Return the predictions for ShadowServe; TTFT under load at ``rate`` requests/s."""
        design = design or Design()
        ttft = self.ttft_s(setting, design)
        fetch = min(setting.bandwidth_gbps, self.network_gbps(setting, design))
        stolen = self.fitted.stolen_s * setting.prompt_tokens / PAPER_TOKENS
        return self._loaded(setting, lambda busy: (ttft, fetch), stolen, rate)

    def cachegen(self, setting: Setting, rate: float = 0) -> Result:
        """Return the predictions for CacheGen-Async; TTFT under load at ``rate`` requests/s."""
        fitted, prompts = self.fitted, setting.prompt_tokens / PAPER_TOKENS

        def unloaded(busy: float) -> tuple[float, float]:
            decoded = fitted.cachegen_decode_gbps * (1 - self.given.decode_slows_decompression * busy)
            fetch = min(setting.bandwidth_gbps, decoded)
            return prompts * (fitted.cachegen_rest_s + fitted.cachegen_gbit / fetch), fetch

        # Decompression takes as much GPU time from decode as it needs alone.
        stolen = prompts * fitted.cachegen_gbit / fitted.cachegen_decode_gbps
        return self._loaded(setting, unloaded, stolen, rate)

    # ---- The card ------------------------------------------------------------------------------------------------

    def ttft_s(self, setting: Setting, design: Design) -> float:
        """Return the unloaded TTFT: the rounds one after the other, and the rest in proportion to the tokens."""
        return self.fitted.rest_s * setting.prompt_tokens / PAPER_TOKENS + self.fetch_s(setting, design)

    def fetch_s(self, setting: Setting, design: Design) -> float:
        """Return the part of the unloaded TTFT in which a prompt's chunks go through the card."""
        chunks = setting.chunks
        registering = 0 if design.managed else chunks * self._registration_s(setting, design)
        if not design.pipelined:
            return registering + chunks * sum(self._stages_alone(setting).values())
        pieces = self._pieces(setting, design)
        stages = [seconds / pieces for seconds in self.stages_s(setting, design).values()]
        in_round = max(1, int(self.given.buffer_mib * 2**20 / (setting.chunk_tokens * self.given.token_bytes)))
        # Equal pieces: the first goes through all stages, the others come out at the pace of the slowest.
        fills = math.ceil(chunks / in_round) * (sum(stages) - max(stages))
        return registering + fills + chunks * pieces * max(stages)

    def _registration_s(self, setting: Setting, design: Design) -> float:
        """Return the seconds of registering and releasing a chunk's buffers, one at a time, without overlap."""
        symbols = self._token_gbit * setting.chunk_tokens
        registered_mib = (self._stored_gbit(setting, design) + 3 * symbols) / 8 * 1e9 / 2**20
        return registered_mib * self.given.register_us_per_mib / 1e6

    def stages_s(self, setting: Setting, design: Design) -> dict[str, float]:
        """Return seconds that each stage needs for a chunk when all of them run, in their order."""
        given, symbols = self.given, self._token_gbit * setting.chunk_tokens
        stored = self._stored_gbit(setting, design)
        stages = {"network": stored / min(setting.bandwidth_gbps, self.network_gbps(setting, design))}
        if "kvrans" in design.changes:
            a_symbol = given.kvrans_instructions + given.dequantize_instructions
            stages["decode"] = symbols / (given.cores * given.clock_ghz * given.instructions_per_cycle / a_symbol * 8)
        else:
            stages["deflate"] = symbols / (given.deflate_gbps * (1 - given.deflate_reduction))
            stages["dequantize"] = symbols / given.dequantize_gbps
        stages["dma"] = 2 * symbols / (given.dma_gbps * (1 - given.dma_reduction))
        sliced = "slices" in design.changes
        hand_over = given.hand_over_us / 1e6 * (self._pieces(setting, design) / given.tasks_in_flight if sliced else 1)
        return {name: seconds + hand_over for name, seconds in stages.items()}

    def stages_gbps(self, setting: Setting) -> dict[str, tuple[float, float]]:
        """Return each stage's throughput for chunks of a size, alone (figure 13a) and when all stages run (13b)."""
        given, symbols = self.given, self._token_gbit * setting.chunk_tokens
        sizes_and_peaks = {
            "network": (self._stored_gbit(setting, Design()), given.network_gbps),
            "deflate": (symbols, given.deflate_gbps),
            "dequantize": (symbols, given.dequantize_gbps),
            "dma": (2 * symbols, given.dma_gbps),
        }
        together = self.stages_s(dataclasses.replace(setting, bandwidth_gbps=math.inf), Design())
        return {
            name: (size / (size / peak + given.hand_over_us / 1e6), size / together[name])
            for name, (size, peak) in sizes_and_peaks.items()
        }

    def network_gbps(self, setting: Setting, design: Design) -> float:
        """Return the rate of the network stage while the other stages use the memory, on a link without limit.

        Each Gbit that engines move through the memory costs ``engines_s``, and each that cores move ``cores_s``.
        """
        engines, cores = self._traffic_gbit(setting, design)
        lost = self.fitted.engines_s * engines + self.fitted.cores_s * cores
        return 1 / (1 / self.given.network_gbps + lost / self._stored_gbit(setting, design))

    def network_by_traffic_alone_gbps(self) -> float:
        """Return the rate of the network stage with one cost for every moved Gbit: a test of the fit."""
        engines, cores = self._traffic_gbit(_AT_20, Design())
        lost = self.fitted.engines_s * (engines + cores)
        return 1 / (1 / self.given.network_gbps + lost / self._stored_gbit(_AT_20, Design()))

    def _traffic_gbit(self, setting: Setting, design: Design) -> tuple[float, float]:
        """Return Gbit of each chunk that engines, and that cores, read and write in memory; the network's own aside."""
        stored, symbols = self._stored_gbit(setting, design), self._token_gbit * setting.chunk_tokens
        elements = 2 * symbols
        if "fusion" in design.changes:
            slice_bytes = design.slice_bytes if "slices" in design.changes else PAPER_SLICE_BYTES
            working_set_mib = self.given.cores * 3 * slice_bytes / 2**20  # symbols in, twice as much out, on each core
            elements *= 1 - self.given.cached_share * min(1.0, self.given.l3_mib / working_set_mib)
        if "kvrans" in design.changes:
            return elements, stored + elements
        return stored + symbols + elements, symbols + elements

    def _stored_gbit(self, setting: Setting, design: Design) -> float:
        size = self.fitted.stored_gbit / _AT_20.chunks * setting.chunk_tokens / PAPER_CHUNK_TOKENS
        if "kvrans" in design.changes:
            return size * self.given.huffman_size * self.given.kvrans_size
        return size * self.given.huffman_size if "huffman" in design.changes else size

    def _pieces(self, setting: Setting, design: Design) -> int:
        """Return the number of pieces of a chunk that pass from stage to stage."""
        if "slices" not in design.changes:
            return 1
        return math.ceil(setting.chunk_tokens * self.given.token_bytes / 2 / design.slice_bytes)

    def _stages_alone(self, setting: Setting) -> dict[str, float]:
        """Return seconds of each stage for a chunk where only one stage runs at a time, on all cores."""
        given, symbols = self.given, self._token_gbit * setting.chunk_tokens
        return {
            "network": self._stored_gbit(setting, Design()) / min(setting.bandwidth_gbps, given.network_gbps),
            "deflate": symbols / given.deflate_gbps,
            "dequantize": symbols / given.dequantize_gbps * given.cores / given.all_cores,
            "dma": 2 * symbols / given.dma_gbps,
        }

    # ---- The GPU and the queue -----------------------------------------------------------------------------------

    def _tpot_s(self, setting: Setting, stolen: float, load: float) -> float:
        """Return a decode step's time: memory read for the weights and each request's KV, over what is left of the GPU.

        The number of other requests in a batch is load x output tokens x this time itself (Little's law).
        """
        bandwidth = self.given.gpu_gb_per_s * self.fitted.gpu_share
        weights = self.given.weights_gb / bandwidth
        request = setting.prompt_tokens * self.given.token_bytes / 1e9 / bandwidth
        left = 1 - stolen * load - request * load * setting.output_tokens
        return (weights + request) / left if left > 0 else math.inf

    def _loaded(
        self, setting: Setting, unloaded: Callable[[float], tuple[float, float]], stolen: float, rate: float
    ) -> Result:
        """Return the result of a system that fetches for one request at a time.

        ``unloaded``: TTFT and fetch rate as a function of the share of time in which decode is busy. ``stolen``: GPU
        seconds that a fetch takes from decode.
        """

        def at(load: float) -> tuple[float, float, float]:
            """Return TPOT, the fetches' service time, and the rate of fetching at a load."""
            tpot = self._tpot_s(setting, stolen, load)
            ttft, fetch = unloaded(1 - math.exp(-load * setting.output_tokens * tpot))
            return tpot, ttft + self.fitted.gap_s, fetch

        def carried(load: float) -> float:
            tpot, service, _ = at(load)
            return min(1 / service, self.given.requests_in_memory / (service + setting.output_tokens * tpot))

        ttft, fetch = unloaded(0)
        most = last(lambda load: carried(load) > load, 1 / (ttft + self.fitted.gap_s))
        tpot, _, loaded_fetch = at(most)
        waited = None
        if rate < most:
            # Poisson arrivals, one server, equal service times (M/D/1).
            service = at(rate)[1]
            used = rate * service
            waited = service - self.fitted.gap_s + used * service / (2 * (1 - used)) if used < 1 else None
        return Result(fetch, ttft, tpot, most, loaded_fetch, waited)

    # ---- Fits ----------------------------------------------------------------------------------------------------

    def _fit_cachegen(self) -> dict[str, float]:
        """Fit CacheGen: two points of TTFT over 1/bandwidth give a line, a third the bend, and the ratio at 10 Gbps
        the size.

        The paper gives all but one of these points as ratios to ShadowServe, which above 20 Gbps depend on the network
        stage. So each is found from the other, which converges at once.
        """
        given, size_ours = self.given, 0.0
        at_20, at_20_ours = given.cachegen_ttft_20_ms / 1e3, given.ttft_20_ms / 1e3
        for _ in range(_ITERATIONS):
            floor = at_20_ours - size_ours * (1 / 20 - 1 / given.network_together_gbps)
            size = (at_20 - floor / (1 + given.loss_30)) / (1 / 20 - 1 / 30)
            rest = at_20 - size / 20
            size_ours = ((rest + size / 10) / given.gain_10 - at_20_ours) / (1 / 10 - 1 / 20)
        return {
            "cachegen_gbit": size,
            "cachegen_rest_s": rest,
            "cachegen_decode_gbps": size / (floor / (1 + given.loss_40) - rest),
            "stored_gbit": size_ours,
        }

    def _fit_contention(self) -> dict[str, float]:
        """Alone, without dequantization's accesses, and together: two steps down, one for each kind of traffic."""
        given, stored = self.given, self._stored_gbit(_AT_20, Design())
        engines, cores = self._traffic_gbit(_AT_20, Design())
        alone, without, together = (
            1 / rate
            for rate in (given.network_gbps, given.network_without_dequantization_gbps, given.network_together_gbps)
        )
        return {"engines_s": (without - alone) * stored / engines, "cores_s": (together - without) * stored / cores}

    def _fit_rest(self) -> dict[str, float]:
        """Fit the time that the pipeline does not explain at 20 Gbps."""
        ttft = self.given.ttft_20_ms / 1e3
        gap = 1 / self.given.throughput_20 - ttft
        return {"rest_s": ttft - self.ttft_s(_AT_20, Design()), "gap_s": gap}

    def _fit_load(self) -> dict[str, float]:
        """Solve the decode step's equation, linear in both unknowns, for the four points by least squares.

        share x (1 - stolen x load) = (weights + request) / tpot + request x load x outputs, all at the data sheet's
        bandwidth; CacheGen-Async's ``stolen`` is known.
        """
        given = self.given
        request = PAPER_TOKENS * given.token_bytes / 1e9 / given.gpu_gb_per_s
        rows = []
        for bandwidth, ours, theirs in (
            (10, given.tpot_10_ms, given.cachegen_tpot_10_ms), (40, given.tpot_40_ms, given.cachegen_tpot_40_ms),
        ):  # fmt: skip
            setting = Setting(bandwidth_gbps=bandwidth)
            for tpot, cachegen in ((ours / 1e3, False), (theirs / 1e3, True)):
                load = self._load_at(setting, tpot, cachegen)
                known = self.fitted.cachegen_gbit / self.fitted.cachegen_decode_gbps * load if cachegen else 0.0
                read_s = (given.weights_gb / given.gpu_gb_per_s + request) / tpot
                rows.append((1 - known, 0.0 if cachegen else -load, read_s + request * load * setting.output_tokens))
        *terms, right = np.array(rows).T
        share, product = map(float, np.linalg.lstsq(np.stack(terms, axis=1), right)[0])
        return {"gpu_share": share, "stolen_s": product / share}

    def _load_at(self, setting: Setting, tpot: float, cachegen: bool) -> float:
        """Return the highest load of a system whose TPOT is known."""

        def service_s(load: float) -> float:
            if not cachegen:
                return self.ttft_s(setting, Design()) + self.fitted.gap_s
            busy = 1 - math.exp(-load * setting.output_tokens * tpot)
            decoded = self.fitted.cachegen_decode_gbps * (1 - self.given.decode_slows_decompression * busy)
            fetched = self.fitted.cachegen_gbit / min(setting.bandwidth_gbps, decoded)
            return self.fitted.cachegen_rest_s + fetched + self.fitted.gap_s

        return last(lambda load: load < 1 / service_s(load), 10.0)


_AT_20: Final = Setting(bandwidth_gbps=20)


@functools.cache
def _made(given: Given) -> Model:
    """Return the model of these numbers, cached, because fitting takes longer than predicting."""
    return Model(given)


def swing(value: Callable[[Model], float]) -> tuple[float, float]:
    """Return the least and the most that a value can be as each given number varies in its range.

    Each number is moved alone to find the end that raises the value; then all are at the raising ends, and at the
    others. Every fit is made again. That is the extreme where the value rises or falls with each number throughout.
    """
    base = Given()
    ranges = {name: its for name, its in described(Given) if its["low"] is not None}
    least, most = {}, {}
    for name, its in ranges.items():
        at = {end: value(_made(dataclasses.replace(base, **{name: its[end]}))) for end in ("low", "high")}
        if at["low"] != at["high"]:
            lower, upper = ("low", "high") if at["low"] < at["high"] else ("high", "low")
            least[name], most[name] = its[lower], its[upper]
    return value(_made(dataclasses.replace(base, **least))), value(_made(dataclasses.replace(base, **most)))
