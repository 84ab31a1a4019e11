"""Threads that wait for devices."""

import threading

import pytest
from machine import PATIENCE_S, wait_for

from storage_kv.engines.workers import Workers


def test_a_write_is_not_left_behind_where_no_further_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(4, "test")
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    for number in range(5):
        workers.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    wait_for(lambda: len(done) == 5)
    assert done == [0, 1, 2, 3, 4]  # by the one thread that there is
    monkeypatch.setattr(threading.Thread, "start", start)
    assert workers.stop(PATIENCE_S)


def test_a_group_without_any_thread_says_so_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError):
        Workers(4, "test")
