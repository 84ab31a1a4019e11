"""Notices that the weights an engine computes with have changed, though nobody said so.

Trainers and ``collective_rpc("reload_weights")`` write new values into a model that runs. vLLM tells its connectors
only if it is asked to (``reset_connector``), so what is stored afterwards would be called by the old weights' name. A
few bytes of each parameter, spread over it, tell the two apart: retraining changes some of them wherever it changes
anything that matters. A change of single elements, between the bytes that are looked at, goes unseen.
"""

import threading
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

__all__ = ["LoadedWeights", "Sample", "WeightsWatch"]

_SAMPLES: Final = 16
"""Bytes of each parameter. A model has hundreds of them: a change of one element in a hundred is hardly missed."""


class Sample:
    """What the weights were when it was taken; a GPU may still be at it."""

    def __init__(self, values: Any, packed: list[Any]) -> None:
        self._packed = packed
        self._event: Any = None
        if values.device.type == "cuda":
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = pinned.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)
            self._event.record()
        self._values = values

    def same(self, other: "Sample") -> bool:
        """Return whether two samples are of the same weights; waits for the GPU where it is still at one."""
        if any(mine is not its for mine, its in zip(self._packed, other._packed, strict=True)):
            return False
        return bool(torch.equal(self._read(), other._read()))

    def _read(self) -> Any:
        if self._event is not None:
            self._event.synchronize()
        return self._values


class LoadedWeights:
    """The parameters of a model, where they lie; :meth:`sample` costs a copy of a few kilobytes.

    vLLM writes new values where the old ones were, since its graphs know the addresses. On CPUs it keeps weights in a
    form of its kernels' own, of which a linear layer has a new one whenever it is loaded.

    Args:
        model: all of it on one device.
    """

    def __init__(self, model: Any) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in _plain(model.parameters())}
        self._views = [_view(tensor) for tensor in storages.values() if tensor.numel()]
        self._packing = [module for module in model.modules() if "cpu_linear" in module.__dict__]

    @classmethod
    def of_engine(cls, layer: Any) -> "LoadedWeights | None":
        """Return those of the model that a layer of attention belongs to; ``None`` where vLLM does not show its model.

        A connector is given attention layers alone. vLLM remembers every module, for reloading weights.
        """
        try:
            from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
        except ImportError:
            return None
        modules = list(LAYERWISE_INFO)
        inner = {id(child) for module in modules for child in module.children()}
        for root in modules:
            if id(root) not in inner and any(module is layer for module in root.modules()):
                return cls(root)
        return None

    def sample(self) -> Sample:
        """Take a sample, behind what the current stream has been given to do."""
        return Sample(torch.cat(self._views), [module.__dict__.get("cpu_linear") for module in self._packing])


class WeightsWatch:
    """Which epoch the weights belong to that a worker computes with. The scheduler names epochs; any thread may ask.

    Args:
        weights: of the engine; without them only what the scheduler says counts.

    Attributes:
        epoch: that the scheduler has named last.
    """

    def __init__(self, weights: LoadedWeights | None) -> None:
        self.epoch = ""
        self._weights = weights
        self._lock = threading.Lock()
        self._first = self.sample()
        self._outlived = False

    def follow(self, epoch: str) -> None:
        """Take note of the scheduler's epoch; one that is new begins with the weights as they are."""
        if epoch == self.epoch:
            return
        first = self.sample()
        with self._lock:
            self.epoch, self._first, self._outlived = epoch, first, False

    def sample(self) -> Sample | None:
        """Take a sample, behind what the current stream has been given to do."""
        return self._weights.sample() if self._weights is not None else None

    def check(self, epoch: str, sample: Sample | None) -> bool:
        """Return whether an epoch lasts: nobody has named another, and the weights were its own in ``sample``."""
        with self._lock:
            first = self._first
            lasts = epoch == self.epoch and not self._outlived
        if lasts and sample is not None and first is not None and not sample.same(first):
            with self._lock:
                self._outlived = self._outlived or epoch == self.epoch
            lasts = False
        return lasts

    def lasts(self, epoch: str) -> bool:
        """Return whether an epoch lasts, as far as is known without another look."""
        return self.check(epoch, None)

    @property
    def outlived(self) -> set[str]:
        """The scheduler's epoch, if the weights have changed since it began."""
        if not self._outlived:
            return set()
        with self._lock:
            return {self.epoch} if self._outlived else set()


def _plain(tensors: Iterable[Any]) -> Iterator[Any]:
    """Yield tensors that have memory of their own: some, as of torchao, only wrap others."""
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            yield from _plain(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        elif tensor.device.type != "meta":
            yield tensor


def _view(tensor: Any) -> Any:
    """Return the lowest bytes of some elements, all over the tensor: they change with the smallest change."""
    storage = tensor.untyped_storage()
    count = storage.nbytes() // tensor.itemsize
    step = max(count // _SAMPLES, 1)
    # Rows have even lengths: an odd step does not always meet the same column.
    step -= step % 2 == 0
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return memory.as_strided([min(count, _SAMPLES)], [step * tensor.itemsize])
