"""Signs that an engine's weights may have changed."""

import logging
import time
from types import SimpleNamespace

import pytest
from scheduler_support import Pool

from host_control.vllm import epochs as module
from host_control.vllm.epochs import WORKER_CALLS, Epochs, counted_calls

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]
LOGGER = logging.getLogger(__name__)


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

    methods = {name: getattr(EngineCore, name) for name in ("collective_rpc", "reset_prefix_cache", "wake_up")}
    try:
        assert counted_calls() is not None
    finally:
        for name, method in methods.items():
            setattr(EngineCore, name, method)


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("happens", ["called", "emptied", "paused", "nothing"])
def test_weights_are_in_doubt_or_count_as_changed_where_they_cannot_be_seen(
    happens: str, blind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, pool, epochs = [0], Pool(cached=3), module.Epochs()
    epochs.bind(pool)
    epochs.watch(lambda: calls[0], blind=blind)
    now = time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + (100 if happens == "paused" else 0))
    calls[0] += happens == "called"
    if happens == "emptied":
        pool.cached_block_hash_to_block = {}
    assert epochs.look(LOGGER) is (blind and happens in ("called", "emptied"))
    assert not epochs.look(LOGGER)
    assert epochs.doubts == (happens != "nothing")


def test_ranks_need_not_agree_after_a_mere_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is computed in one step, after a pause, has no further step in which the ranks could agree."""
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


@pytest.mark.parametrize(("cached", "used", "old"), [(3, 0, True), (0, 2, True), (0, 0, False)])
def test_own_cache_is_old_until_it_is_emptied(cached: int, used: int, old: bool) -> None:
    """Requests that run on may fill an empty cache."""
    epochs, pool = Epochs(), Pool(cached, used)
    epochs.bind(pool)
    assert not epochs.own_cache_is_old
    epochs.begin()
    assert epochs.own_cache_is_old is old
    pool.cached_block_hash_to_block = {}  # like vLLM
    assert not epochs.own_cache_is_old


def test_engine_whose_blocks_are_not_known_is_not_trusted() -> None:
    epochs = Epochs()
    epochs.bind(SimpleNamespace(num_gpu_blocks=1, get_num_free_blocks=lambda: 0))
    epochs.begin()
    assert epochs.own_cache_is_old
