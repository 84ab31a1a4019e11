"""Measures what compression gains where the link is the limit.

Method: the fetch of ``bench fetch``, with every store in one network namespace, every client in another, and a link
of 1, 2, 4 or 8 Gbit/s between them (``veth`` and ``tbf``). This needs CAP_SYS_ADMIN and CAP_NET_ADMIN: run it as
root, or within ``unshare --user --map-root-user --net``. A ``veth`` pair on two cores carries about 9 Gbit/s.
LMCache's fp8 and the naive client also compress, and are lossy. ``prefill to match`` is the speed of prefill at which
computing the KV takes as long as fetching it.

Prediction: TCP reaches 95.7 % of the rate. Raw peers deliver that; ShadowServe 1.5 times as much lossless and 4 times
binned, 0.9 of that at 8 Gbit/s. It is 1.6 to 12 times ahead of the naive client and 2 to 7 times ahead of LMCache's
fp8.
"""

import functools
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import click
import numpy as np

from shadowserve.chunk import Quantizer
from shadowserve_tools.bench.fetch import (
    LIMIT,
    UNCOMPRESSED,
    best,
    codec_option,
    gigabytes_per_s,
    naive,
    ours,
    ours_name,
    peers_option,
    raw_values,
    runs_of,
    uncompressed_like,
    wall_gains,
)
from shadowserve_tools.bench.parts.workload import Workload, client, llama_8b, put
from shadowserve_tools.bench.peers.contender import Contender
from shadowserve_tools.bench.peers.driver import Values
from shadowserve_tools.bench.peers.installed import Bed, Start, lmcache, lmcache_server, start_installed
from shadowserve_tools.bench.peers.network import Link, linked
from shadowserve_tools.bench.peers.sockets import (
    Memory,
    Reader,
    fastest,
    filled_redis,
    plain_reader,
    plain_sockets,
    redis_reader,
)
from shadowserve_tools.charts import Chart
from shadowserve_tools.processes import Child, Programs, start_data_plane, start_storage
from shadowserve_tools.report import Cost, Output, Report, output_options, repeat

FLOPS_PER_TOKEN: Final = 2 * 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
"""Prefill of a token with Llama-3.1-8B: two operations for each weight of its matrices, without attention."""
COLUMNS: Final = (
    "link_Gbit_per_s", "system", "GB_per_s", "over_link", "cpu_s_per_GB", "prefill_to_match_tokens_per_s", "note",
)  # fmt: skip

Costs = dict[Contender, list[Cost]]


@click.command()
@click.option(
    "--rate",
    "rates",
    default=(1.0, 2.0, 4.0, 8.0),
    show_default=True,
    multiple=True,
    type=click.FloatRange(0.1, 100),
    help="Rate of the link, in Gbit/s; repeatable.",
)
@click.option(
    "--chunks-per-gbit",
    default=2.0,
    show_default=True,
    type=click.FloatRange(0.1, 64),
    help="Chunks of 256 tokens for each Gbit/s, so that all rates take equally long.",
)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1, 50), help="Number of pairs.")
@codec_option
@peers_option
@output_options
def link(
    rates: tuple[float, ...],
    chunks_per_gbit: float,
    repeats: int,
    codec: str,
    peers_python: Path,
    output: Output,
) -> None:
    """Compare fetches through links of limited rates.

    Stores and clients are in two network namespaces, which needs root (or CAP_SYS_ADMIN and CAP_NET_ADMIN) and
    iproute2. The machine's own network is not changed.
    """
    report = Report("link", COLUMNS)
    counts = {rate: max(1, round(rate * chunks_per_gbit)) for rate in rates}
    with Programs() as programs:
        network = programs.enter_context(linked())
        chunks = max(counts.values())
        lossless = llama_8b(chunks, codec=codec)
        binned = llama_8b(chunks, quantizer=Quantizer.BINNED, codec=codec)
        contenders, absent = _contenders(programs, network, programs.logs, lossless, binned, peers_python)
        measured: dict[float, Costs] = {}
        for rate, count in counts.items():
            network.limit(rate)
            runs = repeat(
                repeats,
                *(functools.partial(each.run, count) for each in contenders),
                description=f"measuring at {rate:g} Gbit/s",
            )
            measured[rate] = dict(zip(contenders, runs, strict=True))
    for rate, costs in measured.items():
        _rows(report, rate, counts[rate] * lossless.layout.raw_bytes, costs, lossless)
    for name, reason in absent.items():
        report.row(system=name, note=reason)
    _recompute(report, lossless)
    _ratios(report, measured, lossless, binned)
    report.charts.append(_chart(measured, counts, [lossless, binned]))
    report.finish(output)


def _contenders(
    stack: ExitStack, network: Link, logs: Path, lossless: Workload, binned: Workload, peers_python: Path
) -> tuple[list[Contender], dict[str, str]]:
    """Start all systems: stores behind the link, clients in front of it."""
    chunks = len(lossless.keys)
    bed = Bed(peers_python, logs, raw_values(logs, lossless), chunks, network)
    values = Values(bed.values_file)
    memory = Memory(values, chunks)
    contenders = _ours_and_naive(stack, network, logs, lossless, binned, values)

    def inside(reader: Callable[..., Reader], server: Child, **options: bool) -> Callable[[int], Reader]:
        def opened(count: int) -> Reader:
            with network.client_side():
                return reader(server.address, count, memory=memory, **options)

        return opened

    sockets = stack.enter_context(plain_sockets(logs, bed.values_file, chunks, network))
    contenders.append(fastest(stack, LIMIT, sockets, memory, inside(plain_reader, sockets)))
    store = stack.enter_context(filled_redis(logs, values, chunks, tuned=True, network=network))
    contenders.append(
        fastest(
            stack,
            "Redis tuned, GETRANGE 2 MiB",
            store,
            memory,
            inside(redis_reader, store, pieces=True),
            kind="raw",
        )
    )
    starts: dict[str, tuple[str, Start]] = {
        "LMCache, lm://": ("lmcache", lmcache),
        "LMCache server, fp8 (lossy), Redis tuned": (
            "lmcache",
            functools.partial(lmcache_server, redis=store, fp8=True),
        ),
    }
    running, absent = start_installed(stack, bed, starts)
    return contenders + running, absent


def _ours_and_naive(
    stack: ExitStack, network: Link, logs: Path, lossless: Workload, binned: Workload, values: Values
) -> list[Contender]:
    password = secrets.token_hex(16)  # required beyond loopback
    with network.store_side():
        storage = stack.enter_context(
            start_storage(logs, "--host", network.host, environment={"SHADOWSERVE_STORAGE_PASSWORD": password})
        )
    with network.client_side():
        # Clients in another namespace reach the data plane through a Unix socket.
        data_plane = stack.enter_context(
            start_data_plane(
                logs,
                storage.address,
                "--listen",
                f"unix:{logs}/dpu.sock",
                environment={"SHADOWSERVE_DPU_STORAGE_PASSWORD": password},
            )
        )
        server = stack.enter_context(client(storage.address, password))
        server.ping()
    simple = llama_8b(len(binned.keys), quantizer=Quantizer.BINNED, codec="deflate")
    stored = {ours_name(each): each for each in (lossless, binned)} | {
        UNCOMPRESSED: uncompressed_like(lossless, values)
    }
    contenders = []
    with network.store_side():  # fill the stores without the link
        for each in (*stored.values(), simple):
            put(each, storage.address, password)
    for name, each in stored.items():
        contenders.append(stack.enter_context(ours(name, each, storage, data_plane)))
    return [*contenders, naive(server, simple, storage)]


def _tokens_per_s(workload: Workload, gigabytes_per_s: float) -> float:
    return gigabytes_per_s * 1e9 / workload.layout.raw_bytes * workload.layout.tokens


def _rows(report: Report, rate: float, raw_bytes: int, costs: Costs, workload: Workload) -> None:
    (limit,) = (own for each, own in costs.items() if each.kind == "limit")
    for each, own in costs.items():
        speed = gigabytes_per_s(raw_bytes, own)
        report.row(
            link_Gbit_per_s=rate,
            system=each.name,
            GB_per_s=speed,
            over_link=speed / gigabytes_per_s(raw_bytes, limit),
            cpu_s_per_GB=float(np.median([cost.cpu_s for cost in own])) / raw_bytes * 1e9,
            prefill_to_match_tokens_per_s=_tokens_per_s(workload, speed),
            note=each.note,
        )


def _recompute(report: Report, workload: Workload) -> None:
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
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        multiply()
        seconds.append(time.perf_counter() - begin)
    return 2 * rows * inner * columns / min(seconds)


def _ratios(report: Report, measured: dict[float, Costs], lossless: Workload, binned: Workload) -> None:
    """Compare lossless KV with exact peers, and binned KV with both kinds."""

    def add(prefix: str, workload: Workload, kind: str, name: str, factor: float, words: str) -> None:
        for rate, costs in measured.items():
            peer, runs = best(costs, kind, lambda cost: cost.wall_s)
            gains = wall_gains(runs_of(costs, ours_name(workload)), runs)
            report.ratio(f"{prefix}{name}_{rate:g}", [gain / factor for gain in gains], words.format(peer.name))

    for prefix, workload in (("lossless_", lossless), ("", binned)):
        compression = workload.raw_bytes / workload.stored_bytes
        add(prefix, workload, "raw", "over_raw_peers", compression, "at least 0.9; of {} times the compression")
        report.ratio(f"{prefix}raw_over_stored", [compression], "none; the compression")
    add("", binned, "compressing", "over_compressing_peers", 1.0, "at least 1; of {}")


def _chart(measured: dict[float, Costs], counts: dict[float, int], workloads: Sequence[Workload]) -> Chart:
    raw_bytes = workloads[0].layout.raw_bytes

    def points(name: str, factor: float = 1.0) -> Sequence[tuple[float, float]]:
        return [
            (rate, factor * gigabytes_per_s(counts[rate] * raw_bytes, runs_of(costs, name)))
            for rate, costs in measured.items()
        ]

    names = [each.name for each in next(iter(measured.values()))]
    series = {name: points(name) for name in names if name != LIMIT}
    series["link (plain sockets)"] = points(LIMIT)
    for workload in workloads:
        ratio = workload.raw_bytes / workload.stored_bytes
        series[f"link x {ratio:.2f}, the compression"] = points(LIMIT, ratio)
    return Chart(
        "Delivered through a link",
        x="link, Gbit/s",
        y="raw GB/s",
        series=series,
        x_log=True,
        y_log=True,
    )
