"""Weights that change: their detection in the scheduler half, and the effects."""

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_support import BLOCK, CHUNK, NAMESPACES, TOKENS, arrive, chunk_keys, matched, report, step

from shadowserve.keys import Extra, record_keys

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]
LOGGER = logging.getLogger(__name__)


class Pool:
    """The attributes of vLLM's block pool that the scheduler half reads."""

    num_gpu_blocks = 10

    def __init__(self, cached: int = 0, used: int = 0) -> None:
        self.used = used
        self.cached_block_hash_to_block = {str(number): number for number in range(cached)}

    def get_num_free_blocks(self) -> int:
        return self.num_gpu_blocks - 1 - self.used


class Core:
    """The methods of vLLM's engine core whose calls are counted."""

    def collective_rpc(self, method: str) -> str:
        if method == "fails":
            raise RuntimeError(method)
        return method

    def reset_prefix_cache(self) -> bool:
        return False

    def wake_up(self) -> bool:
        return True


def test_each_call_to_an_engine_core_is_counted_once() -> None:
    from host_control.vllm.engine_calls import WORKER_CALLS, counted_calls

    calls, to_workers = counted_calls(core=Core), counted_calls(WORKER_CALLS, Core)
    assert calls is not None and to_workers is not None, "two engines in one process"
    core, before, before_to_workers = Core(), calls(), to_workers()
    assert (core.collective_rpc("x"), core.reset_prefix_cache(), core.wake_up()) == ("x", False, True)
    with pytest.raises(RuntimeError):
        core.collective_rpc("fails")
    assert (calls() - before, to_workers() - before_to_workers) == (4, 3)
    assert counted_calls(core=object) is None


def test_methods_that_are_counted_are_vllms() -> None:
    from vllm.v1.engine.core import EngineCore

    from host_control.vllm.engine_calls import counted_calls

    methods = {name: getattr(EngineCore, name) for name in ("collective_rpc", "reset_prefix_cache", "wake_up")}
    try:
        assert counted_calls() is not None
    finally:
        for name, method in methods.items():
            setattr(EngineCore, name, method)


@pytest.mark.parametrize("happens", ["called", "emptied", "paused", "nothing"])
def test_weights_are_in_doubt_after(happens: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from host_control.vllm import epochs as module

    calls, pool, epochs = [0], Pool(cached=3), module.Epochs()
    epochs.bind(pool)
    epochs.watch(lambda: calls[0], blind=False)
    now = time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + (100 if happens == "paused" else 0))
    if happens == "called":
        calls[0] += 1
    elif happens == "emptied":
        pool.cached_block_hash_to_block = {}
    assert not epochs.look(LOGGER) and not epochs.look(LOGGER)
    assert epochs.doubts == (happens != "nothing")


@pytest.mark.parametrize(("what", "changed"), [("called", True), ("emptied", True), ("paused", False)])
def test_engine_that_cannot_see_its_weights_takes_a_call_for_a_change(
    what: str, changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from host_control.vllm import epochs as module

    calls, pool, epochs = [0], Pool(cached=3), module.Epochs()
    epochs.bind(pool)
    epochs.watch(lambda: calls[0], blind=True)
    now = time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + (100 if what == "paused" else 0))
    calls[0] += what == "called"
    if what == "emptied":
        pool.cached_block_hash_to_block = {}
    assert epochs.look(LOGGER) is changed
    assert not epochs.look(LOGGER)


def test_doubt_is_settled_once_all_ranks_have_found_their_weights(make_side: Any) -> None:
    side = make_side()
    side.epochs.ranks = 2
    calls = [0]
    side.epochs.watch(lambda: calls[0], blind=False)
    calls[0] += 1
    assert side.step(step()).doubts == 1
    side.worker_output(None, report(settled={1: 1}))
    assert side.step(step()).agreed == 0
    side.worker_output(None, report(settled={1: 1}))
    assert side.step(step()).agreed == 1


def test_ranks_need_not_agree_after_a_mere_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is computed in one step, after a pause, has no further step in which the ranks could agree."""
    from host_control.vllm import epochs as module

    epochs, calls, now = module.Epochs(), [0], [time.monotonic()]
    epochs.ranks = 2
    epochs.watch(lambda: calls[0], blind=False)
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    now[0] += 100
    epochs.look(LOGGER)
    assert epochs.agreed == epochs.doubts == 1
    calls[0] += 1
    epochs.look(LOGGER)
    now[0] += 100
    epochs.look(LOGGER)
    assert (epochs.agreed, epochs.doubts) == (1, 3), "the ranks have not agreed since the call"
    epochs.settled({3: 2})
    assert epochs.agreed == 3


def test_own_cache_is_old_until_it_is_emptied() -> None:
    from host_control.vllm.epochs import Epochs

    epochs, pool = Epochs(), Pool(cached=3)
    epochs.bind(pool)
    assert not epochs.own_cache_is_old
    epochs.begin()
    assert epochs.own_cache_is_old
    pool.cached_block_hash_to_block = {}  # like vLLM
    assert not epochs.own_cache_is_old


@pytest.mark.parametrize(("used", "old"), [(0, False), (2, True)])
def test_empty_cache_is_filled_by_requests_that_run_on(used: int, old: bool) -> None:
    from host_control.vllm.epochs import Epochs

    epochs = Epochs()
    epochs.bind(Pool(used=used))
    epochs.begin()
    assert epochs.own_cache_is_old is old


def test_engine_whose_blocks_are_not_known_is_not_trusted() -> None:
    from host_control.vllm.epochs import Epochs

    epochs = Epochs()
    epochs.bind(SimpleNamespace(num_gpu_blocks=1, get_num_free_blocks=lambda: 0))
    epochs.begin()
    assert epochs.own_cache_is_old


def keys(tokens: list[int], extra: Extra) -> list[bytes]:
    return record_keys(NAMESPACES[0], chunk_keys(tokens, extra))


def test_load_of_an_earlier_epoch_says_so(make_side: Any, plane: Any) -> None:
    side = make_side()
    request = arrive(side, plane, TOKENS, stored=3)
    assert matched(side, request) == 3 * CHUNK
    side.allocated(request, [list(range(100, 140))], 3 * CHUNK)
    side.reset()
    metadata = side.step(step())
    assert metadata.epoch == side.epochs.current != ""
    assert [load.epoch for load in metadata.loads] == [""]


def test_hits_of_an_earlier_epoch_are_not_offered(make_side: Any, plane: Any) -> None:
    side = make_side()
    request = arrive(side, plane, TOKENS, stored=3)
    assert matched(side, request) == 3 * CHUNK
    side.reset()
    assert matched(side, request) == 0
    (store,) = side.step(step(new={"r": (0, len(TOKENS))})).stores
    assert store.chunk_keys == chunk_keys(TOKENS, side._requests["r"].extra)
    assert store.chunk_keys != chunk_keys(TOKENS)


@pytest.mark.parametrize("own", [2 * BLOCK, 0])
def test_nothing_is_loaded_or_stored_behind_old_kv_of_the_engines_own(own: int, make_side: Any, plane: Any) -> None:
    side = make_side()
    side.epochs.bind(Pool(cached=3))
    side.worker_output(None, report(outlived={""}))
    request = with_hits(side, plane)
    assert (matched(side, request, own) > 0) is (own == 0)
    assert bool(side.step(step(new={"r": (own, len(TOKENS) - own)})).stores) is (own == 0)
    # The request is preempted, and the cache has been emptied since then.
    side.epochs.bind(Pool())
    request.num_preemptions = 1
    assert matched(side, request, own) > 0


def with_hits(side: Any, plane: Any) -> Any:
    """Return a request whose first three chunks are stored in this epoch."""
    request = arrive(side, plane, TOKENS)
    plane.records.update(dict.fromkeys(keys(TOKENS, side._requests["r"].extra)[:3], b""))
    side.on_new_request(request)
    return request


def test_change_is_noticed_once_for_all_ranks(make_side: Any, plane: Any) -> None:
    side = make_side()
    seen = report(outlived={""}).aggregate(report())
    side.worker_output(None, seen)
    epoch = side.epochs.current
    assert epoch
    side.worker_output(None, seen)  # of a running step
    assert side.epochs.current == epoch


def test_the_load_of_an_aborted_request_without_a_name_is_cancelled(
    make_side: Any, plane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the load continues until its deadline, into blocks that vLLM keeps for it."""
    side = make_side()
    request = arrive(side, plane, TOKENS, stored=3)
    assert matched(side, request) == 3 * CHUNK
    side.allocated(request, [list(range(100, 140))], 3 * CHUNK)
    side.step(step())

    def unnamed(*_: Any) -> Any:
        raise ValueError("its adapter no longer exists")

    monkeypatch.setattr(side._inputs, "extra", unnamed)
    side.reset()
    side.finished(request)
    assert side.step(step()).cancels == ["r"]
