"""A stand-in for SGLang's kernels, which have no CPU build on PyPI. For tests only.

SGLang's scheduler, radix cache and HiCache run with it. Copies between pools are written with torch, streams and events
of the CPU do nothing, and any other kernel raises when it is called.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

import torch

__version__ = "0.4.10"
__path__ = ()  # a package: its modules are made below


def _missing(name):
    def kernel(*arguments, **named):
        raise NotImplementedError(f"{name} has no CPU version in these tests")

    return kernel


class _Module(types.ModuleType):
    """A module that has any name."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{self.__name__}.{name}")


class _Names:
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules whose names have a prefix."""

    def __init__(self, prefix):
        self._prefix = prefix

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(self._prefix) else None

    def create_module(self, spec):
        module = _Module(spec.name)
        module.__version__, module.InterpolationMode = __version__, _Names()
        return module

    def exec_module(self, module):
        pass


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)


_types = _Module("sgl_kernel.scalar_type")
_types.scalar_types, _types.ScalarType = _Names(), str
sys.modules["sgl_kernel.scalar_type"] = _types
sys.meta_path.insert(0, _Modules("sgl_kernel."))
if importlib.util.find_spec("torchvision") is None:
    sys.meta_path.insert(0, _Modules("torchvision"))


# ---- Streams and events of the CPU


class _Event:
    def __init__(self, *arguments, **named):
        pass

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0

    def record(self, *arguments):
        pass

    wait = synchronize = record


class _Stream:
    device, device_index, device_type, stream_id = torch.device("cpu"), 0, 1, 0

    def __init__(self, *arguments, **named):
        pass

    def query(self):
        return True

    def record_event(self, event=None):
        return event or _Event()

    def wait_event(self, *arguments):
        pass

    wait_stream = synchronize = wait_event

    def __enter__(self):
        return self

    def __exit__(self, *arguments):
        pass


torch.cpu.Stream, torch.cpu.Event = _Stream, _Event
torch.cpu.stream = torch.cpu.current_stream = torch.cpu.default_stream = _Stream
torch.Tensor.record_stream = lambda tensor, stream: None
torch.Tensor.pin_memory = lambda tensor, *arguments, **named: tensor
for name in ("zeros", "empty"):
    make = getattr(torch, name)
    setattr(torch, name, lambda *sizes, make=make, pin_memory=False, **named: make(*sizes, **named))


# ---- Copies between the device's pool and the host's


def _direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _to_layer(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[src_indices // page_size, layer_id, src_indices % page_size]


def _from_layers(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    layers = len(src_ptrs) // len(dst_ptrs)
    for kind, target in enumerate(dst_ptrs):
        for layer, source in enumerate(src_ptrs[kind * layers : (kind + 1) * layers]):
            target[dst_indices // page_size, layer, dst_indices % page_size] = source[src_indices]


_PATCHES = {
    "sglang.srt.mem_cache.pool_host.mha": {
        "transfer_kv_direct": _direct,
        "transfer_kv_per_layer_direct_pf_lf": _to_layer,
        "transfer_kv_all_layer_direct_lf_pf": _from_layers,
    },
    "sglang.srt.mem_cache.pool_host.common": {"_cuda_host_register": lambda *arguments, **named: None},
}


class _Patches(importlib.abc.MetaPathFinder):
    """Puts these functions into SGLang's modules when they are imported."""

    def find_spec(self, name, path=None, target=None):
        if (patch := _PATCHES.pop(name, None)) is None:
            return None
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def loaded(module):
            load(module)
            vars(module).update(patch)

        spec.loader.exec_module = loaded
        return spec


sys.meta_path.insert(0, _Patches())
