"""Paged memory that is shared with a data plane: in place, with its content, and replaced after it was abandoned."""

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from host_control import pages as module
from host_control.pages import SharedPages
from host_control.segment import Segment
from shadowserve.errors import ConfigurationError

LAYERS, BLOCKS, PAGE = 3, 8, 8192
Leftovers = Callable[..., set[str]]


def make_caches(page: int = PAGE) -> list[Any]:
    """An engine's caches as vLLM creates them: views of one allocation."""
    memory = torch.arange(LAYERS * BLOCKS * page // 4, dtype=torch.int32).view(torch.int8)
    whole = memory.view(torch.float32).view(BLOCKS, LAYERS, 2, 16, page // 128)
    return [whole[:, layer] for layer in range(LAYERS)]


@pytest.fixture
def caches() -> list[Any]:
    return make_caches()


def seen_by_others(pages: SharedPages) -> Any:
    """The bytes that a data plane reads in the segment."""
    return torch.frombuffer(pages.segment.memory, dtype=torch.float32)[: LAYERS * BLOCKS * PAGE // 4]


def test_memory_becomes_shared_where_it_is(caches: list[Any], leftovers: Leftovers) -> None:
    before = [cache.clone() for cache in caches]
    pages = SharedPages(caches, 4)
    assert pages.address % 4096 == 0 and pages.page_bytes == PAGE
    assert all(torch.equal(cache, kept) for cache, kept in zip(caches, before, strict=True)), "with its content"
    paging = pages.paging()
    assert list(paging.first) == [layer * PAGE for layer in range(LAYERS)]
    assert (paging.stride, paging.blocks) == (LAYERS * PAGE, BLOCKS)
    caches[1][5].fill_(7.0)
    begin = (paging.first[1] + 5 * paging.stride) // 4
    assert (seen_by_others(pages)[begin : begin + PAGE // 4] == 7.0).all(), "the data plane reads the engine's writes"
    seen_by_others(pages)[begin] = 9.0
    assert caches[1][5].flatten()[0] == 9.0, "and the reverse"
    pages.close()
    assert leftovers() == set()
    assert caches[1][5].flatten()[0] == 9.0, "it remains the engine's memory"


def test_late_writes_to_memory_that_was_given_up_are_not_visible(caches: list[Any]) -> None:
    pages = SharedPages(caches, 4)
    address, before, old = pages.address, [cache.clone() for cache in caches], seen_by_others(pages)
    pages.renew()
    assert pages.segment.memory is not None and torch.equal(old, seen_by_others(pages)), "no work was due"
    pages.lost = True
    pages.renew()
    old.fill_(5.0)  # a late write
    assert pages.address == address and not pages.lost
    assert all(torch.equal(cache, kept) for cache, kept in zip(caches, before, strict=True))
    seen_by_others(pages)[0] = 3.0
    assert caches[0][0].flatten()[0] == 3.0, "the new segment is shared like the first"
    pages.close()


def test_bytes_scattered_while_the_memory_is_replaced_are_not_lost(
    caches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: KV that another request had fetched was lost if it was written between copy and mapping."""
    pages, copy, scattered = SharedPages(caches, 4), ctypes.memmove, threading.Event()

    def scatter() -> None:
        with pages.writing:
            caches[1][5].fill_(7.0)
        scattered.set()

    def copy_slowly(*arguments: Any) -> None:
        copy(*arguments)
        scattering.start()
        scattered.wait(0.2)  # the event is set in this time only if the bytes are lost

    scattering = threading.Thread(target=scatter)
    pages.lost = True
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "memmove", copy_slowly)
        pages.renew()
    scattering.join()
    assert (caches[1][5] == 7.0).all()
    pages.close()


def test_without_room_for_another_segment_the_memory_is_the_engines_alone(
    caches: list[Any], monkeypatch: pytest.MonkeyPatch, leftovers: Leftovers
) -> None:
    pages = SharedPages(caches, 4)
    before, old = [cache.clone() for cache in caches], seen_by_others(pages)

    def refuse(size: int) -> Segment:
        raise ConfigurationError("full")

    monkeypatch.setattr(module.Segment, "create", refuse)
    pages.lost = True
    pages.renew()
    old.fill_(5.0)
    assert pages.private and pages.lost, "no data plane receives it"
    assert all(torch.equal(cache, kept) for cache, kept in zip(caches, before, strict=True))
    caches[0][0].fill_(1.0)
    pages.renew()
    assert leftovers() == set()


@pytest.mark.parametrize(
    ("caches", "blocks", "why"),
    [
        (make_caches(4096 + 512), 4, "multiples of 4096"),
        (make_caches(), 1024, "lower host.chunk_tokens"),
        ([torch.zeros(BLOCKS, 2, 16, 64) for _ in range(2)], 4, "one allocation"),
        ([torch.zeros(BLOCKS, 64, 16, 2).transpose(1, 3)], 4, "not contiguous"),
    ],
)
def test_pages_that_devices_cannot_reach_are_left_alone(caches: list[Any], blocks: int, why: str) -> None:
    before = [cache.data_ptr() for cache in caches]
    with pytest.raises(ConfigurationError, match=why):
        SharedPages(caches, blocks)
    assert [cache.data_ptr() for cache in caches] == before


def test_a_full_dev_shm_leaves_the_engine_as_it_was(
    caches: list[Any], monkeypatch: pytest.MonkeyPatch, leftovers: Leftovers
) -> None:
    before = [cache.clone() for cache in caches]

    def full(*arguments: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigurationError, match="enlarge it"):
        SharedPages(caches, 4)
    assert all(torch.equal(cache, kept) for cache, kept in zip(caches, before, strict=True))
    assert leftovers() == set() and Path("/dev/shm").is_dir()
