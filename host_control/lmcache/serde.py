"""The serde ``shadowserve`` of LMCache's L2 adapters, and the adapter that makes LMCache import it.

LMCache 0.5.6 builds its L2 adapters before it loads a user's modules, except the module of a ``plugin`` adapter. So
:class:`Adapter` is such a plugin: LMCache imports this module, which registers the serde, and gets the adapter that
``adapter_params`` describes.
"""

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from lmcache.logging import init_logger
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.serde import (
    AsyncSerdeProcessor,
    Deserializer,
    SerdeProcessor,
    Serializer,
    register_serde_factory,
)
from lmcache.v1.memory_management import MemoryObj

from host_control.lmcache import objects
from shadowserve.errors import ConfigurationError, RecordError

NAME: Final = "shadowserve"
_LOGGER: Final = init_logger(__name__)


def _arrays(shapes: Iterable[Any], dtypes: Iterable[Any]) -> tuple[objects.Array, ...]:
    return tuple(
        objects.Array(tuple(map(int, shape)), str(dtype).removeprefix("torch."))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


class _Writer(Serializer):  # type: ignore[misc]
    def __init__(self, size: float | None, identity: str) -> None:
        self._size, self._identity = size, identity

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        """Write an object's stored form and return its length. An error makes LMCache skip the store."""
        target = memoryview(dst.byte_array)
        arrays = _arrays(src.get_shapes(), src.get_dtypes())
        objects.encode(key, arrays, memoryview(src.byte_array), target, self._identity)
        return len(target)

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        return objects.stored_bytes(_arrays(layout_desc.shapes, layout_desc.dtypes), self._size)


class _Reader(Deserializer):  # type: ignore[misc]
    def __init__(self, identity: str, workers: int) -> None:
        self._identity = identity
        self._threads = ThreadPoolExecutor(
            workers, "shadowserve-serde"
        )  # share each object: the last one is waited for

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        """Decode an object. An error is a miss: LMCache drops ``dst``."""
        arrays = _arrays(dst.get_shapes(), dst.get_dtypes())
        source, target = memoryview(src.byte_array), memoryview(dst.byte_array)
        try:
            objects.decode(key, arrays, source, target, self._identity, self._threads.map)
        except RecordError as error:
            _LOGGER.warning("serde '%s': a stored object of %s is a miss: %s", NAME, key.model_name, error)
            raise


def _create(settings: Mapping[str, object]) -> SerdeProcessor:
    """Build the serde from its keys in an adapter's ``serde``: ``size``, ``identity``, ``max_workers``."""
    unknown = sorted(settings.keys() - {"size", "identity", "max_workers"})
    if unknown:
        raise ConfigurationError(f"serde '{NAME}' has no key {unknown[0]!r}: it has size, identity, max_workers")
    size, workers, identity = settings.get("size"), settings.get("max_workers", 2), settings.get("identity", "")
    if size is not None and not (
        isinstance(size, (int, float)) and math.isfinite(size) and 0 < size <= objects.SIZE_MAX
    ):
        raise ConfigurationError(f"serde '{NAME}': size is {size!r}; it is a share above 0, up to {objects.SIZE_MAX}")
    if not isinstance(workers, int) or isinstance(workers, bool) or not 1 <= workers <= 64:
        raise ConfigurationError(f"serde '{NAME}': max_workers is {workers!r}; it is a number from 1 to 64")
    if not isinstance(identity, str):
        raise ConfigurationError(f"serde '{NAME}': identity is {identity!r}; it is a text")
    return AsyncSerdeProcessor(_Writer(size, identity), _Reader(identity, workers), workers)


class Adapter(L2AdapterInterface):  # type: ignore[misc]
    """The adapter of LMCache that ``adapter_params`` describes, as its ``--l2-adapter`` would."""

    def __new__(cls, adapter_params: Mapping[str, Any], l1_memory_desc: Any = None) -> Any:
        kind = adapter_params.get("type")
        if not isinstance(kind, str) or kind == "plugin":
            raise ConfigurationError(f"adapter_params needs the type of an adapter of LMCache, not {kind!r}")
        misplaced = sorted(adapter_params.keys() & {"serde", "eviction", "persist", "affinity_tag", "shared"})
        if misplaced:
            raise ConfigurationError(f"put {misplaced[0]!r} beside adapter_params, not into it")
        config = get_l2_adapter_config_class(kind).from_dict(dict(adapter_params))
        return create_l2_adapter(config, l1_memory_desc)


register_serde_factory(NAME, _create)
