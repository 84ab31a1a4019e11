"""The serde ``shadowserve`` of LMCache's L2 adapters, and the adapter that makes LMCache import it.

LMCache 0.5.6 builds its L2 adapters before it loads a user's modules, except the module of a ``plugin`` adapter. So
:class:`Adapter` is such a plugin: LMCache imports this module, which registers the serde, and gets the adapter that
``adapter_params`` describes.

LMCache loads and stores objects in batches, and a batch has one result:

* Storing: objects that do not fit are left out and counted; the others are stored. Values are read into buffers of one
  size, so an object that needs more bytes cannot be stored raw instead.
* Loading: one damaged object makes the whole load a miss, until it is overwritten or deleted. LMCache logs a traceback
  for each such load. The reasons are counted, and logged at most once a minute.

``--separate-object-groups`` is not supported for groups of different sizes: LMCache sizes the buffers of a batch by its
first object. Such a load is a miss.
"""

import math
import threading
import time
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
_LOG_INTERVAL_S: Final = 60.0


class _Counter:
    """Counts objects with a problem, and logs the count and the last reason at most once a minute."""

    def __init__(self, outcome: str) -> None:
        self._outcome, self._count, self._next_s, self._lock = outcome, 0, -math.inf, threading.Lock()

    def add(self, reason: Exception) -> None:
        with self._lock:
            self._count += 1
            now_s = time.monotonic()
            if now_s < self._next_s:
                return
            self._next_s = now_s + _LOG_INTERVAL_S
            _LOGGER.warning("serde '%s': objects %s since the start: %d. %s", NAME, self._outcome, self._count, reason)


def _arrays(shapes: Iterable[Any], dtypes: Iterable[Any]) -> tuple[objects.Array, ...]:
    return tuple(
        objects.Array(tuple(map(int, shape)), str(dtype).removeprefix("torch."))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


class _Writer(Serializer):  # type: ignore[misc]
    def __init__(self, size: float | None, identity: str) -> None:
        self._size, self._identity, self._left_out = size, identity, _Counter("not stored")

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        """Write an object's stored form and return its length; 0 if it does not fit, and is not to be stored."""
        arrays = _arrays(src.get_shapes(), src.get_dtypes())
        needed, target = objects.stored_bytes(arrays, self._size), memoryview(dst.byte_array)
        try:
            if len(target) < needed:
                raise objects.ObjectTooLargeError(
                    f"an object of {key.model_name} was not stored: LMCache gives a buffer for the first object of a "
                    "batch, which is smaller; --separate-object-groups is not supported"
                )
            objects.encode(key, arrays, memoryview(src.byte_array), target[:needed], self._identity)
        except objects.ObjectTooLargeError as error:
            self._left_out.add(error)
            return 0
        return needed

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        return objects.stored_bytes(_arrays(layout_desc.shapes, layout_desc.dtypes), self._size)


class _Reader(Deserializer):  # type: ignore[misc]
    def __init__(self, identity: str, workers: int) -> None:
        self._identity, self._misses = identity, _Counter("that are a miss")
        # The threads share each object: a load waits for its last one.
        self._threads = ThreadPoolExecutor(workers, "shadowserve-serde")

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        """Decode an object. An error makes its whole load a miss: LMCache drops all objects of the batch."""
        arrays = _arrays(dst.get_shapes(), dst.get_dtypes())
        source, target = memoryview(src.byte_array), memoryview(dst.byte_array)
        try:
            objects.decode(key, arrays, source, target, self._identity, self._threads.map)
        except RecordError as error:
            self._misses.add(error)
            raise


class _Processor(AsyncSerdeProcessor):  # type: ignore[misc]
    """LMCache's processor, for which a batch without any object to store is a failure."""

    def __init__(self, writer: _Writer, reader: _Reader, workers: int) -> None:
        super().__init__(writer, reader, workers)
        self._stored: dict[int, list[MemoryObj]] = {}

    def submit_serialize(self, src_objs: list[MemoryObj], dst_objs: list[MemoryObj], keys: list[ObjectKey]) -> int:
        task: int = super().submit_serialize(src_objs, dst_objs, keys)
        self._stored[task] = dst_objs
        return task

    def query_serialize_result(self, task_id: int) -> bool | None:
        done: bool | None = super().query_serialize_result(task_id)
        return done if done is None else any(each.get_size() for each in self._stored.pop(task_id)) and done


def _create(settings: Mapping[str, object]) -> SerdeProcessor:
    """Build the serde from its keys in an adapter's ``serde``: ``size``, ``identity``, ``max_workers``."""
    unknown = sorted(settings.keys() - {"size", "identity", "max_workers"})
    if unknown:
        raise ConfigurationError(f"serde '{NAME}' has no key {unknown[0]!r}: it has size, identity, max_workers")
    size, workers, identity = settings.get("size"), settings.get("max_workers", 2), settings.get("identity")
    if size is not None and not (
        isinstance(size, (int, float)) and math.isfinite(size) and 0 < size <= objects.SIZE_MAX
    ):
        raise ConfigurationError(f"serde '{NAME}': size is {size!r}; it is a share above 0, up to {objects.SIZE_MAX}")
    if not isinstance(workers, int) or isinstance(workers, bool) or not 1 <= workers <= 64:
        raise ConfigurationError(f"serde '{NAME}': max_workers is {workers!r}; it is a number from 1 to 64")
    if not isinstance(identity, str) or not identity:
        raise ConfigurationError(
            f"serde '{NAME}': identity is {identity!r}; set a text that changes with the weights, such as their "
            "revision: servers with one identity and model name read each other's objects"
        )
    return _Processor(_Writer(size, identity), _Reader(identity, workers), workers)


class Adapter(L2AdapterInterface):  # type: ignore[misc]
    """The adapter of LMCache that ``adapter_params`` describes, as its ``--l2-adapter`` would.

    It does not store the objects that the serde left out.
    """

    def __new__(cls, adapter_params: Mapping[str, Any], l1_memory_desc: Any = None) -> Any:
        kind = adapter_params.get("type")
        if not isinstance(kind, str) or kind == "plugin":
            raise ConfigurationError(f"adapter_params needs the type of an adapter of LMCache, not {kind!r}")
        misplaced = sorted(adapter_params.keys() & {"serde", "eviction", "persist", "affinity_tag", "shared"})
        if misplaced:
            raise ConfigurationError(f"put {misplaced[0]!r} beside adapter_params, not into it")
        config = get_l2_adapter_config_class(kind).from_dict(dict(adapter_params))
        adapter = create_l2_adapter(config, l1_memory_desc)
        store = adapter.submit_store_task

        def submit_store_task(keys: list[ObjectKey], buffers: list[MemoryObj]) -> int:
            fit = [(key, each) for key, each in zip(keys, buffers, strict=True) if each.get_size()]
            task: int = store([key for key, _ in fit], [each for _, each in fit])
            return task

        adapter.submit_store_task = submit_store_task
        return adapter


register_serde_factory(NAME, _create)
