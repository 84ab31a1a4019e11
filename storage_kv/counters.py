"""Counters of work: counters of the node and of each command.

Timing GET of a small value takes nearly as long as executing it. So one call in :data:`SAMPLE_EVERY` of each command is
timed, the first one included. A duration is the time under the node's lock: the time that a command keeps all other
clients waiting. It excludes waiting for a device or for another thread's checksum.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from shadowserve.latency import LatencyHistogram

SAMPLE_EVERY: Final = 64

COMMAND_SECONDS: Final = (
    *(0.000_001, 0.000_002_5, 0.000_005, 0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5),
    *(0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 1.0),
)
"""Upper bounds of the buckets."""

_T = TypeVar("_T")


@dataclass(slots=True)
class CommandCounters:
    """Counters of one command. Changed with the node's lock held.

    Attributes:
        calls: Number of executions, failures included.
        rejected: Number of refusals before execution: wrong number of arguments, no permission.
        durations: Durations of the timed calls.
    """

    calls: int = 0
    failed: int = 0
    rejected: int = 0
    durations: LatencyHistogram = field(default_factory=lambda: LatencyHistogram(COMMAND_SECONDS))

    def timed(self, handler: Callable[..., _T], *arguments: object) -> _T:
        """Call the handler and record its duration, also when it raises."""
        begin = time.perf_counter_ns()
        try:
            return handler(*arguments)
        finally:
            self.durations.add(time.perf_counter_ns() - begin)

    @property
    def mean_ns(self) -> float:
        count = self.durations.count
        return self.durations.sum_ns / count if count else 0.0


@dataclass(slots=True)
class Counters:
    """Counters of the node since its start, or since CONFIG RESETSTAT. metric_table.py explains each."""

    connections: int = 0
    connections_rejected: int = 0
    connections_denied: int = 0
    commands: int = 0
    command_errors: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    hits: int = 0
    misses: int = 0
    lookup_hits: int = 0
    lookup_misses: int = 0
    lost_values: int = 0
    records_stored: int = 0
    records_kept: int = 0
    records_refused: int = 0
    meta_keys: int = 0
    layer_streams: int = 0
    layer_streams_failed: int = 0
    layer_streams_closed: int = 0
    layers_sent: int = 0
    layer_bytes_sent: int = 0
    clients_stalled: int = 0
    clients_idle: int = 0
    protocol_errors: int = 0
    http_refused: int = 0
    unauthenticated_closed: int = 0
    unauthenticated_evicted: int = 0
    clients_evicted: int = 0
    authentication_failures: int = 0
    commands_denied: int = 0
    keys_denied: int = 0
    tls_failures: int = 0
    throttled: int = 0
    unknown_commands: int = 0
    busy_refusals: int = 0
    by_command: dict[str, CommandCounters] = field(default_factory=dict)

    def of(self, command: str) -> CommandCounters:
        found = self.by_command.get(command)
        if found is None:
            found = self.by_command[command] = CommandCounters()
        return found
