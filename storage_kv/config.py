"""The configuration of the storage node; ``configs/storage.yaml`` explains every key to those who run it."""

import ipaddress
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import ByteSize, Field, SecretStr, field_validator, model_validator

from shadowserve.config import Section
from shadowserve.cores import ProcessCores
from shadowserve.logs import LogFormat

__all__ = ["LIVE", "StorageConfig"]

LIVE: Final = (
    "memory_budget_bytes",
    "connections_max",
    "pipeline_commands_max",
    "output_buffer_bytes_max",
    "idle_timeout_s",
    "stall_timeout_s",
    "shutdown_timeout_s",
    "drain_delay_s",
    "log_level",
    "log_format",
)
"""Keys that can change while the node runs. All others are read once, at the start."""


class StorageConfig(Section):
    """Configuration of ``shadowserve storage``. Sizes may be written as ``8 GiB``."""

    section: ClassVar[str] = "storage"

    host: str = "127.0.0.1"
    """Address to listen on, a name or an IP. Others than loopback need a password, or protected_mode off."""
    port: int = Field(6380, ge=0, le=65535)
    """TCP port; 0 takes a free one. Redis's is 6379, so that both can run on one machine."""
    password: SecretStr = SecretStr("")
    """What clients must AUTH with; empty for none. Better in SHADOWSERVE_STORAGE_PASSWORD than in a file."""
    protected_mode: bool = True
    """Without a password, refuse clients that do not come from a loopback address."""

    engine: Literal["auto", "memory", "pool", "filesystem"] = "auto"
    """What holds the values: memory, a pool of memory and SSDs, or files; auto: pool where there are devices."""
    filesystem_path: Path | None = None
    """Folder of the engine filesystem; it is created. Its files belong to this server alone."""
    memory_budget_bytes: ByteSize = Field(ByteSize(4 << 30), ge=1 << 20)
    """Most that keys, values and their overhead take; beyond it the least recently used are evicted."""

    connections_max: int = Field(10_000, ge=1)
    """Clients at one time; more are told so and closed."""
    bulk_bytes_max: ByteSize = Field(ByteSize(512 << 20), ge=1 << 10)
    """Largest single argument, so largest value."""
    request_bytes_max: ByteSize = Field(ByteSize(1 << 30), ge=1 << 10)
    """Largest sum of the arguments of one command."""
    arguments_max: int = Field(65_536, ge=16)
    """Most arguments of one command, so most keys in one KV.META."""
    pipeline_commands_max: int = Field(1_024, ge=1)
    """Commands of one client that are executed before others have their turn."""
    output_buffer_bytes_max: ByteSize = Field(ByteSize(1 << 20), ge=1 << 12)
    """Bytes of replies waiting for a client beyond which no more of its commands are executed."""
    read_ahead_bytes_max: ByteSize = Field(ByteSize(32 << 20), ge=1 << 12)
    """Bytes of one client's replies that are being read from devices, or wait behind such a reply, at one time."""
    idle_timeout_s: float = Field(0.0, ge=0.0)
    """Close clients that have asked nothing for this long; 0 never does."""
    stall_timeout_s: float = Field(60.0, gt=0.0)
    """Close clients that let a request or a reply under way stand still for this long."""
    shutdown_timeout_s: float = Field(5.0, ge=0.0)
    """On SIGTERM, how long replies under way may take to finish."""
    drain_delay_s: float = Field(0.0, ge=0.0, le=3600.0)
    """On SIGTERM, how long clients are still let in while /readyz says 503, before the stop begins."""
    io_threads: int = Field(0, ge=0, le=128)
    """Threads that receive, execute and send, each for its share of the clients; 0: half of the cores, 1 to 4."""
    verify_threads: int = Field(1, ge=1, le=64)
    """Threads that check the checksums of large records as they are stored."""
    cores: ProcessCores = "auto"
    """Cores that the whole process may use, all of its threads; ``auto`` for those that it was given."""

    metrics_host: str = "127.0.0.1"
    """Address of the HTTP endpoint: /metrics for Prometheus, /healthz and /readyz for probes."""
    metrics_port: int | None = Field(None, ge=0, le=65535)
    """Port of the HTTP endpoint; null for none, 0 takes a free one."""
    log_level: str = Field("INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
    """Least severe log lines to write."""
    log_format: LogFormat = "text"
    """Log lines as text, or as one JSON object a line, with the same events and fields."""

    @field_validator("password", mode="before")
    @classmethod
    def _read_password(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value  # YAML reads 1234 so

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.request_bytes_max < self.bulk_bytes_max:
            raise ValueError("request_bytes_max is less than bulk_bytes_max; a request holds at least one bulk")
        return self

    @property
    def listens_beyond_loopback(self) -> bool:
        """Whether clients of other machines can reach the address."""
        if self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True
