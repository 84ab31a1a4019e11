"""``shadowserve bench aggregate``: a prefix in one request, against a request for each chunk and layer."""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import psutil

from shadowserve.errors import ShadowServeError
from shadowserve.resp import encode_bulk_header, encode_command
from shadowserve_tools.bench.parts.layered import LeanSocket, answer_lengths, plain_record
from shadowserve_tools.processes import Child, start_storage
from shadowserve_tools.report import Chart, Cost, Output, Report, cpu_s, measure, output_options, repeat

__all__ = ["aggregate"]

TOKEN_LAYER_BYTES: Final = 2694
"""Stored, of a token and layer: Llama-8B's 4,096 in bfloat16, lossless (docs/benchmarks/codecs.md: 1.52)."""
WAYS: Final = ("KV.LAYERS", "GETRANGE, 64 ahead", "GETRANGE, one by one")
_AHEAD: Final = 64
"""Requests that are sent before their answers have come: as many as keep the connection busy."""


@dataclass(frozen=True)
class Prefix:
    """A prefix that is stored in chunks of so many tokens.

    Attributes:
        keys: of its records, in order.
        body: where a record's layers begin.
        piece: bytes of a layer of a chunk.
    """

    chunk_tokens: int
    layers: int
    keys: list[bytes]
    body: int
    piece: int

    @property
    def moved_bytes(self) -> int:
        return self.layers * len(self.keys) * self.piece

    def ranges(self) -> list[bytes]:
        """Return a GETRANGE for each chunk of each layer."""
        return [
            encode_command("GETRANGE", key, begin, begin + self.piece - 1)
            for begin in range(self.body, self.body + self.layers * self.piece, self.piece)
            for key in self.keys
        ]

    def whole(self) -> bytes:
        """Return the one request."""
        return encode_command("KV.LAYERS", f"0-{self.layers - 1}", 0, 0, *self.keys)


def _read_tokens(_context: click.Context, _parameter: click.Parameter, text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not numbers with commas between, such as 16,256") from error
    if not all(1 <= each <= 1024 for each in found):
        raise click.BadParameter(f"{text!r}: chunks have 1 to 1024 tokens")
    return found


@click.command()
@click.option(
    "--chunks",
    "sizes",
    default="16,64,256",
    show_default=True,
    callback=_read_tokens,
    metavar="TOKENS,...",
    help="Of a chunk.",
)
@click.option("--tokens", default=2048, show_default=True, type=click.IntRange(256), help="Of the prefix.")
@click.option("--layers", default=32, show_default=True, type=click.IntRange(1, 256), help="Of the model.")
@click.option("--repeats", default=7, show_default=True, type=click.IntRange(1), help="Rounds of all ways.")
@output_options
def aggregate(sizes: list[int], tokens: int, layers: int, repeats: int, output: Output) -> None:
    """Fetch a prefix layer by layer from a storage server's memory, by one request and by one for each chunk and layer.

    The client receives into memory that is there already and looks at nothing. ``aggregate_over_single`` is how many
    times faster one request is than a request at a time; ``aggregate_over_ahead`` than 64 of them on their way; the
    server's CPU time is of all its threads. Requests are those that the server has counted.
    """
    report = Report(
        "aggregate", ["chunk_tokens", "way", "requests", "ms", "GB_per_s", "server_cpu_s_per_GB", "client_cpu_s_per_GB"]
    )
    times: dict[str, list[tuple[str, float]]] = {way: [] for way in WAYS}
    server_cpu: dict[str, list[tuple[str, float]]] = {way: [] for way in WAYS}
    requests: list[int] = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            budget = 4 * tokens * layers * TOKEN_LAYER_BYTES + (256 << 20)
            with (
                start_storage(Path(folder), "--io-threads", "1", "--memory-budget-bytes", str(budget)) as server,
                LeanSocket(server.address) as client,
            ):
                prefix = _stored(client, size, tokens, layers)
                _check(client, prefix)
                runs = [_aggregated(client, prefix), _ranged(client, prefix, _AHEAD), _ranged(client, prefix, 1)]
                counts = [_commands(server, run) for run in runs]
                requests.append(counts[0])
                _compare(report, server, prefix, runs, counts, repeats, times, server_cpu)
    fewest, most = min(requests), max(requests)
    report.ratio("requests_most_over_fewest", [most / fewest], "exactly 1 request a prefix, whatever its chunks")
    report.charts += [
        Chart("Time of a prefix", x="chunk, tokens", y="ms", series=times, kind="bars"),
        Chart("Server's CPU time", x="chunk, tokens", y="CPU s/GB", series=server_cpu, kind="bars"),
    ]
    report.finish(output)


def _compare(
    report: Report, server: Child, prefix: Prefix, runs: Sequence[Callable[[], object]], counts: Sequence[int],
    repeats: int, times: dict[str, list[tuple[str, float]]], server_cpu: dict[str, list[tuple[str, float]]],
) -> None:  # fmt: skip
    """Take turns, and add rows and ratios of one size of chunks."""
    process, size = psutil.Process(server.process.pid), prefix.chunk_tokens
    own: list[list[float]] = [[] for _ in runs]

    def timed(number: int) -> Callable[[], Cost]:
        def run() -> Cost:
            before_s = cpu_s(process)
            cost = measure(runs[number])
            own[number].append(cpu_s(process) - before_s)
            return cost

        return run

    costs = repeat(repeats, *map(timed, range(len(runs))), description=f"chunks of {size}")
    gigabytes = prefix.moved_bytes / 1e9
    spent = [[each / gigabytes for each in some[-repeats:]] for some in own]
    for number, way in enumerate(WAYS):
        wall_s = statistics.median(cost.wall_s for cost in costs[number])
        cpu = statistics.median(spent[number])
        report.row(
            chunk_tokens=size, way=way, requests=counts[number], ms=1e3 * wall_s, GB_per_s=gigabytes / wall_s,
            server_cpu_s_per_GB=cpu,
            client_cpu_s_per_GB=statistics.median(cost.cpu_s for cost in costs[number]) / gigabytes,
        )  # fmt: skip
        times[way].append((str(size), 1e3 * wall_s))
        server_cpu[way].append((str(size), cpu))
    walls = [[cost.wall_s for cost in some] for some in costs]
    goal = "at least 3" if size == 16 else "reported"
    report.ratio(f"aggregate_over_single_{size}", [s / a for a, s in zip(walls[0], walls[2], strict=True)], goal)
    report.ratio(f"aggregate_over_ahead_{size}", [s / a for a, s in zip(walls[0], walls[1], strict=True)], "reported")
    goal = "at most 1" if size == 256 else "reported"
    report.ratio(f"cpu_over_getrange_{size}", [a / s for a, s in zip(spent[0], spent[1], strict=True)], goal)


def _stored(client: LeanSocket, size: int, tokens: int, layers: int) -> Prefix:
    keys, value = [], b""
    for number in range(tokens // size):
        name = (size << 32 | number).to_bytes(32, "big")
        key, value = plain_record(name, layers=layers, tokens=size, token_bytes=TOKEN_LAYER_BYTES)
        client.store([(key, value)])
        keys.append(key)
    piece = size * TOKEN_LAYER_BYTES
    return Prefix(size, layers, keys, len(value) - layers * piece, piece)


def _check(client: LeanSocket, prefix: Prefix) -> None:
    """See that both ways bring the same bytes of the last layer of the last chunk."""
    _ranged(client, prefix, 1)()
    client.socket.sendall(prefix.ranges()[-1])
    by_range = bytes(client.receive(len(encode_bulk_header(prefix.piece)) + prefix.piece + 2))[-prefix.piece - 2 :]
    client.socket.sendall(prefix.whole())
    lengths = answer_lengths(prefix.layers, [prefix.piece] * len(prefix.keys))
    client.receive(sum(lengths) - len(by_range))
    if bytes(client.receive(len(by_range))) != by_range:
        raise ShadowServeError("KV.LAYERS and GETRANGE answer different bytes; the server is faulty")


def _aggregated(client: LeanSocket, prefix: Prefix) -> Callable[[], object]:
    command = prefix.whole()
    size = sum(answer_lengths(prefix.layers, [prefix.piece] * len(prefix.keys)))

    def run() -> None:
        client.socket.sendall(command)
        client.receive(size)

    return run


def _ranged(client: LeanSocket, prefix: Prefix, ahead: int) -> Callable[[], object]:
    commands = prefix.ranges()
    size = len(encode_bulk_header(prefix.piece)) + prefix.piece + 2

    def run() -> None:
        for begin in range(0, len(commands), max(1, ahead // 2)):
            some = commands[begin : begin + max(1, ahead // 2)]
            client.socket.sendall(b"".join(some))
            if ahead == 1:
                client.receive(size)
            elif begin:  # the half before this one, which is on its way meanwhile
                client.receive(size * (ahead // 2))
        if ahead > 1:
            last = len(commands) % (ahead // 2) or min(len(commands), ahead // 2)
            client.receive(size * last)

    return run


def _commands(server: Child, run: Callable[[], object]) -> int:
    """Return how many commands the server counts while something runs."""
    import redis

    host, _, port = server.address.rpartition(":")
    with redis.Redis(host=host, port=int(port)) as asked:
        asked.ping()
        before = asked.info("stats")["total_commands_processed"]
        run()
        return int(asked.info("stats")["total_commands_processed"] - before - 1)
