"""Compares the CPU time of small commands with that of Redis.

Method: redis-benchmark sends SET and GET of 3 bytes, one at a time over 50 connections, to this server and to Redis
in turns. The CPU time of the server's process counts, since the clients share its cores. ``NAME_over_redis`` is
commands per CPU second over that of Redis. The server is made for values of megabytes: a small command may cost three
times as much as in Redis.

Prediction: Redis needs 2.4 us, nearly all in the kernel. The same system calls need 3 us here, and Python 4: 0.34.
"""

import functools
import os
import shutil
import statistics
import subprocess
import time
from typing import Final

import psutil

from shadowserve.errors import ShadowServeError
from shadowserve_tools.bench.parts.options import benchmark, repeats_option, whole
from shadowserve_tools.processes import Child, Programs, start_redis
from shadowserve_tools.report import Cost, Report, cpu_s, cpus, in_turns, over, walls

_OURS, _REDIS = "ShadowServe", "Redis"
_TIMEOUT_S: Final = 600


@benchmark("command", "store", "cpu_us_per_command", "commands_per_s", "load", bars=["cpu_us_per_command"])
@whole("--count", 200_000, "Commands of a run.", 100)
@repeats_option(5, "Pairs of runs.")
def commands(report: Report, programs: Programs, count: int, repeats: int) -> None:
    """Compare the CPU time of small SET and GET commands with that of Redis."""
    for program in ("redis-server", "redis-benchmark"):
        if not shutil.which(program):
            raise ShadowServeError(
                f"bench commands compares with Redis, and {program} is not installed; run scripts/setup"
            )
    ours, redis = programs.storage("--io-threads", "1"), programs.enter_context(start_redis(programs.logs))
    servers = {_OURS: ours, _REDIS: redis}
    for command in ("SET", "GET"):
        flags = ["-c", "50", "-t", command.lower(), "-n", str(count)]
        runs = {name: functools.partial(_run, server, flags) for name, server in servers.items()}
        costs = in_turns(repeats, runs, command)
        for store, own in costs.items():
            report.row(
                command=command, store=store, cpu_us_per_command=statistics.median(cpus(own)) / count * 1e6,
                commands_per_s=count / statistics.median(walls(own)), load=os.getloadavg()[0],
            )  # fmt: skip
        pairs = over(cpus(costs[_REDIS]), cpus(costs[_OURS]))
        report.ratio(f"{command.lower()}_over_redis", pairs, "at least 0.333")


def _run(server: Child, flags: list[str]) -> Cost:
    host, _, port = server.address.rpartition(":")
    process = psutil.Process(server.process.pid)
    begin_s, before_s = time.perf_counter(), cpu_s(process)
    command = ["redis-benchmark", "-h", host, "-p", port, "-q", *flags]
    found = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    cost = Cost(time.perf_counter() - begin_s, cpu_s(process) - before_s)
    if found.returncode or "requests per second" not in found.stdout:
        said = (found.stderr or found.stdout)[-500:].strip()
        raise ShadowServeError(f"redis-benchmark failed against {server.name}: {said or 'it said nothing'}")
    return cost
