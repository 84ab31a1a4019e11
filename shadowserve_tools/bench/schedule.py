"""Compares policies that share a storage node's link among requests (ObjectCache, section 5.7).

Method: the paper's three mixes of requests, scaled down: a link of 1 Gbit/s for its 80 Gbps, and half of its times.
One storage node with ``egress_bits_per_s`` has one connection for each request; all ask at the same moment. Each
client sleeps for the time of computing a layer when the layer has arrived. ``added_ms`` is the sum of the times to
first token less those of the same requests alone on an unbounded link. *Held* rates last for the whole of a request,
as in the paper; otherwise the rate of a request that has ended is given to the others. ``model_ms`` is the
simulation's value.

Prediction: held, ``equal`` adds 2.3, 1.9 and 1.2 times what ``calibrated_stall_opt`` adds in mixes A, B and C. Handed
on, ``equal`` adds 1.42, 1.37 and 1.40 times what ``shortest_remaining`` (the default) adds.
"""

import contextlib
import functools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

from shadowserve.resp import encode_command
from shadowserve_tools.bench.parts.lean import LeanSocket, answer_lengths, plain_record
from shadowserve_tools.bench.parts.options import benchmark, listed, one_of, real, repeats_option
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, in_turns, over
from shadowserve_tools.simulate.objectcache import (
    LAYERS,
    TOKEN_LAYER_BYTES,
    WORKLOAD_A,
    Request,
    handed_on,
    held,
)
from storage_kv.egress import POLICIES

MIXES: Final = {
    "A": (WORKLOAD_A, 80.0),
    "B": (WORKLOAD_A, 50.0),
    "C": ((*WORKLOAD_A[:2], Request("32K", 0.5), Request("32K", 0.875), *WORKLOAD_A[2:]), 50.0),
}
"""The paper's workloads: requests, and Gbps of the link."""
MARGIN_GBPS: Final = 5.0
COMPARED: Final = {"shortest_remaining", "calibrated_stall_opt"}
"""Policies that ``equal`` is compared with: the node's default and the paper's."""
CHUNKS: Final = 16
_RECORD_TOKENS: Final = 16
_FREE: Final = ""
"""Stands for a policy: each request alone on a link without a bound."""
_HELD: Final = ", held"
"""Suffix of a policy: a request keeps its rate until all have ended, as in the paper."""
HELD: Final = tuple(f"{policy}{_HELD}" for policy in ("equal", "calibrated_stall_opt"))
_EPOCH_S, _BEGINNING_EPOCH_S, _HELD_EPOCH_S = "0.02", "0.002", "10"
"""The node's default; a short one, after which new requests have rates; one longer than any mix."""
RATIOS: Final = (
    ("shortest", "equal", "shortest_remaining", "at least 1.2"),
    ("calibrated", *HELD, "at least 1.2; rates are held, as in the paper"),
    ("calibrated_handed_on", "equal", "calibrated_stall_opt", "none; rates are handed on"),
)
"""Name of each ratio, its two policies, and its goal."""
_GATE_S: Final = 60.0
_BEGUN_S: Final = 0.03
"""Time after which all requests have come."""


@dataclass(frozen=True)
class Scaled:
    """A request of a mix, scaled down.

    Attributes:
        piece: Bytes of a layer of a chunk.
        window_s: Time of computing a layer.
    """

    keys: list[bytes]
    piece: int
    window_s: float

    def command(self) -> bytes:
        return encode_command("KV.LAYERS", f"0-{LAYERS - 1}", 0, round(1e6 * self.window_s), *self.keys)


@benchmark("mix", "policy", "link_Gbit_per_s", "ttft_ms", "added_ms", "model_ms", bars=["added_ms"])
@real("--rate", 1.0, "Rate of the link that represents the paper's 80 Gbps.", 0.01, 100, "GBIT/S")
@real("--time time_share", 0.5, "Scale of the paper's times.", 0.001, 1)
@listed("--mixes", "A,B,C", "Workloads of the paper, with commas between.", one_of(MIXES))
@listed("--policies", ",".join(POLICIES), "Policies to measure besides those in ratios.", one_of(POLICIES))
@repeats_option(3, "Number of turns.")
def schedule(
    report: Report,
    programs: Programs,
    rate: float,
    time_share: float,
    mixes: list[str],
    policies: list[str],
    repeats: int,
) -> None:
    """Serve the paper's mixes of requests layer by layer over a link that requests share."""
    chosen = [*(policy for policy in POLICIES if policy in {*policies, "equal", *COMPARED}), *HELD]
    server = programs.storage("--io-threads", "1", "--memory-budget-bytes", "4 GiB")
    operator = programs.enter_context(LeanSocket(server.address))
    for mix in mixes:
        requests, cap_gbps = MIXES[mix]
        link = 1e9 * rate * cap_gbps / 80
        scaled = [
            _stored(operator, mix, number, request, rate / 80 * time_share, time_share)
            for number, request in enumerate(requests)
        ]
        operator.call("CONFIG", "SET", "egress_margin", str(MARGIN_GBPS / cap_gbps))
        runs = {
            each: functools.partial(_run, server.address, operator, scaled, link, each) for each in (_FREE, *chosen)
        }
        found = in_turns(repeats, runs, f"mix {mix}")
        alone = found.pop(_FREE)
        added = {
            policy: [sum(ttfts) - sum(free) for ttfts, free in zip(turns, alone, strict=True)]
            for policy, turns in found.items()
        }
        for policy, turns in found.items():
            report.row(
                mix=mix, policy=policy, link_Gbit_per_s=link / 1e9, ttft_ms=1e3 * statistics.median(map(sum, turns)),
                added_ms=1e3 * statistics.median(added[policy]),
                model_ms=1e3 * _model_s(requests, cap_gbps, policy) * time_share,
            )  # fmt: skip
        for name, equal, compared, goal in RATIOS:
            report.ratio(f"equal_over_{name}_{mix}", over(added[equal], added[compared]), goal)


def _model_s(requests: Sequence[Request], cap_gbps: float, policy: str) -> float:
    name = next(each for each in POLICIES if each == policy.removesuffix(_HELD))
    return sum((held if policy in HELD else handed_on)(requests, cap_gbps, MARGIN_GBPS, name))


def _stored(
    client: LeanSocket, mix: str, number: int, request: Request, bytes_share: float, time_share: float
) -> Scaled:
    demand = request.demand()
    token_bytes = max(2, 2 * round(demand.layer_bytes * bytes_share / CHUNKS / _RECORD_TOKENS / 2))
    keys = []
    for chunk in range(CHUNKS):
        name = f"{mix}-{number}-{chunk}".encode().rjust(32, b"-")
        key, value = plain_record(name, layers=LAYERS, tokens=_RECORD_TOKENS, token_bytes=token_bytes)
        client.call("SET", key, value)
        keys.append(key)
    assert demand.layer_bytes / TOKEN_LAYER_BYTES > CHUNKS
    return Scaled(keys, token_bytes * _RECORD_TOKENS, demand.window_s * time_share)


def _run(address: str, operator: LeanSocket, mix: Sequence[Scaled], link: float, policy: str) -> list[float]:
    """Return the times to the first token in seconds under a policy, in the order of the mix."""
    operator.call("CONFIG", "SET", "egress_bits_per_s", "0" if policy == _FREE else str(link))
    if policy == _FREE:
        return [_together(address, [request])[0] for request in mix]
    operator.call("CONFIG", "SET", "egress_policy", policy.removesuffix(_HELD))
    if policy in HELD:
        operator.call("CONFIG", "SET", "egress_epoch_s", _BEGINNING_EPOCH_S)
    ttfts = _together(address, mix, (lambda: _hold(operator)) if policy in HELD else None)
    operator.call("CONFIG", "SET", "egress_epoch_s", _EPOCH_S)
    return ttfts


def _hold(operator: LeanSocket) -> None:
    """Make the next epoch last until all requests have ended. The command has no answer, which would have a share."""
    time.sleep(_BEGUN_S)
    skip, hold = ("CLIENT", "REPLY", "SKIP"), ("CONFIG", "SET", "egress_epoch_s", _HELD_EPOCH_S)
    operator.socket.sendall(encode_command(*skip) + encode_command(*hold))


def _together(address: str, mix: Sequence[Scaled], between: Callable[[], None] | None = None) -> list[float]:
    """Start all requests at once, call ``between``, and return each request's time until its last layer is computed."""
    gate = threading.Barrier(len(mix) + (between is not None), timeout=_GATE_S)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(mix)) as pool:
        clients = [stack.enter_context(LeanSocket(address)) for _ in mix]
        asked = [pool.submit(_ask, client, request, gate) for client, request in zip(clients, mix, strict=True)]
        if between:
            gate.wait()
            between()
        return [each.result() for each in asked]


def _ask(client: LeanSocket, request: Scaled, gate: threading.Barrier) -> float:
    """Receive layers in one thread and compute in this one, which sleeps for a window with each layer."""
    head, *layers = answer_lengths(LAYERS, [request.piece] * len(request.keys))
    arrived = SimpleQueue[float]()

    def receive() -> None:
        try:
            client.receive(head)
            for size in layers:
                client.receive(size)
                arrived.put(time.perf_counter())
        finally:  # after an error, the other thread does not wait
            for _ in layers:
                arrived.put(0.0)

    with ThreadPoolExecutor(1) as pool:
        gate.wait()
        began_s = time.perf_counter()
        client.socket.sendall(request.command())
        received = pool.submit(receive)
        done_s = began_s
        for _ in layers:
            # Computing starts when the layer has arrived, not when this thread wakes.
            done_s = max(done_s, arrived.get()) + request.window_s
            time.sleep(max(0.0, done_s - time.perf_counter()))
        received.result()
    return done_s - began_s
