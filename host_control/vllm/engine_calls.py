"""Calls to a vLLM engine after which its workers may have other weights.

vLLM tells a connector of none of them: neither of ``collective_rpc`` (which ``apply_model``, ``reload_weights``,
``update_config`` and the transfer of weights from a trainer go through), nor of ``reset_prefix_cache`` without
``reset_connector``, nor of waking up. All of them are methods of the engine's core, where the scheduler runs, so they
are counted there: each method is replaced by one that calls it and adds one to a count.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

WORKER_CALLS: Final = ("collective_rpc", "wake_up")
_METHODS: Final = (*WORKER_CALLS, "reset_prefix_cache")
_counts: collections.Counter[str] = collections.Counter()


def counted_calls(names: Sequence[str] = _METHODS, core: Any = None) -> Callable[[], int] | None:
    """Return the function that gives the number of calls to this process's engines so far.

    Args:
        names: of the methods.
        core: the class of engine cores; by default vLLM's.

    Returns:
        ``None`` where this release of vLLM has no such methods: then calls are not seen.
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
