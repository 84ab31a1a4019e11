"""Detects changes of the weights in a worker's memory.

There are three checks, from fast to complete:

- *marks*: the tensors of the model, their addresses and PyTorch's counters of in-place changes. 0.3 ms for 500
  modules. Writes through ``.data``, as by vLLM's loaders, are not counted.
- a *sample*: some whole elements of each tensor, a few kilobytes.
- a *digest*: all bytes. On CPUs, CRC-32 on a thread; on GPUs, a kernel that runs next to the engine's kernels.
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
"""Elements per tensor. With hundreds of tensors, a change of one element in a hundred is almost always seen."""
_CRC_BYTES: Final = 4 << 20
_NO_NAMES: Final = frozenset[str]()
_AUDIT_REST: Final = 9.0
"""The thread of an audit sleeps this many times as long as it computes."""


class Sample:
    """Some elements of the weights. On a GPU the copies run in the background."""

    def __init__(self, values: Sequence[Any], packed: Sequence[Any]) -> None:
        self._packed = list(packed)
        self._events: list[Any] = []
        self._values = [self._copy(value) for value in values]

    def _copy(self, value: Any) -> Any:
        if value.device.type != "cuda":
            return value.cpu()
        pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        pinned.copy_(value, non_blocking=True)
        self._events.append(torch.cuda.Event(blocking=True))
        self._events[-1].record(torch.cuda.current_stream(value.device))
        return pinned

    def same(self, other: "Sample") -> bool:
        """Return True if two samples are equal. Waits for the GPU's copies."""
        if not _identical(self._packed, other._packed) or len(self._values) != len(other._values):
            return False
        return all(map(torch.equal, self._read(), other._read()))

    def _read(self) -> list[Any]:
        for event in self._events:
            event.synchronize()
        return self._values


class Digest:
    """A checksum of all weights, computed in the background.

    Args:
        packed: Functions with weights that CPU kernels have repacked; compared by identity.
        hurried: Loads and stores wait for the digest. False: an audit, which uses at most a tenth of a core.
    """

    def __init__(self, tensors: Sequence[Any], packed: Sequence[Any], *, hurried: bool) -> None:
        self._packed = list(packed)
        self._rest = 0.0 if hurried else _AUDIT_REST
        self._cancelled = False
        self._finished = threading.Event()
        self._value: list[int] = []
        on_devices: dict[Any, list[Any]] = {}
        for tensor in tensors:
            if tensor.device.type != "cpu":
                on_devices.setdefault(tensor.device, []).append(tensor)
        self._device_sums = [_start_sums(group) for group in on_devices.values()]
        on_cpu = [_memory(tensor).numpy() for tensor in tensors if tensor.device.type == "cpu"]
        self._thread: threading.Thread | None = None
        if on_cpu or self._device_sums:
            self._thread = threading.Thread(target=self._run, args=(on_cpu,), name="shadowserve-weights", daemon=True)
            self._thread.start()
        else:
            self._finished.set()

    @property
    def done(self) -> bool:
        return self._finished.is_set() and not self._cancelled

    def wait(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for the digest; return True if it is complete."""
        self._finished.wait(timeout)
        return self.done

    def cancel(self) -> None:
        self._cancelled = True

    def same(self, other: "Digest") -> bool:
        return _identical(self._packed, other._packed) and self._value == other._value

    def _run(self, on_cpu: list[Any]) -> None:
        try:
            for memory in on_cpu:
                self._value += [memory.nbytes, self._crc32(memory)]
            for finish in self._device_sums:
                self._value += finish()
        except Exception:  # unreadable memory counts as changed
            self._value = [time.monotonic_ns()]
        finally:
            self._device_sums = []
            self._finished.set()

    def _crc32(self, memory: Any) -> int:
        crc = 0
        for begin in range(0, memory.nbytes, _CRC_BYTES):
            if self._cancelled:
                break
            started_s = time.monotonic()
            crc = native.crc32(memory[begin : begin + _CRC_BYTES], crc)
            if self._rest:
                time.sleep(self._rest * (time.monotonic() - started_s))
        return crc


class LoadedWeights:
    """The parameters and buffers of the models that an engine runs.

    Weights that CPU kernels have repacked are checked by the identity of the kernel's function, which changes when a
    layer is loaded, and by the tensors in its closure. Buffers that are not saved in checkpoints are included only for
    vLLM's own modules: modules of others may change theirs while they compute.

    Args:
        experts: Include the experts of mixture models. False if vLLM moves experts between ranks.
    """

    def __init__(self, *models: Any, experts: bool = True) -> None:
        self._models = models
        self._experts = experts
        self._dicts: list[tuple[dict[str, Any], frozenset[str]]] = []  # of members, with the names to leave out
        self._members: list[Any] = []  # weak references to modules and tensors
        self._marked: list[int] = []  # indexes of members with marks
        self._marks: list[tuple[int, int]] = []
        self._packing: list[Any] = []  # modules with repacked weights
        self._packed: list[Any] = []
        self._views: list[list[Any]] = []
        self.refresh()

    @classmethod
    def of_engine(cls, layers: Sequence[Any], *, experts: bool = True) -> "LoadedWeights | None":
        """Return the weights of the models that contain ``layers``; ``None`` if a layer's model is not found.

        vLLM only gives layers to a connector. It keeps a list of all modules for reloading weights. If that list does
        not help, the garbage collector's list does.
        """
        roots = _roots(_known_modules(), layers)
        if roots is None:
            # Not isinstance(): it would import the modules behind lazy-import proxies.
            roots = _roots([one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)], layers)
        return cls(*roots, experts=experts) if roots else None

    def refresh(self) -> None:
        """Use the models' current tensors from now on. On the thread that computes."""
        modules = [module for model in self._models for module in model.modules()]
        self._dicts = [entry for module in modules for entry in self._dicts_of(module)]
        self._packing = [module for module in modules if "cpu_linear" in module.__dict__]
        self._packed = self._functions()
        members = self._current_members()
        self._members = [weakref.ref(member) for member in members]
        self._marked = [index for index, member in enumerate(members) if _has_mark(member)]
        self._marks = [_mark(members[index]) for index in self._marked]
        views: dict[tuple[Any, int], list[Any]] = {}
        for tensor in self._tensors():
            views.setdefault((tensor.device, tensor.itemsize), []).append(_view(tensor))
        self._views = list(views.values())

    def unchanged(self) -> bool:
        """Return True if the marks are those of the last :meth:`refresh`."""
        members = self._current_members()
        if not _identical([reference() for reference in self._members], members):
            return False
        marks = [_mark(members[index]) for index in self._marked]
        return marks == self._marks and _identical(self._packed, self._functions())

    def sample(self) -> Sample:
        """Take a sample after all work in the current stream."""
        return Sample([torch.cat(views) for views in self._views], self._functions())

    def digest(self, *, hurried: bool = True) -> Digest:
        """Start a digest after all work in the current stream. On the thread that computes."""
        return Digest(list(self._tensors()), self._functions(), hurried=hurried)

    def _dicts_of(self, module: Any) -> Iterator[tuple[dict[str, Any], frozenset[str]]]:
        """Yield the dicts of a module's children and tensors, each with the names to leave out."""
        yield module._modules, _NO_NAMES
        if self._experts or not hasattr(module, "get_expert_weights"):
            yield module._parameters, _NO_NAMES
            own = type(module).__module__.startswith("vllm.")
            yield module._buffers, _NO_NAMES if own else frozenset(module._non_persistent_buffers_set)

    def _functions(self) -> list[Any]:
        return [module.__dict__.get("cpu_linear") for module in self._packing]

    def _current_members(self) -> list[Any]:
        return [
            member
            for members, without in self._dicts
            for name, member in members.items()
            if member is not None and name not in without
        ]

    def _tensors(self) -> Iterator[Any]:
        """Yield one tensor per storage."""
        seen = set()
        cells = (cell for function in self._functions() for cell in getattr(function, "__closure__", None) or ())
        contents = (cell.cell_contents for cell in cells)
        for tensor in _plain([*self._current_members(), *contents]):
            storage = tensor.untyped_storage()
            address = tensor.device, storage.data_ptr()
            if storage.nbytes() and address not in seen:
                seen.add(address)
                yield tensor


def _known_modules() -> list[Any]:
    try:
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
    except ImportError:
        return []
    return list(LAYERWISE_INFO)


def _roots(modules: Sequence[Any], layers: Sequence[Any]) -> list[Any] | None:
    """Return the outermost modules that contain the layers; ``None`` if a layer is in no module."""
    inner = {id(child) for module in modules for child in module.children()}
    wanted, roots = {id(layer) for layer in layers}, list[Any]()
    for module in modules:
        if id(module) not in inner and wanted & (found := {id(one) for one in module.modules()}):
            roots.append(module)
            wanted -= found
    return roots if roots and not wanted else None


def _identical(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _has_mark(member: Any) -> bool:
    """Return True for tensors with an address and a version counter. Wrapper subclasses of tensors have none."""
    return isinstance(member, torch.Tensor) and not hasattr(member, "__tensor_flatten__") and not member.is_inference()


def _mark(tensor: Any) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version


def _plain(members: Iterable[Any]) -> Iterator[Any]:
    """Yield tensors with memory of their own; unpack wrapper subclasses such as torchao's."""
    for member in members:
        if not isinstance(member, torch.Tensor):
            continue
        if hasattr(member, "__tensor_flatten__"):
            yield from _plain(getattr(member, name) for name in member.__tensor_flatten__()[0])
        elif member.device.type != "meta":
            yield member.detach()


def _memory(tensor: Any) -> Any:
    """Return a tensor of all bytes of a tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _view(tensor: Any) -> Any:
    """Return evenly spaced elements of a tensor's storage as bytes, shape [element, byte]."""
    memory, size = _memory(tensor), tensor.itemsize
    count = memory.numel() // size
    step = max(count // _SAMPLES, 1)
    # Row lengths are even, so an odd step does not always hit the same column.
    step -= step % 2 == 0
    return memory.as_strided([min(count, _SAMPLES), size], [step * size, 1])


def _start_sums(tensors: Sequence[Any]) -> Any:
    """Start the checksums of tensors on one accelerator. Return a function that waits for the results."""
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
