"""Measures loading layer by layer, so that the engine computes as soon as the first layer has arrived.

Method: real vLLM with ``layer_order``, a model of 24 small layers, and prompts whose first half is stored behind a
link. The link's rate is set so that the transfer takes 0.9 of the time of computing the rest. Each prompt is served
layer by layer and chunk by chunk, over the link and without it, in turns. Answers must equal those of the engine
without a cache, and another prefix must give another answer. The registered memory is a ring for a quarter of the
longest prefix. ``staging_growth`` is the resident size of registered memory in the data plane after the longest
prompt, over that after the shortest.

With ``--s3`` the stored half is in a bucket behind the node, at the link's rate too. ``--tiers``, for the longest
prompt: it is on the data plane's own SSD, which reads at this rate, or half of it is in the data plane's memory and
half behind the link. The data plane is restarted before each of these runs.

With ``--beside``, requests with stored prefixes arrive at once, beside as many that decode. Loads go as a whole, or
layer by layer where the plugin predicts that the step waits within the interference budget, in turns.

Prediction: with C the time of computing the rest, chunk by chunk needs 1.9 C and layer by layer 1.04 C: at most 1.83,
1.6 to 1.75 with lookup and scattering. ``remote_over_local`` 1.04. Without a link 1.0 to 1.05. S3 adds 2 %. Staging
memory does not grow. SSD and bucket are read in parts of six layers, and begin 0.2 C later: 1.5. Mixed as near.
``tpot_beside_streams`` 1.0 to 1.01, ``ttft_beside_streams`` 0.85 to 0.95.
"""

import functools
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

import click

from shadowserve.errors import ShadowServeError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.parts.disks import Disks, working_folder
from shadowserve_tools.bench.parts.options import benchmark, folder_option, repeats_option, whole
from shadowserve_tools.bench.parts.reading import FREE_GBIT_PER_S, Bed
from shadowserve_tools.bench.parts.serving import (
    ANSWER_TIMEOUT_S,
    Model,
    check_answer,
    check_cached,
    made_up,
    shape_options,
)
from shadowserve_tools.bench.peers.buckets import MISSING
from shadowserve_tools.bench.peers.network import TCP_SHARE
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, in_turns, over, repeat


class _System(NamedTuple):
    layerwise: bool
    over_link: bool
    cold: bool = False  # the store has the records in its bucket, not in memory
    slow_bucket: bool = False  # the bucket has the link's rate
    near: float | None = None  # share of the chunks in the data plane's memory; None for a data plane without tiers
    on_ssd: bool = False  # the data plane's SSD has the records


_CHUNKWISE, _LAYERWISE = "chunk by chunk, link", "layer by layer, link"
_CHUNKWISE_LOCAL, _LOCAL = "chunk by chunk, local", "layer by layer, local"
_S3: Final = "layer by layer, link, S3"
_S3_WHOLE, _S3_LAYERWISE = "chunk by chunk, slow S3", "layer by layer, slow S3"
_SSD_WHOLE, _SSD_LAYERWISE = "chunk by chunk, SSD", "layer by layer, SSD"
_NEAR, _MIXED, _FAR = (f"layer by layer, {where}" for where in ("near", "near and far", "far"))
_SYSTEMS: Final = {
    _CHUNKWISE: _System(False, True),
    _LAYERWISE: _System(True, True),
    _S3: _System(True, True, cold=True),
    _LOCAL: _System(True, False),
    _CHUNKWISE_LOCAL: _System(False, False),
    _S3_WHOLE: _System(False, False, cold=True, slow_bucket=True),
    _S3_LAYERWISE: _System(True, False, cold=True, slow_bucket=True),
    _SSD_WHOLE: _System(False, False, near=0.0, on_ssd=True),
    _SSD_LAYERWISE: _System(True, False, near=0.0, on_ssd=True),
    _NEAR: _System(True, True, near=1.0),
    _MIXED: _System(True, True, near=0.5),
    _FAR: _System(True, True, near=0.0),
}
_RATIOS: Final = (
    ("chunkwise_over_layerwise", _CHUNKWISE, _LAYERWISE, "at least 1.6", "at least 1.2"),
    ("remote_over_local", _LAYERWISE, _LOCAL, "at most 1.056", "none; a shorter prompt"),
    ("s3_over_remote", _S3, _LAYERWISE, "reported", "reported"),
    ("s3_whole_over_layerwise", _S3_WHOLE, _S3_LAYERWISE, "at least 1.3", "none; a shorter prompt"),
    ("ssd_whole_over_layerwise", _SSD_WHOLE, _SSD_LAYERWISE, "at least 1.4", "none; a shorter prompt"),
    ("chunkwise_over_layerwise_local", _CHUNKWISE_LOCAL, _LOCAL, "none; without a link", "none; without a link"),
)
"""Name, two systems, and the goal of the longest prompt and of the others."""
_NO_CACHE: Final = "no cache"
_STREAMED_BESIDE, _WHOLE_BESIDE = "layer by layer, beside decoding", "as a whole, beside decoding"
_TRANSFER: Final = 0.9
"""Time of the link for the stored chunks, relative to the time to the first token without it."""
_RING: Final = 0.25
"""Share of the longest stored prefix that the registered memory holds."""
_PAIRS_BESIDE: Final = 12
_BESIDE_TRANSFER: Final = 0.25
"""Like ``_TRANSFER``, beside decoding: the step waits for its first layer, too."""
_DECODER_TOKENS, _DECODED_TOKENS, _ARRIVAL_S = 200, 240, 0.5
"""Prompt and output of a request that decodes, and when the others arrive."""
_HALF_WIDTH_MAX: Final = 0.01
_WARM: Final = made_up(DEFAULT_CHUNK_TOKENS + 1, 901)
"""Prompt that shows that a restarted data plane is connected."""
_ANSWER_TOKENS: Final = 4
"""Tokens in which prompts differ; only the first is compared later, because a batch may round others differently."""
_LEARNING: Final = 4
"""Pairs in which the plugin learns the link's rate; they do not count."""


@dataclass
class _Case:
    """A prompt with ``chunks`` stored chunks, and its times to the first token by system."""

    tokens: int
    chunks: int
    stored_bytes: int = 0
    gbit_per_s: float = 0.0
    answer: list[int] = field(default_factory=list)
    ttft_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    staging_bytes: int = 0

    @property
    def stored(self) -> int:
        return self.chunks * DEFAULT_CHUNK_TOKENS

    @property
    def prompt(self) -> list[int]:
        return made_up(self.tokens)


@benchmark("tokens", "stored", "system", "link_Gbit_per_s", "stored_MB", "ttft_ms", bars=["ttft_ms"])
@shape_options(layers=24, hidden=256, heads=4, head_size=64)
@click.option(
    "--prompt", "prompts", default=("4096:8", "8192:16"), show_default=True, multiple=True, metavar="TOKENS:CHUNKS",
    help="Tokens of a prompt, and its stored chunks of 256 tokens; repeatable.",
)  # fmt: skip
@click.option(
    "--s3/--no-s3", "over_s3", default=not MISSING, show_default="where Ceph is installed",
    help="Also measure a store that reads from a bucket, of Ceph if it is installed.",
)  # fmt: skip
@click.option("--tiers/--no-tiers", default=True, show_default=True, help="Also measure tiers of the data plane.")
@folder_option("Folder of the SSD's file. [default: memory, if it has space]")
@whole("--beside", 4, "Requests that load at once beside as many that decode; 0 leaves them out.", 0)
@repeats_option(5)
def layers(
    report: Report, programs: Programs, model: Model, prompts: tuple[str, ...], over_s3: bool, tiers: bool,
    folder: Path | None, beside: int, repeats: int,
) -> None:  # fmt: skip
    """Compare loading layer by layer with loading chunk by chunk.

    Store and engine are in two network namespaces, which needs root (or CAP_SYS_ADMIN and CAP_NET_ADMIN) and iproute2.
    """
    cases = sorted((_case(text) for text in prompts), key=lambda case: case.tokens)
    chunk_bytes = DEFAULT_CHUNK_TOKENS * model.kv_bytes
    buffer = int(max(_RING * max(case.chunks for case in cases), 2) * chunk_bytes)
    bed = Bed(
        programs, model, cases[-1].tokens, over_s3, running_max=max(2 * beside, 1), layer_order=True,
        fetch_buffer_bytes=buffer,
    )  # fmt: skip
    names = [name for name, system in _SYSTEMS.items() if (over_s3 or not system.cold) and system.near is None]
    for case in cases:
        _prepare(bed, case)
        runs = {name: functools.partial(_serve, bed, case, _SYSTEMS[name]) for name in names}
        _measure(case, runs, repeats)
        case.staging_bytes = bed.staging_bytes()
    shortest, longest = cases[0], cases[-1]
    if beside:
        bed.network.limit(shortest.gbit_per_s * _TRANSFER / _BESIDE_TRANSFER)
        _measure_beside(report, bed, shortest, beside)
    if tiers:
        _measure_tiers(report, programs, bed, longest, folder, repeats)
    for case in cases:
        _add_rows(report, case)
    if bed.bucket_name:
        report.more["bucket"] = bed.bucket_name
    if shortest is not longest:
        report.ratio("staging_growth", [longest.staging_bytes / shortest.staging_bytes], "at most 1.05")
    for case in cases:
        for name, own, other, goal, of_shorter in _RATIOS:
            if case.ttft_s[own]:
                suffix, goal = ("", goal) if case is longest else (f"_{case.tokens}", of_shorter)
                report.ratio(f"{name}{suffix}", over(case.ttft_s[own], case.ttft_s[other]), goal)
    if tiers:
        better = min((_NEAR, _FAR), key=lambda name: statistics.median(longest.ttft_s[name]))
        report.ratio("mixed_over_better", over(longest.ttft_s[_MIXED], longest.ttft_s[better]), "at most 1.05")


def _measure(case: _Case, runs: Mapping[str, Callable[[], float]], repeats: int) -> None:
    times = repeat(repeats, *runs.values(), description=f"{case.tokens} tokens", warm_up=0)
    case.ttft_s.update(zip(runs, times, strict=True))


def _case(text: str) -> _Case:
    tokens, _, chunks = text.partition(":")
    if not (tokens.isdigit() and chunks.isdigit()) or not 0 < int(chunks) * DEFAULT_CHUNK_TOKENS < int(tokens):
        raise click.BadParameter(f"{text!r} is not TOKENS:CHUNKS with fewer tokens in the chunks than there are")
    return _Case(int(tokens), int(chunks))


def _prepare(bed: Bed, case: _Case) -> None:
    """Compute a prompt, store its prefix, and set the link's rate for it."""
    bed.engine.call("hits", way="fetch")
    bed.network.limit(FREE_GBIT_PER_S)
    case.answer = bed.serve_computed(case.prompt, case.stored)
    case.ttft_s[_NO_CACHE] = [bed.serve(case.prompt, 0)["ttft_s"] for _ in range(2)]
    bed.store(case.prompt[: case.stored])
    before = bed.plane.statistics().fetched_bytes
    times = [_serve(bed, case, _SYSTEMS[_LOCAL]) for _ in range(2)]
    case.stored_bytes = (bed.plane.statistics().fetched_bytes - before) // len(times)
    case.gbit_per_s = max(case.stored_bytes * 8e-9 / (_TRANSFER * times[-1]) / TCP_SHARE, 0.001)


def _serve(bed: Bed, case: _Case, system: _System) -> float:
    if system.cold:
        bed.chill()
    bed.network.limit(case.gbit_per_s if system.over_link else FREE_GBIT_PER_S)
    if system.slow_bucket:
        bed.network.limit_server(case.gbit_per_s)
    bed.engine.call("layerwise", on=system.layerwise)
    before = bed.bucket()
    result = bed.serve(case.prompt, case.stored)
    if system.slow_bucket:
        bed.network.limit_server(FREE_GBIT_PER_S)
    read = bed.bucket().get("read_records", 0) - before.get("read_records", 0)
    if read != (case.chunks if system.cold else 0):
        raise ShadowServeError(f"{system}: {read} of {case.chunks} records came from the bucket")
    check_answer(result, case.answer)
    ttft_s: float = result["ttft_s"]
    return ttft_s


def _measure_beside(report: Report, bed: Bed, case: _Case, count: int) -> None:
    """Measure loads at once beside decoding, layer by layer and as a whole."""
    prompts = [made_up(case.tokens, seed) for seed in range(1000, 1000 + count)]
    answers = [bed.serve_computed(prompt, case.stored, _ANSWER_TOKENS)[:1] for prompt in prompts]
    for prompt in prompts:
        bed.store(prompt[: case.stored])
    decoders = [
        {"prompt": made_up(_DECODER_TOKENS, seed), "output": _DECODED_TOKENS, "at": 0.0} for seed in range(count)
    ]
    loaded = [{"prompt": prompt, "output": 1, "at": _ARRIVAL_S} for prompt in prompts]

    def serve(layerwise: bool) -> tuple[float, float]:
        """Return the mean time per token of those that decode, and the mean time to the first token of the others."""
        bed.engine.call("layerwise", on=layerwise)
        results = bed.engine.call("serve", requests=[*decoders, *loaded], timeout_s=ANSWER_TIMEOUT_S)
        decoding, loading = results[:count], results[count:]
        for result, answer in zip(loading, answers, strict=True):
            check_cached(result, case.stored)
            check_answer(result, answer)
        if min(each["end_s"] for each in decoding) < max(each["end_s"] for each in loading):
            raise ShadowServeError("the requests that decode ended before the others had their first token")
        return fmean(each["tpot_s"] for each in decoding), fmean(each["ttft_s"] for each in loading)

    bed.engine.call("hits", way="decide")  # as users' engines: the plugin learns, and keeps to the budget
    before = bed.engine.call("counters").get("layerwise_loads", 0)
    runs = {name: functools.partial(serve, name == _STREAMED_BESIDE) for name in (_STREAMED_BESIDE, _WHOLE_BESIDE)}
    found = in_turns(_PAIRS_BESIDE, runs, "beside decoding", warm_up=_LEARNING)
    (streamed_tpot, streamed_ttft), (whole_tpot, whole_ttft) = (zip(*own, strict=True) for own in found.values())
    for name, times in ((_STREAMED_BESIDE, streamed_ttft), (_WHOLE_BESIDE, whole_ttft)):
        report.row(tokens=case.tokens, stored=case.stored, system=name, ttft_ms=statistics.median(times) * 1e3)
    streamed = bed.engine.call("counters").get("layerwise_loads", 0) - before
    report.more["loads_beside_streamed"] = streamed
    if not streamed:
        click.echo("no load went layer by layer beside decoding: these ratios compare whole loads", err=True)
    report.more["loads_beside"] = count * (_PAIRS_BESIDE + _LEARNING)
    for name, ratios, most in (
        ("tpot_beside_streams", over(streamed_tpot, whole_tpot), 1.02),
        ("ttft_beside_streams", over(streamed_ttft, whole_ttft), 1.0),
    ):
        report.interval(name, ratios, f"at most {most:g}, ± {_HALF_WIDTH_MAX:g}", _HALF_WIDTH_MAX)


def _measure_tiers(
    report: Report, programs: Programs, bed: Bed, case: _Case, folder: Path | None, repeats: int
) -> None:
    """Measure what the tiers of the data plane have, at the link's rate."""
    room = 4 * (case.stored_bytes + (16 << 20))
    memory = {"memory_budget_bytes": room, "ahead_requests": 0}
    disks = programs.enter_context(Disks(programs.enter_context(working_folder(room, folder))))
    if disks.why_not:
        click.echo(f"the SSD is a file, as fast as it is: {disks.why_not}", err=True)
    report.more["ssd_capped"] = not disks.why_not
    disk = disks.make("tier", room, int(case.gbit_per_s * TCP_SHARE * 1e9 / 8))
    device = {"devices": [{"path": str(disk.path)} | ({} if disk.number else {"size": room})]}
    bed.network.limit(FREE_GBIT_PER_S)
    bed.store(_WARM)
    bed.engine.call("layerwise", on=False)  # a stream reads windows of records, which are not kept
    bed.restart_tiers(_WARM, **memory, **device)
    bed.serve(case.prompt, case.stored)  # the SSD gets the records

    def run(system: _System) -> float:
        bed.network.limit(FREE_GBIT_PER_S)
        bed.restart_tiers(_WARM, **memory, **(device if system.on_ssd else {}))
        if near := int((system.near or 0.0) * case.chunks) * DEFAULT_CHUNK_TOKENS:
            bed.engine.call("layerwise", on=False)
            bed.serve(case.prompt[: near + 1], near)
        before = disk.read_bytes or 0
        ttft_s = _serve(bed, case, system)
        read, wanted = (disk.read_bytes or 0) - before, case.stored_bytes if system.on_ssd else 0
        if disk.read_bytes is not None and not wanted <= read <= 2 * wanted:
            raise ShadowServeError(f"{read} bytes came from the SSD, of {wanted}")
        return ttft_s

    names = [name for name, system in _SYSTEMS.items() if system.near is not None]
    with disks.capped():
        _measure(case, {name: functools.partial(run, _SYSTEMS[name]) for name in names}, repeats)


def _add_rows(report: Report, case: _Case) -> None:
    for name, times in case.ttft_s.items():
        system = _SYSTEMS.get(name)
        waits_for_link = system and (system.over_link or system.slow_bucket or system.on_ssd)
        report.row(
            tokens=case.tokens, stored=case.stored if system else 0, system=name,
            link_Gbit_per_s=case.gbit_per_s if waits_for_link else "",
            stored_MB=case.stored_bytes / 1e6 if system else "", ttft_ms=statistics.median(times) * 1e3,
        )  # fmt: skip
