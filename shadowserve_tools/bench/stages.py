"""Measures each stage of the pipeline alone, by the size of its input (ShadowServe, figure 13a).

Method: one CPU core receives from the storage node in requests of 64 KiB to 8 MiB, eight in flight, beside a plain
socket whose other end only sends. Then each stage runs on slices of 32 KiB to 2 MiB of symbols: decompress,
dequantize, deliver (memcpy, the limit), and decompress and dequantize fused in the cache. GB/s are those of the
stage's own input and output, per second of the core's CPU time.

Prediction: receiving 6.7 GB/s, 3 GB/s in requests of 64 KiB. Deflate 1.5 and zstd 2.0 GB/s at any size; kvrans 8.5,
half of it at 32 KiB. Dequantization 24, delivering 14 to 19. Fused kvrans 9 GB/s, 1.45 times as fast as separate
stages.
"""

import functools
import socket
import statistics
from collections.abc import Sequence
from typing import Final

import numpy as np

from shadowserve import native
from shadowserve.errors import ShadowServeError
from shadowserve.resp import encode_bulk_header, encode_command
from shadowserve_tools.bench.parts.kernels import Run, Slices, Treated, memcpy, memory, nothing, speeds_in_turns
from shadowserve_tools.bench.parts.lean import connect, receive
from shadowserve_tools.bench.parts.options import benchmark, repeats_option, whole
from shadowserve_tools.bench.parts.plain_sender import plain_request, start_sender
from shadowserve_tools.bench.parts.workload import client, default_codec, made_up_slices
from shadowserve_tools.charts import Chart, Point
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, over

KIB: Final = 1 << 10
SLICE_SIZES: Final = tuple(KIB << exponent for exponent in range(5, 12))
"""Bytes of symbols: 32 KiB to 2 MiB, the largest slice of a record."""
REQUEST_SIZES: Final = tuple(KIB << exponent for exponent in range(6, 14))
"""Bytes of a request: 64 KiB to 8 MiB, about a chunk of Llama-8B's shape."""
USUAL_SLICE: Final = 256 * KIB
"""Slice of Llama-8B's shape: a token's vector by 256 tokens."""
VECTOR_LENGTH: Final = 1024
BINS: Final = 32
CODECS: Final = ("kvrans", "deflate", "zstd")
IN_FLIGHT: Final = 8
"""Requests in flight, as in the data plane by default."""
DISTINCT: Final = 8
"""Distinct ranges of the stored value."""


@benchmark("stage", "codec", "size_KiB", "in_GB_per_s", "out_GB_per_s")
@whole("--largest", 8192, "Largest size, in KiB.", 64)
@whole("--mebibytes", 64, "MiB of a run.", most=1024)
@repeats_option(7, "Number of turns.", 100)
def stages(report: Report, programs: Programs, largest: int, mebibytes: int, repeats: int) -> None:
    """Measure each stage of the pipeline alone, by the size of its input."""
    curves = _Curves(report)
    for size in (size for size in SLICE_SIZES if size <= largest * KIB):
        _measure_slices(curves, size, mebibytes << 20, repeats)
    storage, sender = programs.storage(), start_sender(programs, max(REQUEST_SIZES) >> 20)
    for size in (size for size in REQUEST_SIZES if size <= largest * KIB):
        _measure_net(curves, storage.address, sender.address, size, mebibytes << 20, repeats)
    _ratios(report, curves)
    _charts(report, curves)


class _Curves:
    """Speeds in every turn, GB/s of output, by stage and by size."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.speeds: dict[str, dict[int, list[float]]] = {}

    def add(self, stage: str, codec: str, size: int, speeds: list[float], in_share: float) -> None:
        """Add a point and its row; ``in_share`` is input bytes for each output byte."""
        self.speeds.setdefault(f"{stage} {codec}".rstrip(), {})[size] = speeds
        out = statistics.median(speeds)
        self._report.row(stage=stage, codec=codec, size_KiB=size // KIB, in_GB_per_s=out * in_share, out_GB_per_s=out)

    def line(self, name: str) -> list[Point]:
        return [(size / KIB, statistics.median(speeds)) for size, speeds in self.speeds[name].items()]

    def usual(self, name: str) -> list[float]:
        """Return all speeds at the usual size, or at the largest measured size below it."""
        by_size = self.speeds[name]
        return by_size[max(size for size in by_size if size <= max(USUAL_SLICE, min(by_size)))]


def _measure_slices(curves: _Curves, size: int, output_bytes: int, repeats: int) -> None:
    treated = Treated(made_up_slices(2, VECTOR_LENGTH, size // VECTOR_LENGTH), BINS, output_bytes)
    raw = treated.raw_bytes
    runs: list[tuple[str, str, Run, float]] = []
    for codec in (each for each in native.codec_implementations() if each.name.lower() in CODECS):
        slices = Slices(treated, codec)
        stream = slices.bits / 8 * treated.elements_each
        runs.append(("decompress", codec.name.lower(), slices.decompress(), stream / size))
        runs.append(("fused", codec.name.lower(), slices.decode(), stream / raw))
    runs.append(("dequantize", "", Slices(treated, native.Codec.NONE).dequantize(), size / raw))
    runs.append(("deliver", "", memcpy(len(treated.target), raw), 1.0))
    speeds = speeds_in_turns([run for _, _, run, _ in runs], repeats, f"slices of {size // KIB} KiB")
    for (stage, codec_name, _, in_share), own in zip(runs, speeds, strict=True):
        curves.add(stage, codec_name, size, own, in_share)


def _measure_net(curves: _Curves, address: str, sender: str, size: int, total: int, repeats: int) -> None:
    """Add receiving from the storage node and from a plain socket, at one request size."""
    count = max(1, total // size)
    value = np.random.default_rng(size).integers(0, 256, size * min(count, DISTINCT), np.uint8)
    begins = [index % DISTINCT * size for index in range(count)]
    requests = [encode_command("GETRANGE", "bench", begin, begin + size - 1) for begin in begins]
    answer_bytes = len(encode_bulk_header(size)) + size + 2
    received, floor = memory(count * size + answer_bytes), memory(count * size)
    plain = [plain_request(index * size % max(REQUEST_SIZES), size) for index in range(count)]
    with client(address) as server, connect(address) as ours, connect(sender) as other:
        server.set("bench", value.tobytes())
        net = functools.partial(_receive, ours, requests, memoryview(received), size, answer_bytes)
        fill = functools.partial(_receive, other, plain, memoryview(floor), size, size)
        runs = [Run(count * size, work, nothing) for work in (net, fill)]
        speeds = speeds_in_turns(runs, repeats, f"requests of {size // KIB} KiB")
    last = received[(count - 1) * size :][: answer_bytes - 2][-size:]
    if not np.array_equal(last, value[begins[-1] : begins[-1] + size]):
        raise ShadowServeError("storage answered other bytes than it was given; please report this")
    for stage, own in zip(("net", "plain socket"), speeds, strict=True):
        curves.add(stage, "", size, own, 1.0)


def _receive(
    connection: socket.socket, requests: Sequence[bytes], view: memoryview, step: int, answer_bytes: int
) -> None:
    """Receive all answers, ``step`` bytes apart, with some requests in flight; an answer overwrites a trailer."""
    connection.sendall(b"".join(requests[:IN_FLIGHT]))
    for index in range(len(requests)):
        receive(connection, view[index * step : index * step + answer_bytes])
        if index + IN_FLIGHT < len(requests):
            connection.sendall(requests[index + IN_FLIGHT])


def _ratios(report: Report, curves: _Curves) -> None:
    codec = default_codec()
    fused, dequantize, deliver = (curves.usual(name) for name in (f"fused {codec}", "dequantize", "deliver"))
    report.ratio("dequantize_over_memcpy", over(dequantize, deliver), "at least 0.9")
    report.ratio("fused_over_memcpy", over(fused, deliver), f"none; {codec} against the limit")
    apart = [
        1 / (0.5 / decompressed + 1 / dequantized + 1 / delivered)  # symbols are half as many bytes as elements
        for decompressed, dequantized, delivered in zip(
            curves.usual(f"decompress {codec}"), dequantize, deliver, strict=True
        )
    ]
    report.ratio("fused_over_separate", over(fused, apart), "at least 1")
    received = over(curves.usual("net"), curves.usual("plain socket"))
    report.ratio("net_over_plain_socket", received, "none; the receiver's share")


def _charts(report: Report, curves: _Curves) -> None:
    coded = {stage: [f"{stage} {codec}" for codec in CODECS] for stage in ("fused", "decompress")}
    memcpy_limit = {"memcpy": statistics.median(curves.usual("deliver"))}
    floor = {"plain socket, best": max(value for _, value in curves.line("plain socket"))}
    for title, x, y, names, limits in (
        ("Decoded to bfloat16, fused", "symbols in a slice, KiB", "elements, ", coded["fused"], memcpy_limit),
        ("Stages apart", "symbols in a slice, KiB", "out, ", [*coded["decompress"], "dequantize", "deliver"], {}),
        ("Received", "requested at a time, KiB", "", ["net"], floor),
    ):
        series = {name: curves.line(name) for name in names if name in curves.speeds}
        y += "GB/s of one core"
        report.charts.append(Chart(title, x=x, y=y, series=series, limits=limits, x_log=True))
