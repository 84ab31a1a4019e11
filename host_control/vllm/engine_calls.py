"""Counts calls to a vLLM engine that may change its weights.

vLLM does not notify connectors of ``collective_rpc`` (used by ``apply_model``, ``reload_weights``, ``update_config``
and weight transfer from a trainer), of ``reset_prefix_cache`` without ``reset_connector``, or of ``wake_up``. They are
methods of the engine core, which runs in the scheduler's process. So this module wraps them there and counts the calls.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

WORKER_CALLS: Final = ("collective_rpc", "wake_up")
_METHODS: Final = (*WORKER_CALLS, "reset_prefix_cache")
_counts: collections.Counter[str] = collections.Counter()


def counted_calls(names: Sequence[str] = _METHODS, core: Any = None) -> Callable[[], int] | None:
    """Return a function that returns the number of calls so far in this process.

    Returns:
        ``None`` if this release of vLLM lacks one of the methods, so that calls cannot be counted.
    """
    if core is None:
        try:
            from vllm.v1.engine.core import EngineCore
        except ImportError:
            return None
        core = EngineCore
    if not all(callable(getattr(core, name, None)) for name in _METHODS):
        return None
    for name in _METHODS:
        method = getattr(core, name)
        if not hasattr(method, "counted_by_shadowserve"):
            setattr(core, name, _counted(method))
    return lambda: sum(_counts[name] for name in names)


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:
            _counts[method.__name__] += 1

    call.counted_by_shadowserve = True  # type: ignore[attr-defined]
    return call
