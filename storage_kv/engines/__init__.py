"""Which engine a configuration asks for."""

from shadowserve.clock import wall_clock_ms
from shadowserve.errors import ConfigurationError
from shadowserve.pool.contract import Engine
from shadowserve.pool.engine import PoolEngine
from storage_kv.config import StorageConfig
from storage_kv.engines.filesystem import FilesystemEngine
from storage_kv.engines.memory import MemoryEngine

__all__ = ["engine_kind", "open_engine"]


def engine_kind(config: StorageConfig) -> str:
    """Return ``memory``, ``pool`` or ``filesystem``; ``auto`` is the pool where there are devices, else memory."""
    if config.engine != "auto":
        return config.engine
    return "pool" if config.devices else "memory"


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
    return PoolEngine(config)


def _filesystem(config: StorageConfig) -> Engine:
    if config.filesystem_path is None:
        raise ConfigurationError("engine filesystem needs filesystem_path: the folder to keep values in")
    return FilesystemEngine(config.filesystem_path, config.memory_budget_bytes, wall_clock_ms)
