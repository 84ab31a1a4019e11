"""Deliberately broken products: the simulation must detect each, nearly all within a thousand seeds."""

from collections.abc import Callable
from typing import Any

import pytest
from plan import Plan
from reference_model import Violation
from scenario import plan_of, simulate

from shadowserve.pool import opening, reads
from shadowserve.pool.core import Core
from shadowserve.pool.device_pool import DevicePool
from shadowserve.pool.disk import Disk
from shadowserve.pool.disk_log import DiskLog
from shadowserve.pool.entries import Entry
from shadowserve.pool.space import Space
from shadowserve.pool.volume import log_tail
from shadowserve.pool.volume.log import Log
from shadowserve.resp_client import RespClient
from storage_kv.session import Session

_SEEDS = range(1, 1001)
_RARE = range(3001, 10001)
"""Number of seeds for defects that only one in a hundred suitable runs detects."""


def seen(may_show: Callable[[Plan], bool], seeds: range = _SEEDS, begin: int = 0) -> str:
    """Return the failure of the first failing seed. Only seeds of suitable plans run.

    The search begins with the last detecting seed, and wraps around.
    """
    for seed in (*range(max(begin, seeds.start), seeds.stop), *range(seeds.start, begin)):
        if may_show(plan_of(seed)):
            try:
                simulate(seed)
            except (Violation, AssertionError) as error:
                return f"{error} (seed {seed})"
    return "nothing"


def in_moves(plan: Plan) -> bool:
    return plan.moves and plan.crashes and not plan.disks


def in_absence(plan: Plan) -> bool:
    return plan.absent and not plan.disks


def in_a_crash(plan: Plan) -> bool:
    return plan.engine == "pool" and plan.crashes and not plan.disks


def _early(replace: Any) -> Any:
    def early(self: Core, old: Entry, disk: Disk | None) -> Any:
        place, left = replace(self, old, disk)
        self.free_old_copies(old.tenant, old.key, left)
        return place, []

    return early


def _forgetful(put: Any) -> Any:
    return lambda self, key, value, **named: put(self, key, value, **{**named, "expires_at_ms": None})


def _quiet(evict: Any) -> Any:
    def quietly(self: Space, **named: Any) -> bool:
        counters = self._core.counters
        before = [(each.evictions.copy(), each) for each in (*counters.tenants.values(), counters.everyones)]
        found = evict(self, **named)
        for counts, each in before:
            each.evictions = counts
        return found

    return quietly


def always(value: Any) -> Callable[[Any], Any]:
    return lambda _: lambda *arguments, **named: value


MUTANTS: dict[str, tuple[Any, str, Callable[[Any], Any], Callable[[Plan], bool], range, int, tuple[str, ...]]] = {
    "ignored checksums": (
        reads, "failure_of", always(None), lambda plan: plan.disks, _SEEDS, 104, ("wrong", "stale")
    ),
    "acknowledgement before the flush": (
        Log, "when_durable", lambda _: lambda self, callback: callback(None), in_a_crash, _SEEDS, 0, ("lost", "stale")
    ),
    "ignored tenants": (
        Session, "qualify", lambda _: lambda self, argument: (0, bytes(argument)),
        lambda plan: not plan.dataplane, _SEEDS, 0, ("wrong", "stale", "lost"),
    ),
    "removals that are not logged": (  # "dropped" for objects at the place of others
        DiskLog, "remove", always(None), in_a_crash, _SEEDS, 0, ("stale", "dropped")
    ),
    "an unchecked log tail": (log_tail, "_is_complete", always(True), in_a_crash, _SEEDS, 944, ("lost",)),
    "moves acknowledged before the old removal": (
        Core, "undurable_disks", always([]), in_moves, _RARE, 3185, ("stale",)
    ),
    "old copies freed before the new one is durable": (
        Core, "replace", _early, in_moves, _RARE, 4353, ("lost", "prefix")
    ),
    "stale devices that are believed": (opening, "_find_stale", always([]), in_absence, _SEEDS, 932, ("stale",)),
    "endless waits of the data plane": (
        RespClient, "_check_silence", always(None), lambda plan: plan.dataplane and plan.network, _SEEDS, 0, ("hang",)
    ),
    "ignored expiries": (
        DevicePool, "put", _forgetful, lambda plan: plan.engine == "pool", _SEEDS, 0, ("stale",)
    ),
    "uncounted evictions": (
        Space, "evict", _quiet, lambda plan: plan.engine == "pool" and plan.tight and not plan.disks, _SEEDS, 77,
        ("lost",),
    ),
}  # fmt: skip
"""Changed place of the product, and the change; plans, seeds and the first seed that may show it; the failure."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_simulation_detects(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, name, change, may_show, seeds, begin, failures = MUTANTS[mutant]
    monkeypatch.setattr(target, name, change(getattr(target, name)))
    assert seen(may_show, seeds, begin).startswith(failures)
