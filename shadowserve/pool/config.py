"""Configuration of a pool. A program with a pool has these keys in its own section."""

from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from shadowserve.sizes import ByteSize

DEVICES_MAX: Final = 255
"""The index has one byte for the device; 255 stands for memory alone."""


class DeviceConfig(BaseModel):
    """One device of the pool, an entry of ``devices``: these keys, or only its path."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path
    """A block device, an NVMe namespace's character device, or a file, which is created if ``size`` is given."""
    size: ByteSize | None = Field(None, ge=1 << 20)
    """Bytes of a file; none for its present size. A file of a pool grows with this; a smaller size is refused."""
    bandwidth: ByteSize | None = Field(None, ge=1)
    """Read rate in bytes per second; none to measure it, at the start and from then on."""
    bytes_max: ByteSize | None = Field(None, ge=1 << 20)
    """Most bytes of objects; none for the whole device."""
    objects_max: int | None = Field(None, ge=1, lt=1 << 32)
    """Most objects, fixed when the device is formatted; none for one for each 64 KiB."""
    write_bytes_per_day: ByteSize | None = Field(None, ge=1 << 20)
    """Most bytes written in a day (UTC), to limit the SSD's wear; none for no limit."""
    access: Literal["auto", "nvme", "io_uring", "threads"] = "auto"
    """Access method; auto for the first of these that device, kernel and build support."""
    core: int | None = Field(None, ge=0)
    """Core of its thread; none for any core of the process."""


class PoolConfig(BaseModel):
    """Memory and devices of one pool. Sizes may be written as ``8 GiB``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_budget_bytes: ByteSize = Field(ByteSize(4 << 30), ge=1 << 20)
    """Most bytes of keys, values and their overhead; beyond it, the least recently used entries are evicted."""

    devices: list[DeviceConfig] = []
    """SSDs and files of the pool: paths, or mappings (docs/design/pool.md)."""
    objects_max: int | None = Field(None, ge=1, lt=1 << 32)
    """Most objects of the pool; none for as many as devices and memory can hold at the start. Without devices, give it
    if memory_budget_bytes will be raised later."""
    eviction: Literal["lru", "s3fifo", "frequency"] = "lru"
    """Eviction policy: the least recently used objects first, S3-FIFO, or the least frequently used recently."""
    admission: Literal["all", "second_hit"] = "all"
    """Objects to write to devices: all, or only those that are read, or stored again."""
    memory_homes: bool = False
    """Objects of memory's share by bandwidth are in memory alone; false: a device has them too."""
    memory_bandwidth: ByteSize | None = Field(None, ge=1)
    """Memory's rate for the shares, in bytes per second; none to measure it at the start."""
    arena_nodes: list[int] | Literal["auto"] = "auto"
    """NUMA nodes of the pool's memory; auto for all that have memory."""
    strict_order: bool = False
    """Never read from a device while it is written. Writes, and their clients, then wait up to a second for a pause in
    the reads, which get nearly all of the device's bandwidth."""
    write_bytes_under_way_max: ByteSize = Field(ByteSize(256 << 20), ge=1 << 20)
    """Most bytes that wait to be written to devices; beyond it, writers wait."""
    scrub_bytes_per_s: ByteSize = Field(ByteSize(16 << 20), ge=0)
    """Rate of background checks for each device, in bytes per second; 0 for none."""

    @field_validator("devices", mode="before")
    @classmethod
    def _read_devices(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return [] if value is None else value
        return [{"path": entry} if isinstance(entry, str | Path) else entry for entry in value]

    @field_validator("devices")
    @classmethod
    def _check_devices(cls, value: list[DeviceConfig]) -> list[DeviceConfig]:
        paths = [entry.path.resolve() for entry in value]
        for path in paths:
            if paths.count(path) > 1:
                raise ValueError(f"{path} is listed twice")
        if len(value) > DEVICES_MAX:
            raise ValueError(f"{len(value)} devices; a pool has at most {DEVICES_MAX}")
        return value

    @model_validator(mode="after")
    def _check_what_devices_are_for(self) -> Self:
        fields = type(self).model_fields
        asked = {
            "admission: second_hit": self.admission == "second_hit",
            "memory_homes: true": self.memory_homes,
            "strict_order: true": self.strict_order and not fields["strict_order"].default,
            "scrub_bytes_per_s": self.scrub_bytes_per_s not in (0, fields["scrub_bytes_per_s"].default),
        }
        if not self.devices and (named := [name for name, wanted in asked.items() if wanted]):
            raise ValueError(f"{' and '.join(named)} needs devices, and there are none; give devices, or remove it")
        return self
