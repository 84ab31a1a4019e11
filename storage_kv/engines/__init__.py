"""Which engine a configuration asks for."""

from shadowserve.clock import wall_clock_ms
from shadowserve.pool.contract import Engine
from shadowserve.pool.engine import PoolEngine
from storage_kv.config import StorageConfig
from storage_kv.engines.memory import MemoryEngine

__all__ = ["engine_kind", "open_engine"]


def engine_kind(config: StorageConfig) -> str:
    """Return ``memory`` or ``pool``; ``auto`` is the pool where there are devices, else memory."""
    if config.engine != "auto":
        return config.engine
    return "pool" if config.devices else "memory"


def open_engine(config: StorageConfig) -> Engine:
    """Return the engine that ``config`` asks for, not started yet."""
    if engine_kind(config) == "memory":
        return MemoryEngine(config.memory_budget_bytes, wall_clock_ms)
    return PoolEngine(config)
