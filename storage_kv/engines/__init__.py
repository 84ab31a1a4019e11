"""Which engine a configuration asks for."""

from importlib import import_module
from typing import cast

from shadowserve.clock import wall_clock_ms
from shadowserve.errors import ConfigurationError
from shadowserve.pool.contract import Engine
from storage_kv.config import StorageConfig
from storage_kv.engines.filesystem import FilesystemEngine
from storage_kv.engines.memory import MemoryEngine

__all__ = ["engine_kind", "open_engine"]


def engine_kind(config: StorageConfig) -> str:
    """Return ``memory``, ``pool`` or ``filesystem``; ``auto`` is the pool where there are devices, else memory."""
    if config.engine != "auto":
        return config.engine
    return "pool" if getattr(config, "devices", None) else "memory"


def open_engine(config: StorageConfig) -> Engine:
    """Return the engine that ``config`` asks for, not started yet.

    Raises:
        ConfigurationError: it cannot be had.
    """
    kind = engine_kind(config)
    if kind == "memory":
        return MemoryEngine(config.memory_budget_bytes, wall_clock_ms)
    if kind == "filesystem":
        return _filesystem(config)
    try:
        module = import_module("shadowserve.pool.engine")  # only where it is used: it needs much that others do not
    except ImportError as error:
        raise ConfigurationError(f"engine pool is not in this build ({error}): choose memory or filesystem") from error
    return cast(Engine, module.open_pool(config))


def _filesystem(config: StorageConfig) -> Engine:
    if config.filesystem_path is None:
        raise ConfigurationError("engine filesystem needs filesystem_path: the folder to keep values in")
    return FilesystemEngine(config.filesystem_path, config.memory_budget_bytes, wall_clock_ms)
