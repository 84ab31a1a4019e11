"""The weights that a worker computes with: marks, samples and digests of them, by which a change is noticed.

Three looks, each deeper than the one before:

- *marks*: which tensors a model has, where they are, and PyTorch's count of their in-place changes. Some 0.3 ms for
  a model of 500 modules. vLLM's own loaders write through ``.data``, which is not counted.
- a *sample*: some whole elements of each tensor. One copy of some kilobytes.
- a *digest*: every byte, with its position. On a CPU a thread takes CRC-32s; on a GPU a kernel that has few programs
  adds up words, each multiplied with a number of its position, beside the engine's own kernels.
"""

import gc
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch

from host_control.vllm.weighted_sum import weighted_sum
from shadowserve import native

_SAMPLES: Final = 32
"""Elements of each tensor in a sample. A model has hundreds of tensors: a change of one element in a hundred is hardly
missed."""
_PIECE_BYTES: Final = 4 << 20
_NONE: Final = frozenset[str]()
_REST: Final = 9.0
"""Of an audit: times that its thread sleeps as long as it has computed."""


class Sample:
    """Some elements of the weights; a GPU may still be copying them."""

    def __init__(self, values: Sequence[Any], packed: Sequence[Any]) -> None:
        self._packed = list(packed)
        self._events: list[Any] = []
        self._values = [self._copied(value) for value in values]

    def _copied(self, value: Any) -> Any:
        if value.device.type != "cuda":
            return value.cpu()
        pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        pinned.copy_(value, non_blocking=True)
        self._events.append(torch.cuda.Event(blocking=True))
        self._events[-1].record(torch.cuda.current_stream(value.device))
        return pinned

    def same(self, other: "Sample") -> bool:
        """Return whether two samples are of the same weights; waits for the GPU's copies."""
        if not _identical(self._packed, other._packed) or len(self._values) != len(other._values):
            return False
        return all(map(torch.equal, self._read(), other._read()))

    def _read(self) -> list[Any]:
        for event in self._events:
            event.synchronize()
        return self._values


class Digest:
    """All of the weights in some numbers, once it is done.

    Args:
        tensors: one of each storage.
        packed: what kernels have made of weights and do not show.
        hurried: loads and stores wait for it; else it is an audit, which takes a tenth of a core at most.
    """

    def __init__(self, tensors: Sequence[Any], packed: Sequence[Any], *, hurried: bool) -> None:
        self._packed = list(packed)
        self._rest = 0.0 if hurried else _REST
        self._cancelled = False
        self._finished = threading.Event()
        self._value: list[int] = []
        far = [tensor for tensor in tensors if tensor.device.type != "cpu"]
        self._far = [_started([one for one in far if one.device == device]) for device in {one.device for one in far}]
        near = [_bytes(tensor) for tensor in tensors if tensor.device.type == "cpu"]
        self._thread: threading.Thread | None = None
        if near or self._far:
            self._thread = threading.Thread(target=self._run, args=(near,), name="shadowserve-weights", daemon=True)
            self._thread.start()
        else:
            self._finished.set()

    @property
    def done(self) -> bool:
        """Whether it can be compared."""
        return self._finished.is_set() and not self._cancelled

    def wait(self, timeout: float) -> bool:
        """Wait until it is done or cancelled, at most ``timeout`` seconds; return whether it is done."""
        self._finished.wait(timeout)
        return self.done

    def cancel(self) -> None:
        """End it early: it is not needed any more."""
        self._cancelled = True

    def same(self, other: "Digest") -> bool:
        """Return whether two digests that are done are of the same weights."""
        return _identical(self._packed, other._packed) and self._value == other._value

    def _run(self, near: list[Any]) -> None:
        try:
            for memory in near:
                self._value += [memory.nbytes, self._crc32(memory)]
            for finish in self._far:
                self._value += finish()
        except Exception:  # memory that cannot be read is not known to be what it was
            self._value = [time.monotonic_ns()]
        finally:
            self._far = []
            self._finished.set()

    def _crc32(self, memory: Any) -> int:
        crc = 0
        for begin in range(0, memory.nbytes, _PIECE_BYTES):
            if self._cancelled:
                break
            began = time.monotonic()
            crc = native.crc32(memory[begin : begin + _PIECE_BYTES], crc)
            if self._rest:
                time.sleep(self._rest * (time.monotonic() - began))
        return crc


class LoadedWeights:
    """The parameters and buffers of the models that an engine runs.

    What CPU kernels have packed is known by their function's identity, which is another one whenever a layer is loaded,
    and by the tensors that the function shows. Buffers that are not part of a checkpoint count where vLLM made them:
    those of others' modules may change as they compute.

    Args:
        models: of the engine: the model, and a draft model that has KV of its own.
        experts: whether those of mixtures count; they do not where vLLM moves them about.
    """

    def __init__(self, *models: Any, experts: bool = True) -> None:
        self._models = models
        self._experts = experts
        self._held: list[tuple[dict[str, Any], frozenset[str]]] = []
        self._things_seen: list[Any] = []
        self._marked: list[int] = []  # places of tensors among them
        self._marks: list[tuple[int, int]] = []
        self._packing: list[Any] = []
        self._packed: list[Any] = []
        self._views: list[list[Any]] = []
        self.refresh()

    @classmethod
    def of_engine(cls, layers: Sequence[Any], *, experts: bool = True) -> "LoadedWeights | None":
        """Return those of the models that layers belong to; ``None`` where some layer's model is not to be found.

        A connector is given layers alone. vLLM remembers every module, for reloading weights; else Python does.
        """
        roots = _roots(_remembered(), layers)
        if roots is None:
            # By type: isinstance() has objects that stand for modules of Python import them.
            roots = _roots([thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)], layers)
        return cls(*roots, experts=experts) if roots else None

    def refresh(self) -> None:
        """Take the tensors that the models have now. In the thread that computes."""
        modules = [module for model in self._models for module in model.modules()]
        self._held = [held for module in modules for held in self._holding(module)]
        self._packing = [module for module in modules if "cpu_linear" in module.__dict__]
        self._packed = self._functions()
        things = self._things()
        self._things_seen = [weakref.ref(thing) for thing in things]
        self._marked = [place for place, thing in enumerate(things) if _counts(thing)]
        self._marks = [_mark(things[place]) for place in self._marked]
        views: dict[tuple[Any, int], list[Any]] = {}
        for tensor in self._tensors():
            views.setdefault((tensor.device, tensor.itemsize), []).append(_view(tensor))
        self._views = list(views.values())

    def unchanged(self) -> bool:
        """Return whether the models have the tensors of the last :meth:`refresh`, as far as marks tell."""
        things = self._things()
        if len(things) != len(self._things_seen) or not all(map(_is, self._things_seen, things)):
            return False
        marks = [_mark(things[place]) for place in self._marked]
        return marks == self._marks and _identical(self._packed, self._functions())

    def sample(self) -> Sample:
        """Take a sample, behind what the current stream has been given to do."""
        return Sample([torch.cat(views) for views in self._views], self._functions())

    def digest(self, *, hurried: bool = True) -> Digest:
        """Begin a digest, behind what the current stream has been given to do. In the thread that computes."""
        return Digest(list(self._tensors()), self._functions(), hurried=hurried)

    def _holding(self, module: Any) -> Iterator[tuple[dict[str, Any], frozenset[str]]]:
        """Yield what holds a module's own modules and tensors, and the names in there that do not count."""
        yield module._modules, _NONE
        if self._experts or not hasattr(module, "get_expert_weights"):
            yield module._parameters, _NONE
            own = type(module).__module__.startswith("vllm.")
            yield module._buffers, _NONE if own else frozenset(module._non_persistent_buffers_set)

    def _functions(self) -> list[Any]:
        return [module.__dict__.get("cpu_linear") for module in self._packing]

    def _things(self) -> list[Any]:
        """Return all modules and tensors, as the models hold them."""
        return [
            thing
            for held, without in self._held
            for name, thing in held.items()
            if thing is not None and name not in without
        ]

    def _tensors(self) -> Iterator[Any]:
        """Yield one tensor of each storage."""
        seen = set()
        shown = (cell for function in self._functions() for cell in getattr(function, "__closure__", None) or ())
        contents = (cell.cell_contents for cell in shown)
        for tensor in _plain([*self._things(), *contents]):
            place = tensor.device, tensor.untyped_storage().data_ptr()
            if tensor.untyped_storage().nbytes() and place not in seen:
                seen.add(place)
                yield tensor


def _remembered() -> list[Any]:
    try:
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
    except ImportError:
        return []
    return list(LAYERWISE_INFO)


def _roots(modules: Sequence[Any], layers: Sequence[Any]) -> list[Any] | None:
    """Return the outermost of some modules that have the layers; ``None`` where a layer is in none of them."""
    inner = {id(child) for module in modules for child in module.children()}
    wanted, roots = {id(layer) for layer in layers}, list[Any]()
    for module in modules:
        if id(module) not in inner and wanted & (found := {id(one) for one in module.modules()}):
            roots.append(module)
            wanted -= found
    return roots if roots and not wanted else None


def _identical(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _is(reference: Any, thing: Any) -> bool:
    return reference() is thing


def _counts(thing: Any) -> bool:
    """Return whether a tensor has a place and a count of its own: those that only wrap others have none."""
    return isinstance(thing, torch.Tensor) and not hasattr(thing, "__tensor_flatten__") and not thing.is_inference()


def _mark(tensor: Any) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version


def _plain(things: Iterable[Any]) -> Iterator[Any]:
    """Yield tensors that have memory of their own: some, as of torchao, only wrap others."""
    for thing in things:
        if not isinstance(thing, torch.Tensor):
            continue
        if hasattr(thing, "__tensor_flatten__"):
            yield from _plain(getattr(thing, name) for name in thing.__tensor_flatten__()[0])
        elif thing.device.type != "meta":
            yield thing.detach()


def _memory(tensor: Any) -> Any:
    """Return all bytes of a tensor's storage, as a tensor."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _bytes(tensor: Any) -> Any:
    return _memory(tensor).numpy()


def _view(tensor: Any) -> Any:
    """Return some whole elements, all over a tensor's storage, as bytes: [element, byte]."""
    memory, size = _memory(tensor), tensor.itemsize
    count = memory.numel() // size
    step = max(count // _SAMPLES, 1)
    # Rows have even lengths: an odd step does not always meet the same column.
    step -= step % 2 == 0
    return memory.as_strided([min(count, _SAMPLES), size], [step * size, 1])


def _started(tensors: Sequence[Any]) -> Any:
    """Begin the digest of tensors that are on one accelerator; return the function that waits for its numbers."""
    memories = [_memory(tensor) for tensor in tensors]
    if memories[0].device.type == "cuda":
        try:
            from host_control.vllm.digest_triton import started
        except ImportError:
            pass
        else:
            return started(memories)
    sums = torch.stack([weighted_sum(memory) for memory in memories])
    return lambda: [int(number) for number in sums.tolist()]
