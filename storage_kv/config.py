"""The configuration of the storage node; ``configs/storage.yaml`` explains every key to operators."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from shadowserve.addresses import check_no_url, is_loopback
from shadowserve.config import Section
from shadowserve.cores import ProcessCores
from shadowserve.logs import LogFormat
from shadowserve.members import Given, check, parse
from shadowserve.pool.cold.config import S3Config
from shadowserve.pool.config import PoolConfig
from shadowserve.sizes import ByteSize
from shadowserve.spans import OtlpEndpoint
from shadowserve.tls import check_served
from storage_kv.egress import Policy

LIVE: Final = frozenset(
    """
    memory_budget_bytes connections_max unauthenticated_connections_max authentication_timeout_s
    clients_memory_bytes_max pipeline_commands_max output_buffer_bytes_max idle_timeout_s stall_timeout_s
    shutdown_timeout_s drain_delay_s scrub_bytes_per_s devices tenants pin_share pin_share_of_tenant pin_max_s
    layers_timeout_s layers_bits_per_s_min egress_bits_per_s egress_policy egress_margin egress_epoch_s log_level
    log_format
    """.split()
)
"""Keys that can change while the node runs; of ``devices`` only their budgets."""

_TENANT_NAME_BYTES_MAX: Final = 128
_CLIENTS_MEMORY_BYTES_MIN: Final = 64 << 20
_UNAUTHENTICATED_MIN: Final = 16


def is_tenant_name(text: str) -> bool:
    """Return True for a valid name of a tenant: 1 to 128 visible ASCII characters."""
    return 0 < len(text) <= _TENANT_NAME_BYTES_MAX and all("!" <= character <= "~" for character in text)


def _checked_tenants(tenants: "dict[str, TenantLimits]") -> "dict[str, TenantLimits]":
    for name in tenants:
        if name and not is_tenant_name(name):
            raise ValueError(
                f"{name!r} is no valid name of a tenant: use 1 to 128 visible ASCII characters, or '' for the default"
            )
    return tenants


class TenantLimits(BaseModel):
    """Limits of one tenant; those that are not given do not apply."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes_max: ByteSize | None = Field(None, ge=1)
    """Limit of the bytes of its keys and values; beyond it its own are evicted. Also its share of a full bucket."""
    keys_max: int | None = Field(None, ge=1)
    """Limit of its keys; beyond it its own are evicted."""
    commands_per_s: float | None = Field(None, gt=0)
    """Commands per second of all its clients together."""
    bytes_per_s: ByteSize | None = Field(None, ge=1)
    """Bytes per second, received and sent, of all its clients together."""
    connections_max: int | None = Field(None, ge=1)
    """Limit of its connections; by default half of the node's where it has several tenants."""
    weight: float = Field(1.0, ge=0.01, le=100.0)
    """Its share relative to other tenants, of the link and of the turns of KV.LAYERS."""


class FleetConfig(BaseModel):
    """The fleet of nodes over one bucket that a node belongs to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str
    """This node's ``host:port``, as ``members`` has it."""
    members: list[str] | str
    """The same as ``storage_nodes`` of the data planes."""
    ttl_s: float = Field(10.0, gt=0.0, le=86_400.0)
    """Interval at which a file or a name in ``members`` is read again."""

    @field_validator("address")
    @classmethod
    def _check_address(cls, value: str) -> str:
        return next(iter(parse([value])))

    @field_validator("members")
    @classmethod
    def _check_members(cls, value: Given) -> Given:
        return check(value)


class AccessConfig(Section):
    """Address, access, TLS, users and tenants."""

    host: str = "127.0.0.1"
    """Address to listen on, a name or an IP. Addresses other than loopback need a password, users, client certificates,
    or protected_mode off."""
    port: int = Field(6380, ge=0, le=65535)
    """TCP port; 0 takes a free one. Redis uses 6379, so both can run on one machine."""
    password: SecretStr = SecretStr("")
    """Password of the default user; empty for none. Prefer SHADOWSERVE_STORAGE_PASSWORD to a file."""
    protected_mode: bool = True
    """Refuse clients of other machines while there is no password, no users and no client certificates."""

    tls_cert: str = ""
    """File of the server's certificate and its intermediate certificates, PEM; empty for no TLS. Read again when it
    changes."""
    tls_key: str = ""
    """File of its private key, PEM, without a passphrase."""
    tls_client_ca: str = ""
    """File of the authorities of client certificates, PEM; empty if clients need no certificate."""
    tls_users: Literal["off", "cn"] = "off"
    """``cn``: a client certificate's common name or first DNS name is its user; ``off``: certificates name no users."""
    users_file: str = ""
    """File of users, in the format of Redis' ACL files and with ``tenant=NAME``; empty for the default user only."""
    audit_log: str = ""
    """File of the audit log, one line of JSON for each event; empty for none."""
    audit_log_bytes_max: ByteSize = Field(ByteSize(64 << 20), ge=1 << 12)
    """Size at which the audit log is rotated; the previous file has ``.1`` added to its name."""
    tenants: Annotated[dict[str, TenantLimits], AfterValidator(_checked_tenants)] = {}
    """Limits of each tenant, all optional: ``{name: {bytes_max, keys_max, commands_per_s, bytes_per_s,
    connections_max, weight}}``."""

    pin_share: float = Field(0.5, ge=0.0, le=1.0)
    """Limit of the pins of all tenants, as a share of the whole budget."""
    pin_share_of_tenant: float = Field(0.25, ge=0.0, le=1.0)
    """Limit of a tenant's pins, as a share of its ``bytes_max`` or, without one, of the whole budget."""
    pin_max_s: int = Field(600, ge=1, le=10 * 365 * 86_400)
    """Longest time of KV.PIN in seconds; a longer one is an error."""

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

    s3: S3Config | None = None
    """A bucket below memory and devices, which several nodes may share: a mapping (docs/guides/object-storage.md)."""

    fleet: FleetConfig | None = None
    """The nodes over this bucket: ``{address, members, ttl_s}``; the node then lists only the records that it serves
    (docs/guides/object-storage.md)."""

    connections_max: int = Field(10_000, ge=1)
    """Limit of connections; further ones get an error and are closed."""
    unauthenticated_connections_max: int | None = Field(None, ge=1)
    """Limit of connections that have not authenticated; beyond it the oldest is closed. null: a tenth of all, at least
    16."""
    authentication_timeout_s: float = Field(10.0, gt=0.0)
    """Close clients that have not authenticated within this time, TLS handshake included."""
    clients_memory_bytes_max: ByteSize | None = Field(None, ge=1 << 20)
    """Limit of the memory of all clients' incoming requests and waiting replies, beside stored values. null: a quarter
    of memory_budget_bytes, at least 64 MiB and the largest value."""
    bulk_bytes_max: ByteSize = Field(ByteSize(512 << 20), ge=1 << 10)
    """Size limit of a value; other arguments have at most 64 KiB."""
    request_bytes_max: ByteSize = Field(ByteSize(1 << 30), ge=1 << 10)
    """Size limit of all arguments of one command."""
    arguments_max: int = Field(65_536, ge=16)
    """Limit of the arguments of one command, and so of the keys in one KV.META."""
    pipeline_commands_max: int = Field(1_024, ge=1)
    """Commands of one client that are executed in one turn."""
    output_buffer_bytes_max: ByteSize = Field(ByteSize(1 << 20), ge=1 << 12)
    """No more commands of a client are executed while more bytes of its replies wait."""
    read_ahead_bytes_max: ByteSize = Field(ByteSize(32 << 20), ge=1 << 12)
    """Limit of one client's replies that are read from devices or wait behind such a reply."""
    events_bytes_max: ByteSize = Field(ByteSize(0), ge=0)
    """Limit of the logs of stored and removed keys that KV.EVENTS reads, 33 bytes for each change; tenants with readers
    have equal shares. 0: no logs (docs/guides/routers.md)."""
    idle_timeout_s: float = Field(0.0, ge=0.0)
    """Close clients that have sent no command for this long; 0 for never."""
    stall_timeout_s: float = Field(60.0, gt=0.0)
    """Close clients whose unfinished request or reply makes no progress for this long."""
    shutdown_timeout_s: float = Field(5.0, ge=0.0)
    """On SIGTERM, time for unfinished replies."""
    drain_delay_s: float = Field(0.0, ge=0.0, le=3600.0)
    """On SIGTERM, time during which new clients are still served while /readyz answers 503."""
    io_threads: int = Field(0, ge=0, le=128)
    """Threads that serve clients, each for some of them; 0: half of the cores, 1 to 4."""
    verify_threads: int = Field(1, ge=1, le=64)
    """Threads that verify large records before they are stored."""
    cores: ProcessCores = "auto"
    """Cores of the process; ``auto`` for those that it was given."""

    layers_timeout_s: float = Field(120.0, gt=0.0, le=3600.0)
    """Longest time of a request for layers (KV.LAYERS) until its last byte; one that would take longer is refused, and
    one that takes longer ends with an error."""
    layers_bits_per_s_min: float = Field(1e6, ge=0.0)
    """Lowest rate in bits per second that a request for layers may ask for, and at which its client must read; 0 for
    none."""
    egress_bits_per_s: float = Field(0.0, ge=0.0)
    """Capacity of the node's link in bits per second, to be shared among replies; 0 leaves that to the network."""
    egress_policy: Policy = "shortest_remaining"
    """How requests for layers share the link: shortest_remaining, or one of ObjectCache's policies."""
    egress_margin: float = Field(0.0625, ge=0.0, le=1.0)
    """Share of egress_bits_per_s that a request may get beyond the rate at which it does not wait; used by
    shortest_remaining and calibrated_stall_opt."""
    egress_epoch_s: float = Field(0.02, ge=0.001, le=10.0)
    """Time for which a request keeps its rate when other requests start or end."""

    metrics_host: str = "127.0.0.1"
    """Address of the HTTP endpoint with /metrics, /healthz and /readyz."""
    metrics_port: int | None = Field(None, ge=0, le=65535)
    """Port of the HTTP endpoint; none for no endpoint, 0 takes a free port."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of log lines to write."""
    log_format: LogFormat = "text"
    """Log lines as text, or as one JSON object per line, with the same events and fields."""
    otlp_endpoint: OtlpEndpoint = ""
    """OpenTelemetry collector for spans (docs/guides/trace.md); empty for none."""

    @field_validator("metrics_port", mode="before")
    @classmethod
    def _read_port(cls, value: Any) -> Any:
        return None if value == "none" else value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.request_bytes_max < self.bulk_bytes_max:
            raise ValueError(
                "request_bytes_max is less than bulk_bytes_max: a request must be able to hold the largest value"
            )
        check_served(self.tls_cert, self.tls_key, self.tls_client_ca)
        if self.tls_users != "off" and not self.tls_client_ca:
            raise ValueError("tls_users needs tls_client_ca: without it certificates are not verified")
        return self

    @property
    def kind(self) -> Literal["memory", "pool"]:
        return "pool" if self.devices else "memory"

    @property
    def clients_memory_bytes(self) -> int:
        """Limit of the memory of all clients beside stored values."""
        if self.clients_memory_bytes_max is not None:
            return int(self.clients_memory_bytes_max)
        budget = int(self.memory_budget_bytes)
        return max(_CLIENTS_MEMORY_BYTES_MIN, budget // 4, min(int(self.bulk_bytes_max), budget))

    @property
    def lent_bytes_max(self) -> int:
        """Limit of the stored values that cannot be evicted because they are being sent."""
        return max(1, int(self.memory_budget_bytes) // 2)

    @property
    def unauthenticated_max(self) -> int:
        if self.unauthenticated_connections_max is not None:
            return min(self.unauthenticated_connections_max, self.connections_max)
        return min(self.connections_max, max(_UNAUTHENTICATED_MIN, self.connections_max // 10))

    @property
    def listens_beyond_loopback(self) -> bool:
        """True if clients of other machines can reach the address."""
        return not is_loopback(self.host)
