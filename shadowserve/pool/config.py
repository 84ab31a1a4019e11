"""Configuration of a pool. A program with a pool has these keys in its own section."""

from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from shadowserve.sizes import ByteSize

DEVICES_MAX: Final = 255
"""The index has one byte for the device; 255 stands for memory alone."""


class DeviceConfig(BaseModel):
    """One device of the pool, an entry of ``devices``: these keys, or its path alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path
    """A block device, an NVMe namespace's character device, or a file, which is made if ``size`` says how large."""
    size: ByteSize | None = Field(None, ge=1 << 20)
    """Bytes of a file; none: as large as it is. A file of a pool grows when this does; a smaller size is refused."""
    bandwidth: ByteSize | None = Field(None, ge=1)
    """Bytes a second that it reads; none measures it, at the start and ever after."""
    bytes_max: ByteSize | None = Field(None, ge=1 << 20)
    """Most bytes of objects; none for all that it has room for."""
    objects_max: int | None = Field(None, ge=1, lt=1 << 32)
    """Most objects, given when it is formatted; none for one to each 64 KiB."""
    write_bytes_per_day: ByteSize | None = Field(None, ge=1 << 20)
    """Most that is written in a day (UTC), to make the SSD last; none for no limit."""
    access: Literal["auto", "nvme", "io_uring", "threads"] = "auto"
    """How it is accessed; auto for the first of these that the device, the kernel and this build have."""
    core: int | None = Field(None, ge=0)
    """Core of its thread; none for any of the process."""


class PoolConfig(BaseModel):
    """Memory and devices of one pool. Sizes may be written as ``8 GiB``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_budget_bytes: ByteSize = Field(ByteSize(4 << 30), ge=1 << 20)
    """Most that keys, values and their overhead take; beyond it the least recently used are evicted."""

    devices: list[DeviceConfig] = []
    """SSDs and files of the pool: paths, or mappings as docs/pool.md has them."""
    objects_max: int | None = Field(None, ge=1, lt=1 << 32)
    """Most objects of the pool; none for what its devices and its memory can hold as they are at the start. Of memory
    alone, it is what a larger memory_budget_bytes has room for later."""
    eviction: Literal["lru", "s3fifo", "frequency"] = "lru"
    """Which objects of the pool go first: the least recently used, those that S3-FIFO has in its small queue, or
    those used least often of late."""
    admission: Literal["all", "second_hit"] = "all"
    """Which objects are written to devices: all, or those that are asked for or stored again."""
    memory_homes: bool = False
    """Objects that fall to memory by its bandwidth live there alone; false: each has a home on a device as well."""
    memory_bandwidth: ByteSize | None = Field(None, ge=1)
    """Bytes a second that memory counts with in the pool's shares; none measures it at the start."""
    arena_nodes: list[int] | Literal["auto"] = "auto"
    """NUMA nodes that the pool takes its memory from; auto for all that have memory."""
    strict_order: bool = False
    """Never read from a device while it writes. Writes then wait for reads to pause, up to a second, in which their
    clients wait as well; reads have nearly all of the device as long as there are any."""
    write_bytes_under_way_max: ByteSize = Field(ByteSize(256 << 20), ge=1 << 20)
    """Bytes that wait to be written to devices, beyond which writers wait."""
    scrub_bytes_per_s: ByteSize = Field(ByteSize(16 << 20), ge=0)
    """Bytes of each device that are read and checked in the background a second; 0 for none."""

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
                raise ValueError(f"{path} is there twice")
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
