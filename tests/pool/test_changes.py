"""Logs of changes: their memory has a limit, and ends with their readers."""

import pytest

from shadowserve.pool.changes import ENTRY_BYTES, STORED, Changes

LIMIT = 8 * 1_024 * ENTRY_BYTES


def test_the_logs_of_all_tenants_stay_within_the_limit() -> None:
    changes = Changes(LIMIT)
    for tenant in range(20):
        assert changes.read(tenant, b"", 0, 0).entries is None
        for number in range(10_000):
            changes.note(tenant, STORED, number.to_bytes(32, "big"))
            assert number % 100 or changes.size <= LIMIT
        name, position, _ = changes.read(tenant, b"", 0, 0)
        changes.note(tenant, STORED, bytes(32))
        assert changes.read(tenant, name, position, 0).entries == STORED + bytes(32)
    assert changes.entries == 20 * 10_001


def test_a_log_ends_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = Changes(LIMIT)
    name, position, _ = changes.read(1, b"", 0, 0)
    monkeypatch.setattr("shadowserve.pool.changes._UNREAD_S", 0.0)
    for _ in range(2_000):
        changes.note(1, STORED, bytes(32))
    assert changes.size == 0
    assert changes.read(1, name, position, 0).entries is None
