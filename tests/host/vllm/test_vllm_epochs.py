"""Weights that change: what is seen of it, and what the scheduler's half makes of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scheduler_support import BLOCK, CHUNK, NAMESPACES, TOKENS, arrive, links, matched, report, step

from shadowserve.keys import Extra, record_keys

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


class Pool:
    """As much of vLLM's pool of blocks as is looked at."""

    num_gpu_blocks = 10

    def __init__(self, cached: int = 0, used: int = 0) -> None:
        self.used = used
        self.cached_block_hash_to_block = {str(number): number for number in range(cached)}

    def get_num_free_blocks(self) -> int:
        return self.num_gpu_blocks - 1 - self.used


def linear(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(*(torch.nn.Linear(96, 64, dtype=dtype) for _ in range(40))).requires_grad_(False)


def change_by_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter + 0.01)


def change_one_in_a_hundred(model: Any) -> None:
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter[torch.rand(parameter.shape) < 0.01] *= 1.01


def change_one_layer(model: Any) -> None:
    model[7].weight.mul_(1.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("change", [change_by_data, change_one_in_a_hundred, change_one_layer])
def test_changed_weights_are_seen(change: Any, dtype: torch.dtype) -> None:
    from host_control.vllm.loaded_weights import LoadedWeights, WeightsWatch

    model = linear(dtype)
    watch = WeightsWatch(LoadedWeights(model))
    assert watch.check("", watch.sample()) and watch.outlived == set()
    change(model)
    assert watch.lasts(""), "nobody has looked"
    assert not watch.check("", watch.sample())
    assert watch.outlived == {""} and not watch.lasts("")
    watch.follow("next")
    assert watch.outlived == set() and watch.check("next", watch.sample())
    assert not watch.check("", watch.sample()), "what is left of an earlier epoch"


def test_weights_that_a_layer_keeps_in_a_form_of_its_own_are_seen() -> None:
    from host_control.vllm.loaded_weights import LoadedWeights

    model = linear()
    model[0].cpu_linear = lambda x: x
    weights = LoadedWeights(model)
    before = weights.sample()
    assert weights.sample().same(before)
    model[0].cpu_linear = lambda x: x
    assert not weights.sample().same(before)


def test_weights_that_cannot_be_seen_last_until_the_scheduler_says_otherwise() -> None:
    from host_control.vllm.loaded_weights import WeightsWatch

    watch = WeightsWatch(None)
    assert watch.check("", watch.sample())
    watch.follow("next")
    assert watch.check("next", watch.sample()) and not watch.lasts("")


def test_own_cache_is_old_until_it_is_emptied() -> None:
    from host_control.vllm.epochs import Epochs

    epochs, pool = Epochs(), Pool(cached=3)
    epochs.bind(pool)
    assert not epochs.own_cache_is_old
    epochs.begin()
    assert epochs.own_cache_is_old
    pool.cached_block_hash_to_block = {}  # as vLLM does
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
    return record_keys(NAMESPACES[0], links(tokens, extra))


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
    assert store.links == links(TOKENS, side._tracked["r"].extra)
    assert store.links != links(TOKENS)


@pytest.mark.parametrize("own", [2 * BLOCK, 0])
def test_nothing_is_loaded_or_stored_behind_old_kv_of_the_engines_own(own: int, make_side: Any, plane: Any) -> None:
    side = make_side()
    side.epochs.bind(Pool(cached=3))
    side.worker_output(None, report(outlived={""}))
    request = with_hits(side, plane)
    assert (matched(side, request, own) > 0) is (own == 0)
    assert bool(side.step(step(new={"r": (own, len(TOKENS) - own)})).stores) is (own == 0)
    # It is preempted, and the cache was emptied meanwhile.
    side.epochs.bind(Pool())
    request.num_preemptions = 1
    assert matched(side, request, own) > 0


def with_hits(side: Any, plane: Any) -> Any:
    """Return a request of which the first three chunks are stored in this epoch."""
    request = arrive(side, plane, TOKENS)
    plane.records.update(dict.fromkeys(keys(TOKENS, side._tracked["r"].extra)[:3], b""))
    side.on_new_request(request)
    return request


def test_change_is_noticed_once_for_all_ranks(make_side: Any, plane: Any) -> None:
    side = make_side()
    seen = report(outlived={""}).aggregate(report())
    side.worker_output(None, seen)
    epoch = side.epochs.current
    assert epoch
    side.worker_output(None, seen)  # of a step that was under way
    assert side.epochs.current == epoch


def test_a_request_that_has_lost_its_name_and_is_aborted_while_it_loads_has_its_load_ended(
    make_side: Any, plane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the load goes on until its deadline, into blocks that vLLM keeps for it meanwhile."""
    side = make_side()
    request = arrive(side, plane, TOKENS, stored=3)
    assert matched(side, request) == 3 * CHUNK
    side.allocated(request, [list(range(100, 140))], 3 * CHUNK)
    side.step(step())

    def unnamed(*_: Any) -> Any:
        raise ValueError("its adapter is gone")

    monkeypatch.setattr(side._inputs, "extra", unnamed)
    side.reset()
    side.finished(request)
    assert side.step(step()).cancels == ["r"]
