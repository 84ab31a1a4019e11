"""Measures what compression gains where the link is the limit.

Method: the fetch of ``bench fetch``, with every store in one network namespace, every client in another, and a link
of 1, 2, 4 or 8 Gbit/s between them (``veth`` and ``tbf``). This needs CAP_SYS_ADMIN and CAP_NET_ADMIN: run it as
root, or within ``unshare --user --map-root-user --net``. A ``veth`` pair on two cores carries about 9 Gbit/s.
LMCache's fp8 and the naive client also compress, and are lossy. ``prefill to match`` is the speed of prefill at which
computing the KV takes as long as fetching it.

Prediction: TCP reaches 95.7 % of the rate. Raw peers deliver that; ShadowServe 1.5 times as much lossless, 4.4 times
near lossless and 4 times binned, 0.9 of that at 8 Gbit/s. Steps of ``near_lossless`` give the KV the bits an element
that ``bench quality`` measures on a real model. It is 1.6 to 12 times ahead of the naive client and 2 to 7 times ahead
of LMCache's fp8.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from shadowserve.chunk import Quantizer
from shadowserve_tools.bench.fetch import LIMIT, add_ours, add_raw, name_of, peers_option, raw_values
from shadowserve_tools.bench.parts.options import benchmark, real, repeats_option
from shadowserve_tools.bench.parts.workload import Workload, llama_8b
from shadowserve_tools.bench.peers.contender import Costs, Field
from shadowserve_tools.bench.peers.installed import L2, Bed, Starts, add_installed, lmcache, lmcache_server
from shadowserve_tools.bench.peers.network import linked
from shadowserve_tools.charts import Chart
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, cpus, over, timed, walls

FLOPS_PER_TOKEN: Final = 2 * 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
"""Prefill of a token with Llama-3.1-8B: two operations for each weight of its matrices, without attention."""
COLUMNS: Final = (
    "link_Gbit_per_s", "system", "GB_per_s", "over_link", "cpu_s_per_GB", "prefill_to_match_tokens_per_s", "note",
)  # fmt: skip


@benchmark(*COLUMNS)
@real("--rate rates", (1.0, 2.0, 4.0, 8.0), "Rate of the link, in Gbit/s; repeatable.", 0.1, 100)
@real("--chunks-per-gbit", 2.0, "Chunks of 256 tokens for each Gbit/s, so that all rates take equally long.", 0.1, 64)
@repeats_option(3)
@peers_option
def link(
    report: Report, programs: Programs, rates: tuple[float, ...], chunks_per_gbit: float, repeats: int,
    peers_python: Path,
) -> None:  # fmt: skip
    """Compare fetches through links of limited rates.

    Stores and clients are in two network namespaces, which needs root (or CAP_SYS_ADMIN and CAP_NET_ADMIN) and
    iproute2. The machine's own network is not changed.
    """
    counts = {rate: max(1, round(rate * chunks_per_gbit)) for rate in rates}
    chunks = max(counts.values())
    network = programs.enter_context(linked())
    lossless = llama_8b(chunks)
    near = llama_8b(chunks, quantizer=Quantizer.WEIGHTED)
    binned = llama_8b(chunks, quantizer=Quantizer.BINNED)
    simple = llama_8b(chunks, quantizer=Quantizer.BINNED, codec="deflate")
    bed = Bed(peers_python, programs.logs, raw_values(programs.logs, lossless), chunks, network)
    field = Field()
    add_ours(field, programs, bed, {name_of(each): each for each in (lossless, near, binned)}, simple)
    redis = add_raw(field, programs, bed, [(True, True)])
    fp8 = functools.partial(lmcache_server, l2=L2(redis=redis, serde="fp8"))
    starts: Starts = {
        "LMCache, lm://": ("lmcache", lmcache),
        "LMCache server, fp8 (lossy), Redis tuned": ("lmcache", fp8),
    }
    add_installed(field, programs, bed, starts)
    measured: dict[float, Costs] = {}
    for rate, count in counts.items():
        network.limit(rate)
        measured[rate] = field.measure(repeats, count, f"measuring at {rate:g} Gbit/s")
    for rate, costs in measured.items():
        _add_rows(report, field, rate, counts[rate] * lossless.layout.raw_bytes, costs, lossless)
    for name, reason in field.absent.items():
        report.row(system=name, note=reason)
    _add_recompute(report, lossless)
    slowest = min(counts)
    gains = over(*(walls(measured[slowest][name_of(each)]) for each in (near, lossless)))
    report.ratio("near_lossless_over_lossless", gains, f"at most 0.4; at {slowest:g} Gbit/s")
    for prefix, workload in (("lossless_", lossless), ("near_lossless_", near), ("", binned)):
        compression = workload.raw_bytes / workload.stored_bytes
        words = "at least 0.9; of {} times the compression"
        _add_ratios(report, field, measured, workload, "raw", f"{prefix}over_raw_peers", compression, words)
        report.ratio(f"{prefix}raw_over_stored", [compression], "none; the compression")
    _add_ratios(report, field, measured, binned, "compressing", "over_compressing_peers", 1.0, "at least 1; of {}")
    report.charts.append(_chart(report, [lossless, near, binned]))


def _add_rows(report: Report, field: Field, rate: float, raw_bytes: int, costs: Costs, workload: Workload) -> None:
    limit_s = float(np.median(walls(costs[LIMIT])))
    for each in field.contenders:
        wall_s = float(np.median(walls(costs[each.name])))
        tokens = raw_bytes / workload.layout.raw_bytes * workload.layout.tokens
        report.row(
            link_Gbit_per_s=rate,
            system=each.name,
            GB_per_s=raw_bytes / wall_s / 1e9,
            over_link=limit_s / wall_s,
            cpu_s_per_GB=float(np.median(cpus(costs[each.name]))) / raw_bytes * 1e9,
            prefill_to_match_tokens_per_s=tokens / wall_s,
            note=each.note,
        )


def _add_recompute(report: Report, workload: Workload) -> None:
    """Add the row of an engine on these cores that only computes the matrix products of Llama-3.1-8B's prefill."""
    tokens_per_s = _matrix_flops() / FLOPS_PER_TOKEN
    report.row(
        system="recompute on these cores, at most",
        GB_per_s=tokens_per_s * workload.layout.raw_bytes / workload.layout.tokens / 1e9,
        prefill_to_match_tokens_per_s=tokens_per_s,
        note="matrix products alone",
    )


def _matrix_flops() -> float:
    """Return the best floating-point operations per second of a layer's largest product, over 256 tokens.

    It uses bfloat16 with torch, as vLLM's CPU engine does, or single precision with numpy if torch is missing.
    """
    rows, inner, columns = 256, 4096, 14336
    multiply: Callable[[], object]
    try:
        import torch

        left, right = torch.ones(rows, inner, dtype=torch.bfloat16), torch.ones(inner, columns, dtype=torch.bfloat16)
        multiply = functools.partial(torch.matmul, left, right)
    except ImportError:
        multiply = functools.partial(np.matmul, np.ones((rows, inner), "f4"), np.ones((inner, columns), "f4"))
    return 2 * rows * inner * columns / min(timed(multiply) for _ in range(3))


def _add_ratios(
    report: Report, field: Field, measured: dict[float, Costs], workload: Workload, kind: str, name: str,
    factor: float, words: str,
) -> None:  # fmt: skip
    """Compare with the fastest peer of a kind, whose speed counts times ``factor``, at each rate."""
    for rate, costs in measured.items():
        peer = field.best(costs, kind, walls)
        gains = over(walls(costs[peer]), walls(costs[name_of(workload)]))
        report.ratio(f"{name}_{rate:g}", [gain / factor for gain in gains], words.format(peer))


def _chart(report: Report, workloads: list[Workload]) -> Chart:
    series: dict[str, list[tuple[float, float]]] = {}
    for row in report.rows:
        if "link_Gbit_per_s" in row:
            series.setdefault(row["system"], []).append((row["link_Gbit_per_s"], row["GB_per_s"]))
    limit = series["link (plain sockets)"] = series.pop(LIMIT)
    for workload in workloads:
        ratio = workload.raw_bytes / workload.stored_bytes
        series[f"link x {ratio:.2f}, the compression"] = [(rate, ratio * speed) for rate, speed in limit]
    return Chart("Delivered through a link", x="link, Gbit/s", y="raw GB/s", series=series, x_log=True, y_log=True)
