"""``shadowserve simulate objectcache``: requests that share a link, under each policy of the storage node."""

from collections.abc import Sequence
from math import ceil
from typing import Any, Final, NamedTuple

import click

from shadowserve_tools.bench.parts.options import listed, real
from shadowserve_tools.charts import Chart
from shadowserve_tools.report import Output, Report, output_options
from storage_kv.egress import Demand, Policy, allocate, ttft_s

LAYERS: Final = 32
TOKEN_LAYER_BYTES: Final = 4096
"""Of Llama 3.1 8B in 16 bits: keys and values of 8 heads of 128."""

TABLE_A8: Final = {
    ("4K", 0.5): 185.31,
    ("4K", 0.875): 63.47,
    ("16K", 0.5): 955.89,
    ("16K", 0.875): 281.76,
    ("32K", 0.5): 2589.25,
    ("32K", 0.875): 763.19,
    ("64K", 0.5): 8672.79,
    ("64K", 0.875): 2423.90,
}
"""Milliseconds of computing what is not cached, of all layers, by context and share of it that is cached: the paper's
table A8, measured on an A100."""

POLICIES: Final[tuple[Policy, ...]] = ("equal", "kv_prop", "bw_prop", "stall_opt", "calibrated_stall_opt")
"""Policies of the paper, whose rates hold until a request ends; equation 3 describes no others."""

STORED_SHARE: Final = 1 / 1.52
"""Stored bytes over those of bfloat16, lossless by kvrans, of a layer of a Llama's shape: bench codecs."""


class Request(NamedTuple):
    """One request of the mix: its context as the table calls it, and the share of it that is cached."""

    context: str
    hit_rate: float

    def demand(self, stored_share: float = 1.0) -> Demand:
        """Return the bytes and the time of a layer, with ``stored_share`` stored bytes for each byte of KV."""
        tokens = 1024 * int(self.context[:-1]) * self.hit_rate
        window_s = TABLE_A8[self] / 1e3 / LAYERS
        return Demand(tokens * TOKEN_LAYER_BYTES * stored_share, window_s)


WORKLOAD_A: Final = (Request("16K", 0.5), Request("16K", 0.875), Request("64K", 0.5), Request("64K", 0.875))
"""The paper's first mix."""


def _read_request(text: str) -> Request:
    context, _, share = text.partition(":")
    try:
        request = Request(context.strip().upper(), float(share))
    except ValueError as error:
        raise ValueError(f"{text!r} is no context and hit rate such as 16K:0.5") from error
    if request not in TABLE_A8:
        raise ValueError(f"{text!r} is none of table A8: {', '.join(map(_name, TABLE_A8))}")
    return request


def _name(request: tuple[str, float]) -> str:
    return f"{request[0]}:{request[1]:g}"


@click.command()
@listed(
    "--requests", ",".join(map(_name, WORKLOAD_A)),
    "Requests that share the link: contexts of 4K, 16K, 32K or 64K, hit rates of 0.5 or 0.875; repeatable.",
    _read_request, metavar="CONTEXT:HIT_RATE,...",
)  # fmt: skip
@real("--cap-gbps", 80.0, "Rate of the link.", 0.001, 1e6)
@real("--margin-gbps", 5.0, "Margin of calibrated_stall_opt over the rate at which a request does not wait.", 0, 1e6)
@click.option(
    "--stored-share", default=STORED_SHARE, show_default="1/1.52", type=click.FloatRange(0.001, 1.0),
    help="Stored bytes over KV bytes; the default is lossless kvrans (bench codecs).",
)  # fmt: skip
@output_options
def objectcache(
    requests: list[Request], cap_gbps: float, margin_gbps: float, stored_share: float, output: Output
) -> None:
    """Predict the times of requests that are answered layer by layer over one link, for each policy.

    Bytes and times of a layer are those of ObjectCache's table A8 (Llama 3.1 8B on an A100), the time to first token is
    its equation 3, and the policies are the storage node's own code. A model, not a measurement:
    docs/design/simulation.md.

    \b
    The columns:
      rate_Gbps  rate of the request
      added_ms   its TTFT less that of a request alone on an infinite link
      stored_*   the same with compressed records

    \b
    The paper's workload A:  shadowserve simulate objectcache
    B:                       shadowserve simulate objectcache --cap-gbps 50
    """
    report_of(requests, cap_gbps, margin_gbps, stored_share).finish(output)


def outcome(
    requests: Sequence[Request], cap_gbps: float, margin_gbps: float, stored_share: float = 1.0
) -> dict[str, Any]:
    """Return, of each policy, each request's rate (Gbps) and TTFT (ms), in the order given, and the TTFTs' sum."""
    demands = [request.demand(stored_share) for request in requests]
    policies: dict[str, Any] = {}
    for policy in POLICIES:
        rates = allocate(policy, demands, 1e9 * cap_gbps, 1e9 * margin_gbps)
        ttfts_ms = [1e3 * ttft_s(demand, rate, LAYERS) for demand, rate in zip(demands, rates, strict=True)]
        rows = [
            {**request._asdict(), "rate_gbps": rate / 1e9, "ttft_ms": ttft_ms}
            for request, rate, ttft_ms in zip(requests, rates, ttfts_ms, strict=True)
        ]
        policies[policy] = {"requests": rows, "total_ttft_ms": sum(ttfts_ms)}
    return policies


def held(requests: Sequence[Request], cap_gbps: float, margin_gbps: float, policy: Policy) -> list[float]:
    """Return the seconds that are added to each request's TTFT where its rate is its own until it ends (the paper)."""
    demands = [request.demand() for request in requests]
    rates = allocate(policy, demands, 1e9 * cap_gbps, 1e9 * margin_gbps)
    pairs = zip(demands, rates, strict=True)
    return [ttft_s(demand, rate, LAYERS) - LAYERS * demand.window_s for demand, rate in pairs]


def handed_on(requests: Sequence[Request], cap_gbps: float, margin_gbps: float, policy: Policy) -> list[float]:
    """Return the seconds that are added to each request's TTFT where its rate is given to others once it has ended.

    So does the storage node, each epoch; what is left of the link is given to all, in proportion. All begin at once.
    """
    demands = [request.demand() for request in requests]
    epoch_s = min(demand.window_s for demand in demands)
    due_s = [0.0] * len(demands)  # time at which the arrived layers are computed
    left = {number: float(LAYERS) for number in range(len(demands))}
    now_s = 0.0
    while left:
        numbers = list(left)
        current = [demands[i]._replace(layers_left=ceil(left[i])) for i in numbers]
        rates = allocate(policy, current, 1e9 * cap_gbps, 1e9 * margin_gbps)
        more = 1e9 * cap_gbps / sum(rates)
        for i, rate in zip(numbers, rates, strict=True):
            layer_s = 8 * demands[i].layer_bytes / (rate * more)
            until = max(0.0, left[i] - epoch_s / layer_s)
            # Each whole layer that ends in this epoch is computed once it is there and the one before is computed.
            for layer in range(ceil(left[i]) - 1, ceil(until) - 1, -1):
                there_s = now_s + (left[i] - layer) * layer_s
                due_s[i] = max(due_s[i], there_s) + demands[i].window_s
            if until:
                left[i] = until
            else:
                del left[i]
        now_s += epoch_s
    return [due - LAYERS * demand.window_s for due, demand in zip(due_s, demands, strict=True)]


def report_of(requests: Sequence[Request], cap_gbps: float, margin_gbps: float, stored_share: float) -> Report:
    """Return a row for each request under each policy, one for their sum, and the charts."""
    raw = outcome(requests, cap_gbps, margin_gbps)
    stored = outcome(requests, cap_gbps, margin_gbps, stored_share)
    columns = ["policy", "request", "rate_Gbps", "ttft_ms", "added_ms", "stored_Gbps", "stored_ttft_ms"]
    report = Report("objectcache", columns, command="simulate")
    for policy, its in raw.items():
        pairs = zip(its["requests"], stored[policy]["requests"], strict=True)
        for row, stored_row in pairs:
            request = Request(row["context"], row["hit_rate"])
            report.row(
                policy=policy, request=_name(request), rate_Gbps=f"{row['rate_gbps']:.2f}",
                ttft_ms=row["ttft_ms"], added_ms=row["ttft_ms"] - TABLE_A8[request],
                stored_Gbps=f"{stored_row['rate_gbps']:.2f}", stored_ttft_ms=stored_row["ttft_ms"],
            )  # fmt: skip
        report.row(
            policy=policy, request="all", ttft_ms=its["total_ttft_ms"], added_ms=_added_ms(requests, its),
            stored_ttft_ms=stored[policy]["total_ttft_ms"],
        )  # fmt: skip
    report.more = {
        "requests": [request._asdict() for request in requests],
        "cap_gbps": cap_gbps,
        "margin_gbps": margin_gbps,
        "policies": raw,
        "stored": {"share": stored_share, "policies": stored},
    }
    report.charts = [_chart(requests, cap_gbps, margin_gbps, stored_share)]
    return report


def _added_ms(requests: Sequence[Request], its: dict[str, Any]) -> float:
    return float(its["total_ttft_ms"]) - sum(TABLE_A8[request] for request in requests)


def _chart(requests: Sequence[Request], cap_gbps: float, margin_gbps: float, stored_share: float) -> Chart:
    """Draw what is added to all TTFTs over links of a quarter to twice the given one."""
    caps = [cap_gbps * step / 16 for step in range(4, 33, 2)]
    series: dict[str, list[tuple[float, float]]] = {policy: [] for policy in POLICIES}
    stored_name = "calibrated_stall_opt, compressed"
    series[stored_name] = []
    for cap in caps:
        raw = outcome(requests, cap, margin_gbps)
        for policy in POLICIES:
            series[policy].append((cap, _added_ms(requests, raw[policy])))
        stored = outcome(requests, cap, margin_gbps, stored_share)["calibrated_stall_opt"]
        series[stored_name].append((cap, _added_ms(requests, stored)))
    return Chart("Added to all times to first token", x="link, Gbps", y="ms", series=series)
