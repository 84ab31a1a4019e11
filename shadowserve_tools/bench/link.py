"""``shadowserve bench link``: what compression is worth where the link, not the machine, is the limit."""

import functools
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import click
import numpy as np

from shadowserve_tools.bench.fetch import (
    LIMIT,
    best,
    codec_option,
    gigabytes_per_s,
    naive,
    ours,
    peers_option,
    raw_values,
    uncompressed_like,
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
from shadowserve_tools.processes import Child, start_data_plane, start_storage
from shadowserve_tools.report import Chart, Cost, Output, Report, output_options, repeat

__all__ = ["link"]

FLOPS_PER_TOKEN: Final = 2 * 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
"""Of prefilling a token with Llama-3.1-8B: two for each weight of its layers' matrices; attention itself left out."""
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
    help="Of the link, in Gbit/s; may be given several times.",
)
@click.option(
    "--chunks-per-gbit",
    default=2.0,
    show_default=True,
    type=click.FloatRange(0.1, 64),
    help="Chunks of 256 tokens to fetch for each Gbit/s, so that each rate takes as long.",
)
@click.option("--bins", default=32, show_default=True, type=click.IntRange(4, 256), help="Of the quantizer.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1, 50), help="Pairs that count.")
@codec_option
@peers_option
@output_options
def link(
    rates: tuple[float, ...],
    chunks_per_gbit: float,
    bins: int,
    repeats: int,
    codec: str,
    peers_python: Path,
    output: Output,
) -> None:
    """Fetch a prompt of Llama-3.1-8B's shape through links of given rates, with everybody's store behind them.

    Stores and clients live in two network namespaces with a rate-limited link between, which takes root (or
    CAP_SYS_ADMIN and CAP_NET_ADMIN) and iproute2; nothing of the machine's own network is touched, and nothing is left
    behind. Rates above 8 Gbit/s are better measured on a real link: here both ends share the cores.

    "prefill to match" is the speed at which an engine would compute the same tokens in the same time: below it,
    fetching wins, above it, computing. The last row is the most that this machine's cores could do.
    """
    report = Report("link", COLUMNS)
    counts = {rate: max(1, round(rate * chunks_per_gbit)) for rate in rates}
    with ExitStack() as stack:
        network = stack.enter_context(linked())
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workload = llama_8b(max(counts.values()), bins=bins, codec=codec)
        contenders, absent = _contenders(stack, network, logs, workload, bins, peers_python)
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
        _rows(report, rate, counts[rate] * workload.layout.raw_bytes, costs, workload)
    for name, reason in absent.items():
        report.row(system=name, note=reason)
    _recompute(report, workload)
    ratio = workload.raw_bytes / workload.stored_bytes
    _ratios(report, measured, ratio)
    report.charts.append(_chart(measured, counts, workload, ratio))
    report.finish(output)


def _contenders(
    stack: ExitStack, network: Link, logs: Path, workload: Workload, bins: int, peers_python: Path
) -> tuple[list[Contender], dict[str, str]]:
    """Start everybody: stores behind the link, clients in front of it."""
    chunks = len(workload.keys)
    bed = Bed(peers_python, logs, raw_values(logs, workload), chunks, network)
    values = Values(bed.values_file)
    memory = Memory(values, chunks)
    contenders = _ours_and_naive(stack, network, logs, workload, values, bins)

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
        "LMCache server, fp8, Redis tuned": ("lmcache", functools.partial(lmcache_server, redis=store, fp8=True)),
    }
    running, absent = start_installed(stack, bed, starts)
    return contenders + running, absent


def _ours_and_naive(
    stack: ExitStack, network: Link, logs: Path, workload: Workload, values: Values, bins: int
) -> list[Contender]:
    password = secrets.token_hex(16)  # what listens beyond loopback has one
    with network.store_side():
        storage = stack.enter_context(
            start_storage(logs, "--host", network.host, environment={"SHADOWSERVE_STORAGE_PASSWORD": password})
        )
    with network.client_side():
        # Its own clients are on this side of the link and in another namespace: a Unix socket reaches them.
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
    chunks = len(workload.keys)
    raw = uncompressed_like(workload, values)
    simple = workload
    if workload.codec.name != "DEFLATE":
        simple = llama_8b(chunks, bins=bins, codec="deflate")
    contenders = []
    with network.store_side():  # filling a store does not wait for the link
        for each in {id(each): each for each in (workload, raw, simple)}.values():
            put(each, storage.address, password)
    for name, each in ((workload.codec.name.lower(), workload), ("uncompressed", raw)):
        contenders.append(stack.enter_context(ours(f"ShadowServe, {name}", each, storage, data_plane)))
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
    """Add the row of an engine on these cores that does nothing but the matrix products of Llama-3.1-8B's prefill."""
    tokens_per_s = _matrix_flops() / FLOPS_PER_TOKEN
    report.row(
        system="recompute on these cores, at most",
        GB_per_s=tokens_per_s * workload.layout.raw_bytes / workload.layout.tokens / 1e9,
        prefill_to_match_tokens_per_s=tokens_per_s,
        note="matrix products alone",
    )


def _matrix_flops() -> float:
    """Return the best floating-point operations per second of a layer's largest product, over 256 tokens.

    In bfloat16 with the library that vLLM's CPU engine uses, or in single precision with numpy where torch is missing.
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


def _ratios(report: Report, measured: dict[float, Costs], ratio: float) -> None:
    for rate, costs in measured.items():
        own = next(runs for each, runs in costs.items() if each.kind == "ours")
        raw, raw_runs = best(costs, "raw", lambda cost: cost.wall_s)
        simple, simple_runs = best(costs, "compressing", lambda cost: cost.wall_s)
        report.ratio(
            f"over_raw_peers_{rate:g}",
            [theirs.wall_s / mine.wall_s / ratio for mine, theirs in zip(own, raw_runs, strict=True)],
            f"at least 0.9; of {raw.name} times the compression",
        )
        report.ratio(
            f"over_compressing_peers_{rate:g}",
            [theirs.wall_s / mine.wall_s for mine, theirs in zip(own, simple_runs, strict=True)],
            f"at least 1; of {simple.name}",
        )
    report.ratio("raw_over_stored", [ratio], "none; the compression")


def _chart(measured: dict[float, Costs], counts: dict[float, int], workload: Workload, ratio: float) -> Chart:
    def points(name: str, factor: float = 1.0) -> Sequence[tuple[float, float]]:
        return [
            (rate, factor * gigabytes_per_s(counts[rate] * workload.layout.raw_bytes, own))
            for rate, costs in measured.items()
            for each, own in costs.items()
            if each.name == name
        ]

    names = [each.name for each in next(iter(measured.values()))]
    series = {name: points(name) for name in names if name != LIMIT}
    series["link (plain sockets)"] = points(LIMIT)
    series[f"link x {ratio:.2f}, the compression"] = points(LIMIT, ratio)
    return Chart(
        "Delivered through a link",
        x="link, Gbit/s",
        y="raw GB/s",
        series=series,
        x_log=True,
        y_log=True,
    )
