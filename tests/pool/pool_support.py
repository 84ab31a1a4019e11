"""Helpers of the pool's tests: pools over memory, simulated devices and files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from simulated_device import SimulatedDevice
from store_driver import Clock, Driver

from shadowserve.clock import wall_clock_ms
from shadowserve.pool.config import DeviceConfig
from shadowserve.pool.device_pool import DevicePool
from shadowserve.pool.disk import Disk
from shadowserve.pool.entries import Entry
from storage_kv.config import StorageConfig

MIB = 1 << 20
DEVICE_BYTES = 24 * MIB
OBJECTS_MAX = 4096


def configuration(**keys: Any) -> StorageConfig:
    """Return a configuration of a small pool without background work."""
    return StorageConfig.load(flags={"memory_budget_bytes": 8 * MIB, "scrub_bytes_per_s": 0, **keys}, environment={})


def simulated_pool(
    devices: Sequence[SimulatedDevice],
    *,
    bandwidths: Sequence[int] | None = None,
    options: Sequence[dict[str, Any]] | None = None,
    clock_ms: Callable[[], int] = wall_clock_ms,
    budget_bytes: int | None = None,
    **keys: Any,
) -> DevicePool:
    """Return a pool over simulated devices; without ``bandwidths`` they are equal."""
    entries = []
    for number, device in enumerate(devices):
        given = {"objects_max": OBJECTS_MAX, **(options[number] if options else {})}
        given["bandwidth"] = bandwidths[number] if bandwidths else 1 << 30
        entries.append((DeviceConfig(path=Path(device.name), **given), device))
    keys.setdefault("memory_bandwidth", 1)
    return DevicePool(
        # Configurations of devices need devices; these are already open.
        configuration(devices=[str(number) for number in range(len(devices))], **keys).model_copy(
            update={"devices": []}
        ),
        devices=lambda: list(entries),
        clock_ms=clock_ms,
        budget_bytes=budget_bytes,
        seed=1,
        measure=False,
    )


def file_pool(
    paths: Sequence[Path], size: int = DEVICE_BYTES, *, budget_bytes: int | None = None, **keys: Any
) -> DevicePool:
    """Return a pool over files."""
    devices = [{"path": str(path), "size": size, "bandwidth": 1 << 30, "objects_max": OBJECTS_MAX} for path in paths]
    clock_ms = keys.pop("clock_ms", wall_clock_ms)
    measure, below = keys.pop("measure", False), keys.pop("below", None)
    keys.setdefault("memory_bandwidth", 1)
    return DevicePool(
        configuration(devices=devices, **keys),
        budget_bytes=budget_bytes,
        lower_tier=below,
        clock_ms=clock_ms,
        measure=measure,
    )


def simulated_devices(count: int = 1, size: int = DEVICE_BYTES) -> list[SimulatedDevice]:
    return [SimulatedDevice(size, seed=number, name=f"simulated{number}") for number in range(count)]


def start_pool(count: int = 1, *, size: int = DEVICE_BYTES, **keys: Any) -> tuple[Driver, list[SimulatedDevice]]:
    """Return a started pool over new simulated devices, and the devices."""
    devices = simulated_devices(count, size)
    clock = keys.setdefault("clock_ms", Clock())
    return Driver(simulated_pool(devices, **keys), clock=clock), devices


def reopened(*devices: SimulatedDevice, **keys: Any) -> Driver:
    """Return a pool over devices of earlier pools."""
    keys.setdefault("clock_ms", Clock())
    return Driver(simulated_pool(devices, **keys))


def drop_copies(driver: Driver) -> None:
    """Drop all copies in memory that have no other user."""
    with driver.lock:
        while driver.store._core.memory_cache.make_room():
            pass


def entry_of(driver: Driver, key: bytes) -> Entry:
    return driver.peek(key).entry


def disks_of(driver: Driver) -> list[Disk]:
    return driver.store._core.disks


def chunk(number: int, chain: int = 0) -> bytes:
    """Return the 32 bytes of a chunk's name."""
    return (chain << 32 | number + 1).to_bytes(32, "big")
