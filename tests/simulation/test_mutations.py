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


def in_data_plane(plan: Plan) -> bool:
    return plan.dataplane and plan.network


def in_a_crash(plan: Plan) -> bool:
    return plan.engine == "pool" and plan.crashes and not plan.disks


def test_the_simulation_detects_ignored_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "failure_of", lambda *arguments: None)
    assert seen(lambda plan: plan.disks, begin=104).startswith(("wrong", "stale"))


def test_the_simulation_detects_acknowledgement_before_the_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Log, "when_durable", lambda self, callback: callback(None))
    assert seen(in_a_crash).startswith(("lost", "stale"))


def test_the_simulation_detects_ignored_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "qualify", lambda self, argument: (0, bytes(argument)))
    assert seen(lambda plan: not plan.dataplane).startswith(("wrong", "stale", "lost"))


def test_the_simulation_detects_removals_that_are_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskLog, "remove", lambda self, tenant, key: None)
    assert seen(in_a_crash).startswith(("stale", "dropped"))  # the latter for objects at the place of others


def test_the_simulation_detects_an_unchecked_log_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tail, "_is_complete", lambda entry, blocks, read: True)
    assert seen(in_a_crash, begin=944).startswith("lost")


def test_the_simulation_detects_moves_acknowledged_before_the_old_removal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Core, "undurable_disks", lambda self, tenant, key, but=None: [])
    assert seen(in_moves, _RARE, begin=3185).startswith("stale")


def test_the_simulation_detects_old_copies_freed_before_the_new_one_is_durable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace = Core.replace

    def early(self: Core, old: Entry, disk: Disk | None) -> Any:
        place, left = replace(self, old, disk)
        self.free_old_copies(old.tenant, old.key, left)
        return place, []

    monkeypatch.setattr(Core, "replace", early)
    assert seen(in_moves, _RARE, begin=4353).startswith(("lost", "prefix"))


def test_the_simulation_detects_stale_devices_that_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_find_stale", lambda disks: [])
    assert seen(in_absence, begin=932).startswith("stale")


def test_the_simulation_detects_endless_waits_of_the_data_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RespClient, "_check_silence", lambda self: None)
    assert seen(in_data_plane).startswith("hang")


def test_the_simulation_detects_ignored_expiries(monkeypatch: pytest.MonkeyPatch) -> None:
    put = DevicePool.put

    def forget(self: DevicePool, key: bytes, value: Any, **named: Any) -> Any:
        return put(self, key, value, **{**named, "expires_at_ms": None})

    monkeypatch.setattr(DevicePool, "put", forget)
    assert seen(lambda plan: plan.engine == "pool").startswith("stale")


def test_the_simulation_detects_uncounted_evictions(monkeypatch: pytest.MonkeyPatch) -> None:
    evict = Space.evict

    def quietly(self: Space, **named: Any) -> bool:
        counters = self._core.counters
        before = [(each.evictions.copy(), each) for each in (*counters.tenants.values(), counters.everyones)]
        found = evict(self, **named)
        for counts, each in before:
            each.evictions = counts
        return found

    monkeypatch.setattr(Space, "evict", quietly)
    assert seen(lambda plan: plan.engine == "pool" and plan.tight and not plan.disks, begin=77).startswith("lost")
