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


def _copy_pages(target, places, source, pages):
    """Copy whole pages, and consecutive ones at once: several times as fast as an index of tokens."""
    begin = 0
    for end in range(1, len(pages) + 1):
        if end < len(pages) and (places[end] - places[begin], pages[end] - pages[begin]) == (end - begin, end - begin):
            continue
        target[places[begin] : places[begin] + end - begin].copy_(source[pages[begin] : pages[begin] + end - begin])
        begin = end


def _pages(indices, page_size):
    return (indices[::page_size] // page_size).tolist()


def _by_page(buffer, page_size):
    return buffer[: len(buffer) // page_size * page_size].unflatten(0, (-1, page_size))


def _to_layer(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    pages, places = _pages(src_indices, page_size), _pages(dst_indices, page_size)
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        _copy_pages(_by_page(target, page_size), places, source[:, layer_id], pages)


def _from_layers(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    layers = len(src_ptrs) // len(dst_ptrs)
    pages, places = _pages(src_indices, page_size), _pages(dst_indices, page_size)
    for kind, target in enumerate(dst_ptrs):
        for layer, source in enumerate(src_ptrs[kind * layers : (kind + 1) * layers]):
            _copy_pages(target[:, layer], places, _by_page(source, page_size), pages)


# ---- Attention

_FEW = 4  # new tokens


def _attend_few(query, keys, values, prefix, scale):
    """Attention of a few new tokens: all heads in one product, which reads keys and values once, as a GPU does."""
    new, heads, size = query.shape
    spread = query.new_zeros(heads, size, heads, new)
    spread.diagonal(dim1=0, dim2=2).copy_(query.permute(2, 0, 1) * scale)
    scores = (keys.reshape(len(keys), -1) @ spread.view(heads * size, -1)).view(len(keys), heads, new)
    later = torch.ones(len(keys), new, dtype=torch.bool).tril(-prefix - 1)
    weights = scores.float().masked_fill_(later[:, None], float("-inf")).softmax(0).to(values.dtype)
    attended = weights.view(len(keys), -1).T @ values.reshape(len(keys), -1)
    return attended.view(heads, new, heads, size).diagonal(dim1=0, dim2=2).permute(0, 2, 1)


def _extend(self, query, output, keys, values, tokens, requests, lengths, prefixes, news, encoders=None, **more):
    """Attention of a batch's new tokens. SGLang's version computes that of the tokens before them, too."""
    if encoders is not None or more["sliding_window_size"] is not None or not more["causal"]:
        raise NotImplementedError("only plain causal attention has a CPU version in these tests")
    begin = 0
    sequences = zip(requests.tolist(), lengths.tolist(), prefixes.tolist(), news.tolist(), strict=True)
    for request, length, prefix, new in sequences:
        places = tokens[request, :length].to(torch.int64)
        if (places.diff() == 1).all():
            places = slice(int(places[0]), int(places[0]) + length)  # a view: no copy
        own = query[begin : begin + new]
        key, value = (each[places].to(own.dtype).movedim(0, 1)[None] for each in (keys, values))
        if new <= _FEW and own.dtype == torch.bfloat16 and own.shape[1] == keys.shape[1]:
            output[begin : begin + new] = _attend_few(own, keys[places], values[places], prefix, more["scaling"])
            begin += new
            continue
        mask = torch.ones(new, length, dtype=torch.bool).tril(prefix) if prefix else None
        attended = torch.nn.functional.scaled_dot_product_attention(
            own.movedim(0, 1)[None], key, value, mask,
            is_causal=mask is None, scale=more["scaling"], enable_gqa=more["enable_gqa"],
        )  # fmt: skip
        output[begin : begin + new] = attended[0].movedim(1, 0)
        begin += new
    return output


_PATCHES = {
    "sglang.srt.mem_cache.pool_host.mha": {
        "transfer_kv_direct": _direct,
        "transfer_kv_per_layer_direct_pf_lf": _to_layer,
        "transfer_kv_all_layer_direct_lf_pf": _from_layers,
    },
    "sglang.srt.mem_cache.pool_host.common": {"_cuda_host_register": lambda *arguments, **named: None},
    "sglang.srt.mem_cache.pool_host.base": {"HICACHE_HOST_MEMORY_RESERVE_BYTES": 1 << 30},  # of 10 GiB
    "sglang.srt.layers.attention.torch_native_backend": {"TorchNativeAttnBackend._run_sdpa_forward_extend": _extend},
}


class _Patches(importlib.abc.MetaPathFinder):
    """Puts these functions into SGLang's modules, or into their classes, when they are imported."""

    def find_spec(self, name, path=None, target=None):
        if (patch := _PATCHES.pop(name, None)) is None:
            return None
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def loaded(module):
            load(module)
            for name, replacement in patch.items():
                owner, _, attribute = name.rpartition(".")
                setattr(getattr(module, owner) if owner else module, attribute, replacement)

        spec.loader.exec_module = loaded
        return spec


sys.meta_path.insert(0, _Patches())
