"""Compares the CPU time of small commands with that of Redis.

Method: redis-benchmark sends SET and GET of 3 bytes, one at a time over 50 connections, to this server and to Redis
in turns. The CPU time of the server's process counts, since the clients share its cores. ``NAME_over_redis`` is
commands per CPU second over that of Redis. The server is made for values of megabytes: a small command may cost three
times as much as in Redis.

Prediction: Redis needs 2.4 us, nearly all in the kernel. The same system calls need 3 us here, and Python 4: 0.34.
"""

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Final

import click
import psutil

from shadowserve.errors import ShadowServeError
from shadowserve_tools.processes import Child, Programs, start_redis
from shadowserve_tools.report import Cost, Output, Report, cpu_s, output_options, repeat

_COMMANDS: Final = ("SET", "GET")
_STORES: Final = ("ShadowServe", "Redis")
_TIMEOUT_S: Final = 600


@click.command()
@click.option("--count", default=200_000, show_default=True, type=click.IntRange(100), help="Commands of a run.")
@click.option("--clients", default=50, show_default=True, type=click.IntRange(1), help="Connections.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1), help="Pairs of runs.")
@output_options
def commands(count: int, clients: int, repeats: int, output: Output) -> None:
    """Compare the CPU time of small SET and GET commands with that of Redis."""
    for program in ("redis-server", "redis-benchmark"):
        if not shutil.which(program):
            raise ShadowServeError(
                f"bench commands compares with Redis, and {program} is not installed; run scripts/setup"
            )
    report = Report(
        "commands", ["command", "store", "cpu_us_per_command", "commands_per_s", "load"], bars=["cpu_us_per_command"]
    )

    with Programs() as programs:
        servers = [
            programs.storage("--io-threads", "1"),
            programs.enter_context(start_redis(programs.logs)),
        ]
        for command in _COMMANDS:
            flags = ["-c", str(clients), "-t", command.lower(), "-n", str(count)]
            costs = repeat(repeats, *(_run(server, flags) for server in servers), description=command)
            each = [[cost.cpu_s / count for cost in own] for own in costs]
            for store, own, spent_s in zip(_STORES, costs, each, strict=True):
                report.row(
                    command=command, store=store, cpu_us_per_command=statistics.median(spent_s) * 1e6,
                    commands_per_s=count / statistics.median(cost.wall_s for cost in own), load=os.getloadavg()[0],
                )  # fmt: skip

            pairs = [redis_s / own_s for own_s, redis_s in zip(*each, strict=True)]
            report.ratio(f"{command.lower()}_over_redis", pairs, "at least 0.333")
    report.finish(output)


def _run(server: Child, flags: list[str]) -> Callable[[], Cost]:
    """Return a function that runs redis-benchmark against a server and returns the server's cost."""
    host, _, port = server.address.rpartition(":")
    process = psutil.Process(server.process.pid)

    def run() -> Cost:
        begin_s, before_s = time.perf_counter(), cpu_s(process)
        command = ["redis-benchmark", "-h", host, "-p", port, "-q", *flags]
        found = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        cost = Cost(time.perf_counter() - begin_s, cpu_s(process) - before_s)
        if found.returncode or "requests per second" not in found.stdout:
            said = (found.stderr or found.stdout)[-500:].strip()
            raise ShadowServeError(f"redis-benchmark failed against {server.name}: {said or 'it said nothing'}")
        return cost

    return run
