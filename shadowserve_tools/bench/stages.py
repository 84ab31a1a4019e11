"""Measures each stage of the pipeline alone, by the size of its input (ShadowServe, figure 13a).

Method: one CPU core receives from the storage node in requests of 64 KiB to 8 MiB, eight in flight, beside a plain
socket whose other end only sends. Then each stage runs on slices of 32 KiB to 2 MiB of symbols: decompress,
dequantize, deliver (memcpy, the limit), and decompress and dequantize fused in the cache. GB/s are those of the
stage's own input and output, per second of the core's CPU time.

Prediction: receiving 6.7 GB/s, 3 GB/s in requests of 64 KiB. Deflate 1.5 and zstd 2.0 GB/s at any size; kvrans 8.5,
half of it at 32 KiB. Dequantization 24, delivering 14 to 19. Fused kvrans 9 GB/s, 1.45 times as fast as separate
stages.
"""

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

import click
import numpy as np

from shadowserve import native
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.errors import ShadowServeError
from shadowserve_tools.bench.parts.kernels import Run, Slices, Treated, in_turns, memcpy, memory, nothing
from shadowserve_tools.bench.parts.workload import client, default_codec, kv_patterns
from shadowserve_tools.charts import Chart
from shadowserve_tools.processes import Programs, started
from shadowserve_tools.report import Output, Report, output_options

if TYPE_CHECKING:
    import redis

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
SENDER: Final = """
import socket
with socket.create_server(("127.0.0.1", 0)) as listener:
    print("ready 127.0.0.1:%d" % listener.getsockname()[1], flush=True)
    payload = memoryview(bytearray(8 << 20))
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            while request := connection.recv(4, socket.MSG_WAITALL):
                connection.sendall(payload[: int.from_bytes(request)])
"""
"""A process that sends as many bytes of memory as a client requests in four bytes: the simplest server."""


@click.command()
@click.option("--largest", default=8192, show_default=True, type=click.IntRange(64), help="Largest size, in KiB.")
@click.option("--mebibytes", default=64, show_default=True, type=click.IntRange(1, 1024), help="MiB of a run.")
@click.option("--repeats", default=7, show_default=True, type=click.IntRange(1, 100), help="Number of turns.")
@output_options
def stages(largest: int, mebibytes: int, repeats: int, output: Output) -> None:
    """Measure each stage of the pipeline alone, by the size of its input."""
    report = Report("stages", ["stage", "codec", "size_KiB", "in_GB_per_s", "out_GB_per_s"])
    decoding, receiving = _Curves(), _Curves()
    for size in (size for size in SLICE_SIZES if size <= largest * KIB):
        _measure_slices(report, decoding, size, mebibytes << 20, repeats)
    with Programs() as programs:
        storage = programs.storage()
        sender = programs.enter_context(started("sender", [sys.executable, "-c", SENDER], programs.logs))
        for size in (size for size in REQUEST_SIZES if size <= largest * KIB):
            _measure_net(report, receiving, storage.address, sender.address, size, mebibytes << 20, repeats)
    _ratios(report, decoding, receiving)
    _charts(report, decoding, receiving)
    report.finish(output)


class _Curves:
    """Speeds in every turn, GB/s of output, by stage and by size."""

    def __init__(self) -> None:
        self.speeds: dict[str, dict[int, list[float]]] = {}

    def add(self, report: Report, stage: str, codec: str, size: int, speeds: list[float], in_share: float) -> None:
        """Add a point and its row; ``in_share`` is input bytes for each output byte."""
        self.speeds.setdefault(f"{stage} {codec}".rstrip(), {})[size] = speeds
        out = float(np.median(speeds))
        report.row(stage=stage, codec=codec, size_KiB=size // KIB, in_GB_per_s=out * in_share, out_GB_per_s=out)

    def line(self, name: str) -> list[tuple[float | str, float]]:
        return [(size, float(np.median(speeds))) for size, speeds in self.speeds[name].items()]

    def usual(self, name: str) -> list[float]:
        """Return all speeds at the usual size, or at the largest measured size below it."""
        by_size = self.speeds[name]
        return by_size[max(size for size in by_size if size <= max(USUAL_SLICE, min(by_size)))]


# ---- Slices ----------------------------------------------------------------------------------------------------------


def _measure_slices(report: Report, curves: _Curves, size: int, output_bytes: int, repeats: int) -> None:
    """Add every stage behind the network, at one slice size."""
    layout = ChunkLayout(
        namespace=bytes(32),
        dtype=DType.BFLOAT16,
        layers=2,
        kinds=2,
        vector_length=VECTOR_LENGTH,
        tokens=size // VECTOR_LENGTH,
        quantizer=Quantizer.LOSSLESS,
        bins=0,
    )
    elements = kv_patterns(np.random.default_rng(8), layout).reshape(-1, layout.tokens, VECTOR_LENGTH)
    treated = Treated(elements, BINS, output_bytes)
    raw = treated.raw_bytes
    runs: list[tuple[str, str, Run, float]] = []
    for codec in native.codec_implementations():
        name = codec.name.lower()
        if name in CODECS:
            slices = Slices(treated, codec)
            stream = slices.bits / 8 * treated.elements_each
            runs.append(("decompress", name, slices.decompress(), stream / size))
            runs.append(("fused", name, slices.decode(), stream / raw))
    runs.append(("dequantize", "", Slices(treated, native.Codec.NONE).dequantize(), size / raw))
    runs.append(("deliver", "", memcpy(len(treated.target), raw), 1.0))
    speeds = in_turns([run for _, _, run, _ in runs], repeats, f"slices of {size // KIB} KiB")
    for (stage, codec_name, _, in_share), own in zip(runs, speeds, strict=True):
        curves.add(report, stage, codec_name, size, own, in_share)


# ---- The network -----------------------------------------------------------------------------------------------------


def _measure_net(
    report: Report, curves: _Curves, address: str, sender: str, size: int, total: int, repeats: int
) -> None:
    """Add receiving from the storage node and from a plain socket, at one request size."""
    count = max(1, total // size)
    with ExitStack() as stack:
        server = stack.enter_context(client(address))
        ours = stack.enter_context(_connected(address))
        plain = stack.enter_context(_connected(sender))
        net = _Receiver(ours, server, size, count)
        floor = memory(count * size)
        runs = [Run(count * size, net.receive, nothing), Run(count * size, lambda: _fill(plain, floor, size), nothing)]
        speeds = in_turns(runs, repeats, f"requests of {size // KIB} KiB")
        net.verify()
    for stage, own in zip(("net", "plain socket"), speeds, strict=True):
        curves.add(report, stage, "", size, own, 1.0)


@contextmanager
def _connected(address: str) -> Iterator[socket.socket]:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield connection


class _Receiver:
    """Receives ranges of values from the storage node, with some requests in flight."""

    def __init__(self, connection: socket.socket, server: "redis.Redis", size: int, count: int) -> None:
        self._connection = connection
        self._size = size
        self._value = np.random.default_rng(size).integers(0, 256, size * min(count, 8), np.uint8)
        key = f"bench:{size}"
        server.set(key, self._value.tobytes())
        ranges = [(index % min(count, 8) * size, index % min(count, 8) * size + size - 1) for index in range(count)]
        self._requests = [self._request(key, first, last) for first, last in ranges]
        self._answer = len(f"${size}\r\n") + size + 2
        self._memory = memory(count * size + self._answer)

    @staticmethod
    def _request(key: str, first: int, last: int) -> bytes:
        parts = [b"GETRANGE", key.encode(), str(first).encode(), str(last).encode()]
        return b"*4\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)

    def receive(self) -> None:
        """Receive all answers, each to its place. The next answer's first bytes overwrite the trailer."""
        connection, view = self._connection, memoryview(self._memory)
        connection.sendall(b"".join(self._requests[:IN_FLIGHT]))
        for index in range(len(self._requests)):
            _receive_all(connection, view[index * self._size : index * self._size + self._answer])
            if index + IN_FLIGHT < len(self._requests):
                connection.sendall(self._requests[index + IN_FLIGHT])

    def verify(self) -> None:
        """Raise ShadowServeError unless the last answer has the stored bytes."""
        start = (len(self._requests) - 1) * self._size + self._answer - self._size - 2
        place = (len(self._requests) - 1) % min(len(self._requests), 8) * self._size
        if not np.array_equal(self._memory[start : start + self._size], self._value[place : place + self._size]):
            raise ShadowServeError("storage answered other bytes than it was given; please report this")


def _receive_all(connection: socket.socket, view: memoryview) -> None:
    while view:
        received = connection.recv_into(view, 0, socket.MSG_WAITALL)
        if received == 0:
            raise ShadowServeError("the other end closed the connection")
        view = view[received:]


def _fill(connection: socket.socket, target: "np.typing.NDArray[np.uint8]", size: int) -> None:
    """Fill memory from the plain socket, in requests of ``size`` bytes, with some in flight."""
    view, request = memoryview(target), size.to_bytes(4)
    connection.sendall(request * min(IN_FLIGHT, len(target) // size))
    for position in range(0, len(target), size):
        _receive_all(connection, view[position : position + size])
        if position + IN_FLIGHT * size < len(target):
            connection.sendall(request)


# ---- Report ----------------------------------------------------------------------------------------------------------


def _ratios(report: Report, decoding: _Curves, receiving: _Curves) -> None:
    def pairs(curves: _Curves, one: str, other: str) -> list[float]:
        return [a / b for a, b in zip(curves.usual(one), curves.usual(other), strict=True)]

    codec = default_codec()
    report.ratio("dequantize_over_memcpy", pairs(decoding, "dequantize", "deliver"), "at least 0.9")
    report.ratio("fused_over_memcpy", pairs(decoding, f"fused {codec}", "deliver"), f"none; {codec} against the limit")
    apart = [
        1 / (0.5 / decompress + 1 / dequantize + 1 / deliver)  # symbols are half as many bytes as elements
        for decompress, dequantize, deliver in zip(
            *(decoding.usual(name) for name in (f"decompress {codec}", "dequantize", "deliver")), strict=True
        )
    ]
    fused = decoding.usual(f"fused {codec}")
    report.ratio("fused_over_separate", [a / b for a, b in zip(fused, apart, strict=True)], "at least 1")
    report.ratio("net_over_plain_socket", pairs(receiving, "net", "plain socket"), "none; the receiver's share")


def _charts(report: Report, decoding: _Curves, receiving: _Curves) -> None:
    limit = {"memcpy": float(np.median(decoding.usual("deliver")))}
    fused = {name.split()[1]: decoding.line(name) for name in _ordered(decoding, "fused")}
    report.charts.append(
        Chart(
            "Decoded to bfloat16, fused",
            x="symbols in a slice",
            y="elements, GB/s of one core",
            series=fused,
            limits=limit,
            x_log=True,
            x_bytes=True,
        )
    )
    apart = {name: decoding.line(name) for name in [*_ordered(decoding, "decompress"), "dequantize", "deliver"]}
    report.charts.append(
        Chart(
            "Stages apart",
            x="symbols in a slice",
            y="out of the stage, GB/s of one core",
            series=apart,
            x_log=True,
            x_bytes=True,
        )
    )
    floor = {"plain socket, best": max(float(value) for _, value in receiving.line("plain socket"))}
    report.charts.append(
        Chart(
            "Received",
            x="requested at a time",
            y="GB/s of one core",
            series={"storage server": receiving.line("net")},
            limits=floor,
            x_log=True,
            x_bytes=True,
        )
    )


def _ordered(curves: _Curves, stage: str) -> list[str]:
    """Return a stage's curves, kvrans first."""
    return [f"{stage} {codec}" for codec in CODECS if f"{stage} {codec}" in curves.speeds]
