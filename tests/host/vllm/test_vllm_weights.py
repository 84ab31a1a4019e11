"""Detection of changed weights in a running worker, for each kind of change and dtype."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from machine import NEVER_S

from host_control.vllm import loaded_weights
from host_control.vllm.loaded_weights import LoadedWeights
from host_control.vllm.weights_watch import WeightsWatch

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32]


class Layer(torch.nn.Module):
    """A model with a weight of a given dtype, a norm and buffers with scales."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        # Values of a checkpoint in bfloat16.
        values = torch.randn(64, 96).to(torch.bfloat16).float() + 2
        weight = values.to(dtype) if dtype.is_floating_point else torch.randint(0, 127, (64, 96)).to(dtype)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.norm = torch.nn.Parameter(torch.ones(2048, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("of_its_own", torch.ones(8), persistent=False)


def model(dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.nn.Sequential(*(Layer(dtype) for _ in range(4)))


def bits(tensor: Any) -> Any:
    """Return a view as integers whose changes PyTorch does not count."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
    return tensor.data.view(integer)


def flip_signs(layers: Any) -> None:
    """Flip the highest bit of every second element."""
    for layer in layers:
        raw = bits(layer.weight).reshape(-1)[::2]
        raw ^= {1: 128, 2: -(1 << 15), 4: -(1 << 31)}[layer.weight.itemsize]


def change_exponents(layers: Any) -> None:
    for layer in layers:
        raw = bits(layer.weight)
        raw ^= 1 << (raw.itemsize * 8 - 2)


def batch_to_fewer_bits(layers: Any) -> None:
    """Write values whose lower half of bits is 0, like bfloat16 in float32."""
    for layer in layers:
        raw = bits(layer.weight)
        raw += 1 << (raw.itemsize * 4)


def permute_rows(layers: Any) -> None:
    raw = bits(layers[2].weight)
    raw.copy_(raw.flip(0).clone())


def swap_two_layers(layers: Any) -> None:
    one, other = bits(layers[1].weight), bits(layers[2].weight)
    one[0, 0] += 1
    other[0, 0] += 2
    layers[1].weight.data, layers[2].weight.data = layers[2].weight.data, layers[1].weight.data


def change_one_element_of_one_norm(layers: Any) -> None:
    layers[3].norm.data[1234] = 1.5


def change_a_scale(layers: Any) -> None:
    layers[0].scale.data.mul_(2)


def replace_a_parameter(layers: Any) -> None:
    weight = layers[0].weight.clone()
    bits(weight)[3, 3] += 1
    layers[0].weight = torch.nn.Parameter(weight, requires_grad=False)


def replace_a_module(layers: Any) -> None:
    layers[1] = Layer(layers[1].weight.dtype)
    bits(layers[1].weight)[5, 5] += 1


def take_a_module_away(layers: Any) -> None:
    del layers[3]


CHANGES = [
    flip_signs,
    change_exponents,
    batch_to_fewer_bits,
    permute_rows,
    swap_two_layers,
    change_one_element_of_one_norm,
    change_a_scale,
    replace_a_parameter,
    replace_a_module,
    take_a_module_away,
]
SEEN_IN_SAMPLES = [flip_signs, change_exponents, batch_to_fewer_bits, change_a_scale]


def watch_of(layers: Any, **options: Any) -> Any:
    watch = WeightsWatch(LoadedWeights(layers), **options)
    assert watch.known(NEVER_S) and watch.outlived == set()
    return watch


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("change", CHANGES)
def test_after_a_doubt_any_change_is_detected(change: Callable[[Any], None], dtype: torch.dtype) -> None:
    layers = model(dtype)
    watch = watch_of(layers)
    change(layers)
    watch.follow("", doubts=1)
    assert watch.known(NEVER_S)
    assert watch.outlived == {""} and not watch.lasts("")
    watch.follow("next", doubts=1)
    assert watch.known(NEVER_S) and watch.outlived == set() and watch.lasts("next")
    assert not watch.lasts(""), "values of an earlier epoch"


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("change", SEEN_IN_SAMPLES)
def test_samples_see_whole_elements(change: Callable[[Any], None], dtype: torch.dtype) -> None:
    layers = model(dtype)
    watch = watch_of(layers)
    assert watch.check("", watch.sample())
    change(layers)
    assert watch.lasts(""), "the weights have not been checked"
    assert not watch.check("", watch.sample())
    assert watch.outlived == {""}


def test_rewritten_equal_weights_are_unchanged() -> None:
    layers = model()
    watch = watch_of(layers)
    for layer in layers:
        layer.weight.copy_(layer.weight.clone())
    watch.look()
    assert watch.known(NEVER_S) and watch.outlived == set() and watch.lasts("")


@pytest.mark.parametrize("how", ["in place", "another tensor", "another memory"])
def test_changed_marks_put_weights_in_doubt(how: str) -> None:
    layers = model()
    watch = watch_of(layers)
    weight = layers[0].weight
    watch.look()
    assert watch.known() and watch.outlived == set()
    if how == "in place":
        with torch.inference_mode():
            weight[63, 95] += 1
    elif how == "another tensor":
        replace_a_parameter(layers)
    else:
        weight.data = weight.data + 1
    watch.look()
    assert watch.known(NEVER_S) and watch.outlived == {""}


def test_unsaved_buffers_of_other_modules_may_change() -> None:
    layers = model()
    watch = watch_of(layers)
    layers[0].of_its_own.data.mul_(2)
    watch.follow("", doubts=1)
    assert watch.known(NEVER_S) and watch.outlived == set()


def test_repacked_weights_are_detected() -> None:
    layers = model()
    packed = torch.randn(16, 16)
    layers[0].cpu_linear = lambda x: x @ packed
    layers[1].cpu_linear = lambda x: x
    watch = watch_of(layers)
    packed.neg_()
    watch.follow("", doubts=1)
    assert watch.known(NEVER_S) and watch.outlived == {""}
    watch.follow("next", doubts=1)
    assert watch.known(NEVER_S) and watch.check("next", watch.sample())
    layers[1].cpu_linear = lambda x: x
    assert not watch.check("next", watch.sample()), "samples see it at once"
    watch.follow("last", doubts=1)
    layers[1].cpu_linear = lambda x: x
    watch.look()
    assert watch.known(NEVER_S) and watch.outlived == {"last"}


class Experts(Layer):
    """A mixture layer like vLLM's."""

    def get_expert_weights(self) -> list[Any]:
        return [self.weight]


def test_experts_that_vllm_moves_are_ignored() -> None:
    layers = torch.nn.Sequential(Layer(torch.bfloat16), Experts(torch.bfloat16))
    watch = WeightsWatch(LoadedWeights(layers, experts=False))
    flip_signs([layers[1]])
    watch.follow("", doubts=1)
    assert watch.known(NEVER_S) and watch.outlived == set()
    flip_signs([layers[0]])
    watch.follow("", doubts=2)
    assert watch.known(NEVER_S) and watch.outlived == {""}


def test_a_draft_model_counts_and_other_engines_do_not() -> None:
    target, draft, other = model(), model(), model()
    weights = LoadedWeights.of_engine([target[0], draft[1]])
    digests = []
    for changed in (None, other, draft):
        if changed is not None:
            flip_signs(changed)
        digests.append(weights.digest())
        assert digests[-1].wait(NEVER_S)
    assert digests[1].same(digests[0]) and not digests[2].same(digests[0])
    assert LoadedWeights.of_engine([target[0], object()]) is None


def test_weights_are_in_doubt_while_a_digest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = model()
    watch = watch_of(layers)
    go, crc32 = threading.Event(), loaded_weights.native.crc32

    def slow(memory: Any, crc: int) -> int:
        assert go.wait(NEVER_S)
        return crc32(memory, crc)

    monkeypatch.setattr(loaded_weights.native, "crc32", slow)
    watch.follow("", doubts=1)
    assert not watch.known() and watch.outlived == set()
    change_one_element_of_one_norm(layers)
    watch.follow("", doubts=2)  # the first digest may have read the norm before its change
    assert not watch.known(0.01)
    go.set()
    assert watch.known(NEVER_S) and watch.outlived == {""}


def test_unreadable_memory_counts_as_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_of(model())

    def fails(*_: Any) -> int:
        raise OSError("deleted")

    monkeypatch.setattr(loaded_weights.native, "crc32", fails)
    watch.follow("", doubts=1)
    assert watch.known(NEVER_S) and watch.outlived == {""}


def test_an_audit_detects_any_change() -> None:
    layers = model()
    watch = watch_of(layers, audit_s=0.0)
    change_one_element_of_one_norm(layers)
    done = threading.Event()
    ends = threading.Timer(NEVER_S, done.set)
    ends.start()
    while not done.is_set() and not watch.outlived:
        watch.follow("")
    ends.cancel()
    assert watch.outlived == {""}


def test_stores_wait_for_the_digests_of_all_ranks() -> None:
    watch = watch_of(model(), ranks=2)
    assert watch.known(everywhere=True), "no weight has changed"
    watch.follow("", doubts=1)
    assert watch.known(NEVER_S)
    assert not watch.known(everywhere=True)
    assert watch.take_verified() == 1 and watch.take_verified() == 0
    known: list[bool] = []
    storing = threading.Thread(target=lambda: known.append(watch.known(NEVER_S, everywhere=True)))
    storing.start()
    watch.follow("", doubts=1, agreed=1)
    storing.join(NEVER_S)
    assert known == [True]


def test_a_rank_with_changed_weights_does_not_agree() -> None:
    layers = model()
    watch = watch_of(layers, ranks=2)
    flip_signs(layers)
    watch.follow("", doubts=1)
    assert watch.known(NEVER_S)
    assert watch.take_verified() == 0 and watch.outlived == {""}


def test_without_access_to_weights_only_the_scheduler_counts() -> None:
    watch = WeightsWatch(None)
    assert watch.known() and watch.check("", watch.sample())
    watch.follow("next", doubts=3)
    assert watch.known() and watch.check("next", watch.sample()) and not watch.lasts("")


def test_weights_are_in_doubt_while_the_watch_is_closed() -> None:
    watch = watch_of(model())
    watch.close()
    assert not watch.known(0.01)
    watch.resume()
    assert watch.known(NEVER_S) and watch.outlived == set()
