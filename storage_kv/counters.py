"""Counters of work: counters of the node and of each command.

Timing GET of a small value takes nearly as long as executing it. So one call in :data:`SAMPLE_EVERY` of each command is
timed, the first one included. A duration is the time under the node's lock: the time that a command keeps all other
clients waiting. It excludes waiting for a device or for another thread's checksum.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

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
    """Counters of one command, and the durations of its timed calls. Changed with the node's lock held."""

    calls: int = 0  # number of executions, failures included
    failed: int = 0
    rejected: int = 0  # number of refusals before execution: wrong number of arguments, no permission
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


def _counted(help: str, info: str = "ShadowServe") -> Any:
    """Return a counter of :class:`Counters`, with the help and the section of INFO of its row in metric_table.py."""
    return field(default=0, metadata={"help": help, "info": info})


@dataclass(slots=True)
class Counters:
    """Counters of the node since its start, or since CONFIG RESETSTAT."""

    connections: int = _counted("Accepted connections.", "Stats:total_connections_received")
    connections_rejected: int = _counted(
        "Connections closed because there was no free connection slot.", "Stats:rejected_connections"
    )
    connections_denied: int = _counted("Connections refused by protected mode.")
    commands: int = _counted("Executed commands.", "Stats:total_commands_processed")
    command_errors: int = _counted("Error replies.", "Stats:total_error_replies")
    busy_refusals: int = _counted("Writes that had to wait because too many others were unfinished.", "Devices")
    unknown_commands: int = _counted("Requests for commands that do not exist.")
    protocol_errors: int = _counted("Connections closed because of malformed input.")
    http_refused: int = _counted("Connections closed because the client sent HTTP.")
    unauthenticated_closed: int = _counted("Connections closed because they did not authenticate in time.")
    unauthenticated_evicted: int = _counted("Unauthenticated connections closed in favour of new ones.")
    clients_evicted: int = _counted(
        "Connections closed because other clients needed their memory.", "Stats:evicted_clients"
    )
    clients_stalled: int = _counted("Connections closed because a request or reply made no progress.")
    clients_idle: int = _counted("Connections closed because they were idle.")
    authentication_failures: int = _counted("Failed authentications.", "Stats:acl_access_denied_auth")
    tls_failures: int = _counted("Failed TLS handshakes.")
    commands_denied: int = _counted(
        "Commands refused because the user may not run them.", "Stats:acl_access_denied_cmd"
    )
    keys_denied: int = _counted(
        "Commands refused because the user may not access their keys.", "Stats:acl_access_denied_key"
    )
    throttled: int = _counted("Times that a client had to wait because its tenant exceeded its rates.")
    received_bytes: int = _counted("Received bytes.", "Stats:total_net_input_bytes")
    sent_bytes: int = _counted("Sent bytes.", "Stats:total_net_output_bytes")
    hits: int = _counted("Keys found by reading commands.", "Stats:keyspace_hits")
    misses: int = _counted("Keys not found by reading commands.", "Stats:keyspace_misses")
    lookup_hits: int = _counted("Part of hits: keys found by commands that do not return the value.", "Stats")
    lookup_misses: int = _counted("Part of misses: keys not found by commands that do not return the value.", "Stats")
    lost_values: int = _counted("Keys found whose bytes could not be read; answered as misses.")
    meta_keys: int = _counted("Keys requested by KV.META.")
    layer_streams: int = _counted("Requests for layers (KV.LAYERS).")
    layer_streams_failed: int = _counted("Requests for layers that failed because of a bug; the log has the details.")
    layer_streams_closed: int = _counted("Requests for layers refused or ended because they took too long.")
    layers_sent: int = _counted("Sent layers, each of a whole prefix.")
    layer_bytes_sent: int = _counted("Bytes of sent layers.")
    records_stored: int = _counted("Stored records.")
    records_kept: int = _counted("Records that were not stored because they existed already.")
    records_refused: int = _counted("Records refused because they are invalid.")
    by_command: dict[str, CommandCounters] = field(default_factory=dict)

    def of(self, command: str) -> CommandCounters:
        found = self.by_command.get(command)
        if found is None:
            found = self.by_command[command] = CommandCounters()
        return found
