"""Reports of decoding engines, and the movers of a data plane during these reports."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from dataplane_support import Client
from machine import NEVER_S

from dpu_dataplane.server import Daemon
from dpu_dataplane.shared_rate import Mover
from shadowserve.proto import dataplane_pb2 as pb

RATE = 16 << 20
"""Lowest rate: a tenth of a second of it is three chunks."""
SILENT_MS = 10_000
"""Maximum duration of a report."""


async def report(client: Client, engine: bytes = b"a", **changes: Any) -> pb.StepAnswer:
    """Report a decoding engine, by default at the lowest rate."""
    fields: dict[str, Any] = {
        "engine": engine,
        "decodes": True,
        "rate": RATE,
        "interference_budget": 0.02,
        "lasts_ms": SILENT_MS,
    }
    answer: pb.StepAnswer = await client.stub.ReportSteps(pb.StepReport(**(fields | changes)))
    return answer


def moved(daemon: Daemon) -> dict[str, int]:
    """Return moved bytes by mover. Check that the granted bytes cover them."""
    metrics, counted = daemon.metrics, daemon.metrics.moved_bytes
    granted = {mover.label: size for mover, size in daemon.budget.shared.granted_bytes.items()}
    stored = sum(counted[each] for each in ("store", "tier_store", "preemption_save"))
    assert all(counted[mover] <= granted[mover] for mover in counted)
    assert metrics.totals["delivered_bytes"] <= granted["fetch"] + granted["tier_load"] + granted["page_load"]
    assert metrics.totals["stored_raw_bytes"] <= stored
    assert sum(metrics.prefetch_bytes.values()) <= granted["prefetch"]
    return {name: size for name, size in counted.items() if size}


def delayed(daemon: Daemon, mover: Mover) -> int:
    return daemon.metrics.interference_delayed[mover.label]


async def held(daemon: Daemon, client: Client, mover: Mover, begin: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Check that a mover waits for the turn of another one. Return its result after that."""
    await report(client)
    async with daemon.budget.turn(Mover.FETCH, 1 << 50) as turn:
        turn.moved_bytes = 0
        before, granted = delayed(daemon, mover), daemon.budget.shared.granted_bytes[mover]
        working = asyncio.create_task(begin())
        async with asyncio.timeout(NEVER_S):
            while delayed(daemon, mover) == before:
                await report(client)  # the previous report expires
                await asyncio.sleep(0.01)
        assert daemon.budget.shared.granted_bytes[mover] == granted, "the mover moved bytes without a turn"
    return await working
