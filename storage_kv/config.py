"""The configuration of the storage node; ``configs/storage.yaml`` explains every key to those who run it."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from shadowserve.addresses import check_no_url, is_loopback
from shadowserve.config import Section
from shadowserve.cores import ProcessCores
from shadowserve.logs import LogFormat
from shadowserve.pool.cold.config import S3Config
from shadowserve.pool.config import PoolConfig
from shadowserve.sizes import ByteSize
from shadowserve.tls import check_served
from storage_kv.egress import Policy

LIVE: Final = (
    "memory_budget_bytes",
    "connections_max",
    "unauthenticated_connections_max",
    "authentication_timeout_s",
    "clients_memory_bytes_max",
    "pipeline_commands_max",
    "output_buffer_bytes_max",
    "idle_timeout_s",
    "stall_timeout_s",
    "shutdown_timeout_s",
    "drain_delay_s",
    "scrub_bytes_per_s",
    "devices",
    "tenants",
    "pin_share",
    "pin_share_of_tenant",
    "pin_max_s",
    "layers_timeout_s",
    "layers_bits_per_s_min",
    "egress_bits_per_s",
    "egress_policy",
    "egress_margin",
    "egress_epoch_s",
    "log_level",
    "log_format",
)
"""Keys that can change while the node runs; of ``devices``, their budgets. All others are read once, at the start."""

_TENANT_NAME_BYTES_MAX: Final = 128
_CLIENTS_MEMORY_BYTES_MIN: Final = 64 << 20
_STRANGERS_MIN: Final = 16


def is_tenant_name(text: str) -> bool:
    """Return whether a tenant may be called so: 1 to 128 visible ASCII characters."""
    return 0 < len(text) <= _TENANT_NAME_BYTES_MAX and all("!" <= character <= "~" for character in text)


def _checked_tenants(tenants: "dict[str, TenantLimits]") -> "dict[str, TenantLimits]":
    for name in tenants:
        if name and not is_tenant_name(name):
            raise ValueError(
                f"{name!r} is no name of a tenant: 1 to 128 visible ASCII characters, or '' for the default"
            )
    return tenants


class TenantLimits(BaseModel):
    """What one tenant may use; what is not given is not limited."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes_max: ByteSize | None = Field(None, ge=1)
    """Most bytes of its keys and values; beyond it, its own are evicted. Also its share of a bucket that is full."""
    keys_max: int | None = Field(None, ge=1)
    """Most keys; beyond it, its own are evicted."""
    commands_per_s: float | None = Field(None, gt=0)
    """Commands a second, of all its clients together."""
    bytes_per_s: ByteSize | None = Field(None, ge=1)
    """Bytes a second, received and sent, of all its clients together."""
    connections_max: int | None = Field(None, ge=1)
    """Clients at one time; not given, half of those of the node where it has several tenants."""
    weight: float = Field(1.0, ge=0.01, le=100.0)
    """Its part of what several tenants wait for at a time, to the others' parts: the link, and turns of KV.LAYERS."""


class AccessConfig(Section):
    """Where clients come from, who they are, and what is theirs."""

    host: str = "127.0.0.1"
    """Address to listen on, a name or an IP. Others than loopback need a password, users, clients' certificates, or
    protected_mode off."""
    port: int = Field(6380, ge=0, le=65535)
    """TCP port; 0 takes a free one. Redis's is 6379, so that both can run on one machine."""
    password: SecretStr = SecretStr("")
    """What clients must AUTH with; empty for none. Better in SHADOWSERVE_STORAGE_PASSWORD than in a file."""
    protected_mode: bool = True
    """Without a password, users or clients' certificates, refuse clients that do not come from a loopback address."""

    tls_cert: str = ""
    """File of the certificate to show clients, with those that signed it, PEM; empty for no TLS. Read again when it
    changes."""
    tls_key: str = ""
    """File of its private key, PEM, without a passphrase."""
    tls_client_ca: str = ""
    """File of the authorities that must have signed clients' certificates, PEM; empty to take clients without one."""
    tls_users: Literal["off", "cn"] = "off"
    """Whether a client's certificate names its user: ``cn``, by its common name or, without one, its first DNS name."""
    users_file: str = ""
    """File of users, in the format of Redis' ACL files and with ``tenant=NAME``; empty for the default user alone."""
    audit_log: str = ""
    """File of the audit log, a line of JSON for each event; empty for none."""
    audit_log_bytes_max: ByteSize = Field(ByteSize(64 << 20), ge=1 << 12)
    """Size at which the audit log is begun anew; the one before stays beside it, with ``.1`` added to its name."""
    tenants: Annotated[dict[str, TenantLimits], AfterValidator(_checked_tenants)] = {}
    """Limits of each tenant, all optional: ``{name: {bytes_max, keys_max, commands_per_s, bytes_per_s,
    connections_max, weight}}``."""

    pin_share: float = Field(0.5, ge=0.0, le=1.0)
    """Share of the whole budget that pins of all tenants together may take."""
    pin_share_of_tenant: float = Field(0.25, ge=0.0, le=1.0)
    """Share of a tenant's ``bytes_max``, or of the whole budget without one, that its pins may take."""
    pin_max_s: int = Field(600, ge=1, le=10 * 365 * 86_400)
    """Longest time that KV.PIN may name, in seconds; a longer one is an error."""

    @field_validator("host")
    @classmethod
    def _check_host(cls, value: str) -> str:
        check_no_url(value)
        return value

    @field_validator("password", mode="before")
    @classmethod
    def _read_password(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value  # YAML reads 1234 so


class StorageConfig(PoolConfig, AccessConfig):
    """Configuration of ``shadowserve storage``. Sizes may be written as ``8 GiB``."""

    section: ClassVar[str] = "storage"
    replaced: ClassVar[Mapping[str, str]] = {
        "filesystem_path": "a pool keeps values in a file. In place of it and of engine, write\n"
        "  devices: [{{path: {}/values.pool, size: 64 GiB}}]\n"
        "with a folder that is there and the bytes that values may take; memory_budget_bytes is the pool's memory "
        "then. The files that the folder has are not read"
    }
    headings: ClassVar[Mapping[str, str]] = {
        "host": "Address and access",
        "tls_cert": "TLS, users and tenants",
        "memory_budget_bytes": "What holds the values",
        "devices": "The pool",
        "connections_max": "Limits",
        "idle_timeout_s": "Times",
        "io_threads": "Threads and cores",
        "layers_timeout_s": "The link",
        "metrics_host": "Metrics and logs",
    }

    engine: Literal["auto", "memory", "pool"] = "auto"
    """What holds the values: memory, or a pool of memory and SSDs or files; auto: pool where there are devices."""
    s3: S3Config | None = None
    """A bucket below memory and devices, which several nodes may share: a mapping as docs/object-storage.md has it."""

    connections_max: int = Field(10_000, ge=1)
    """Clients at one time; more are told so and closed."""
    unauthenticated_connections_max: int | None = Field(None, ge=1)
    """Of them, clients that have yet to authenticate; beyond it, the oldest makes way. null: a tenth of all, and no
    less than 16."""
    authentication_timeout_s: float = Field(10.0, gt=0.0)
    """Close clients that have not authenticated within this time, their TLS handshake included."""
    clients_memory_bytes_max: ByteSize | None = Field(None, ge=1 << 20)
    """Most that requests on their way in and replies that wait cost, of all clients together, beside what is stored.
    null: a quarter of memory_budget_bytes, and no less than 64 MiB and the largest value."""
    bulk_bytes_max: ByteSize = Field(ByteSize(512 << 20), ge=1 << 10)
    """Largest value; other arguments have at most 64 KiB."""
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

    layers_timeout_s: float = Field(120.0, gt=0.0, le=3600.0)
    """Longest that one request for layers (KV.LAYERS) may take from the question to the last byte; one that would take
    longer is refused, and one that does is answered with an error."""
    layers_bits_per_s_min: float = Field(1e6, ge=0.0)
    """Least rate, in bits a second, that a request for layers may ask for, and at which its client must take layers;
    0 for none."""
    egress_bits_per_s: float = Field(0.0, ge=0.0)
    """What the node's link carries, in bits a second, to be shared among replies; 0 leaves that to the network."""
    egress_policy: Policy = "shortest_remaining"
    """Who gets how much of it, of requests for layers: shortest_remaining, or one of ObjectCache's policies."""
    egress_margin: float = Field(0.0625, ge=0.0, le=1.0)
    """By how much of egress_bits_per_s a request may get more than the rate at which it would not wait; of
    shortest_remaining and calibrated_stall_opt."""
    egress_epoch_s: float = Field(0.02, ge=0.001, le=10.0)
    """For how long a request keeps its rate, whoever comes or goes."""

    metrics_host: str = "127.0.0.1"
    """Address of the HTTP endpoint: /metrics for Prometheus, /healthz and /readyz for probes."""
    metrics_port: int | None = Field(None, ge=0, le=65535)
    """Port of the HTTP endpoint; null for none, 0 takes a free one."""
    log_level: str = Field("INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
    """Least severe log lines to write."""
    log_format: LogFormat = "text"
    """Log lines as text, or as one JSON object a line, with the same events and fields."""

    @field_validator("engine", mode="before")
    @classmethod
    def _check_engine(cls, value: Any) -> Any:
        if value == "filesystem":
            raise ValueError(
                f"filesystem is no engine any more, and {cls.replaced['filesystem_path'].format('FOLDER')}"
            )
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.request_bytes_max < self.bulk_bytes_max:
            raise ValueError("request_bytes_max is less than bulk_bytes_max; a request holds at least one bulk")
        if self.engine == "memory" and self.devices:
            raise ValueError(
                "devices are given, and engine: memory uses none; use engine: pool (or auto), or remove devices"
            )
        check_served(self.tls_cert, self.tls_key, self.tls_client_ca)
        if self.tls_users != "off" and not self.tls_client_ca:
            raise ValueError("tls_users is given without tls_client_ca: a certificate that nobody checks names nobody")
        return self

    @property
    def kind(self) -> Literal["memory", "pool"]:
        """What holds the values: ``auto`` is a pool with devices where there are any, else memory alone."""
        if self.engine == "auto":
            return "pool" if self.devices else "memory"
        return self.engine

    @property
    def clients_memory_bytes(self) -> int:
        """Bytes that all clients together may cost beside what is stored."""
        if self.clients_memory_bytes_max is not None:
            return int(self.clients_memory_bytes_max)
        budget = int(self.memory_budget_bytes)
        return max(_CLIENTS_MEMORY_BYTES_MIN, budget // 4, min(int(self.bulk_bytes_max), budget))

    @property
    def lent_bytes_max(self) -> int:
        """Bytes of stored values that may be kept from going by being sent."""
        return max(1, int(self.memory_budget_bytes) // 2)

    @property
    def strangers_max(self) -> int:
        """Clients that have yet to authenticate at one time."""
        if self.unauthenticated_connections_max is not None:
            return min(self.unauthenticated_connections_max, self.connections_max)
        return min(self.connections_max, max(_STRANGERS_MIN, self.connections_max // 10))

    @property
    def listens_beyond_loopback(self) -> bool:
        """Whether clients of other machines can reach the address."""
        return not is_loopback(self.host)
