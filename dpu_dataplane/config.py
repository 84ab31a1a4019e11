"""Configuration of the data plane: section ``dpu``. ``configs/emulated.yaml`` explains the defaults."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator

from shadowserve import members
from shadowserve.addresses import is_loopback, split_address
from shadowserve.config import Section
from shadowserve.cores import ProcessCores, chosen_cores
from shadowserve.errors import ConfigurationError
from shadowserve.logs import LogFormat
from shadowserve.pool.config import PoolConfig
from shadowserve.sizes import ByteSize
from shadowserve.spans import OtlpEndpoint
from shadowserve.tls import check_pair, check_served

CORE_ANY: Final = -1
MIB: Final = 1 << 20
NODES_MAX: Final = members.MEMBERS_MAX

CoreList = Literal["auto"] | list[Annotated[int, Field(ge=CORE_ANY, le=4095)]]
"""Core of each thread of a stage; -1 for a thread that is not pinned; ``auto`` for a choice by the machine's size."""

_TOKEN_MIN: Final = 16
Positive = Annotated[float, Field(gt=0, le=86400)]


def codec_name(codec: str, backend: str) -> str:
    """Resolve the codec ``auto``: it depends on the backend."""
    if codec != "auto":
        return codec
    return "kvrans" if backend == "software" else "deflate"


class TiersConfig(PoolConfig):
    """A pool of memory and devices, and limits of prefetching into it."""

    ahead_requests: int | None = Field(4, ge=0)
    """Number of next requests whose records are prefetched, as far as they arrive before the requests run; none for all
    requests, 0 for no prefetching. TierKV's number is 1; engines begin several requests at the same time."""
    ahead_s: Positive | None = None
    """Longest time before the probable begin of a request at which its records are prefetched; none for no limit."""
    strict_order: bool = True
    """Never read from a device while it writes; no request waits for its writes."""


class DataPlaneConfig(Section):
    """Configuration of the data plane daemon. Sizes take units: ``256MiB``. Times are seconds."""

    section: ClassVar[str] = "dpu"
    headings: ClassVar[Mapping[str, str]] = {
        "listen": "Address and access",
        "metrics_host": "Metrics and logs",
        "storage": "Storage",
        "backend": "What decodes",
        "cores": "Cores",
        "layer_request_bytes_min": "Pipeline and buffers",
        "fetch_queue": "Limits",
        "quarantine_s": "Faulty records, and the end",
    }

    listen: str = "127.0.0.1:50151"
    """Address of the gRPC server, host:port (port 0 for a free one) or unix:/path."""
    allow_remote: bool = False
    """Allow other machines to reach ``listen`` without authentication (without ``tls_client_ca``)."""
    tls_cert: str = ""
    """File with the server's certificate and its chain, PEM; empty for no TLS. Read again when it changes."""
    tls_key: str = ""
    """File with its private key, PEM, without a passphrase."""
    tls_client_ca: str = ""
    """File with the authorities of client certificates, PEM; empty to accept clients without a certificate."""
    hosts_max: int = Field(1, ge=1, le=1024)
    """Most hosts at the same time; all processes of a serving machine are one host. Further hosts are refused. Hosts
    have no access to each other's memory and jobs."""
    metrics_host: str = "127.0.0.1"
    """Address of the HTTP endpoint with /metrics, /healthz and /readyz."""
    metrics_port: int | None = Field(None, ge=0, le=65535)
    """Port of the HTTP endpoint; none for no endpoint, 0 takes a free port."""
    query_token: SecretStr = SecretStr("")
    """Token of routers that may POST /query and /directory/lookup to the HTTP endpoint (docs/guides/routers.md), at
    least 16 characters; empty for no queries. Prefer SHADOWSERVE_DPU_QUERY_TOKEN to a file."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level of log lines."""
    log_format: LogFormat = "text"
    """Log lines as text, or as one JSON object per line."""
    otlp_endpoint: OtlpEndpoint = ""
    """OpenTelemetry collector for spans (docs/guides/trace.md); empty for none."""

    storage: str = "127.0.0.1:6380"
    """Storage node, host:port; empty for none, which is the default with ``tiers``. Not used with ``storage_nodes`` or
    ``storage_cluster``."""
    storage_nodes: list[str] | str = []
    """Several storage nodes, the same on all data planes: a list of ``host:port`` or ``host:port=weight``,
    ``file:PATH``, or ``dns:NAME:PORT``; empty for one node. See docs/guides/object-storage.md."""
    storage_nodes_ttl_s: Positive = 10.0
    """Interval of reading the file or name in ``storage_nodes``."""
    storage_cluster: list[str] = []
    """Some nodes of a Redis Cluster or Valkey Cluster, host:port each, for the discovery of the others; empty for one
    node. See docs/guides/stores.md."""
    storage_cluster_replicas: bool = False
    """Read from the cluster's replicas as well."""
    storage_username: str = ""
    """User name; empty for the server's default user."""
    storage_password: SecretStr = SecretStr("")
    """Password; empty for none. Prefer SHADOWSERVE_DPU_STORAGE_PASSWORD to a file."""
    storage_tls_ca: str = ""
    """File with the authorities of storage's certificate, PEM; empty for no TLS. Read again when it changes."""
    storage_tls_cert: str = ""
    """File with the client certificate for storage and its chain, PEM; empty for none."""
    storage_tls_key: str = ""
    """File with its private key, PEM, without a passphrase."""
    storage_server_name: str = ""
    """Name or IP address that storage's certificate must hold; empty for the one in ``storage``."""
    tiers: TiersConfig | None = None
    """Local tiers, memory and SSDs of this machine, above storage or alone: a mapping with ``memory_budget_bytes`` and
    ``devices``. See docs/guides/tiers.md."""
    connect_timeout_s: Positive = 2.0
    """Time limit to connect and authenticate to storage."""
    command_timeout_s: Positive = 5.0
    """Time without an answer from storage after which its connection is closed."""
    connections: int = Field(2, ge=1, le=64)
    """Data connections to each storage node; each batch uses all of them, and each has a network thread."""

    backend: Literal["software", "doca"] = "software"
    """Device that decompresses and delivers: CPU cores, or a BlueField's accelerators through DOCA. A build without
    DOCA has only ``software``; a checkout has an emulator of DOCA, named as such in the log."""
    device: str = ""
    """PCI address or name of the DPU's function, such as ``0000:03:00.0`` or ``mlx5_0``; empty for the first suitable
    one. Only with ``doca``."""
    device_timeout_s: Positive = 10.0
    """Time without a result after which an accelerator, or a GPU in a copy, counts as hanging. It is abandoned, and the
    data plane ends, to be restarted: until then the device may still write to memory."""
    codec: Literal["auto", "kvrans", "deflate", "lz4", "zstd", "none"] = "auto"
    """Entropy codec of new records. ``auto``: ``kvrans`` if CPU cores decode, ``deflate`` for a DPU's accelerator.
    Records in all codecs can be read."""
    fused: Literal["auto"] | bool = "auto"
    """Decompress, dequantize and deliver a slice in one stage, while it is in a core's cache. ``auto``: not with
    ``doca``."""
    cores: ProcessCores = "auto"
    """Cores for all threads of the process; ``auto`` for those that the process may use."""
    net_cores: CoreList = "auto"
    """Cores of the network threads, one for each connection."""
    decompress_cores: CoreList = "auto"
    """Cores of the decompression threads; with ``fused``, of the threads for all stages after the network."""
    dequantize_cores: CoreList = "auto"
    """Cores of the dequantization threads; unused with ``fused``."""
    dma_cores: CoreList = "auto"
    """Cores of the delivery threads; unused with ``fused``."""
    store_cores: CoreList = "auto"
    """Cores of the encoding threads; they run at low priority."""

    layer_request_bytes_min: ByteSize | None = Field(None, ge=0)
    """Fewest stored bytes of a batch in layer order that is one request (``KV.LAYERS``) instead of range requests.
    None: the measured bandwidth-delay product of the link."""
    decompression_buffer_bytes: ByteSize = Field(ByteSize(256 * MIB), ge=MIB)
    """Buffer for received, compressed chunks; with the registered memory it limits a batch."""
    dequantization_buffer_bytes: ByteSize = Field(ByteSize(256 * MIB), ge=MIB)
    """Buffer for decompressed symbols; not allocated with ``fused``."""
    dma_source_buffer_bytes: ByteSize = Field(ByteSize(512 * MIB), ge=MIB)
    """Buffer for chunks to deliver; not allocated with ``fused``."""
    store_buffer_bytes: ByteSize = Field(ByteSize(128 * MIB), ge=MIB)
    """Buffer for encoded chunks of stores."""
    shares_host_memory: Literal["auto"] | bool = "auto"
    """The data plane runs on the host of its engines and shares its memory: prefetches, device writes and scrubs keep
    to the engines' interference budget. ``auto``: not with ``doca``."""

    slice_bytes: ByteSize = Field(ByteSize(MIB), ge=4096, le=2 * MIB)
    """Most bytes of symbols in a slice of a new record. Records with other slices can be read."""
    trace_events: int = Field(16384, ge=0, le=1 << 24)
    """Spans that each thread of the pipeline can record for ``shadowserve trace``; 0 for none."""

    fetch_queue: int = Field(256, ge=1, le=65536)
    """Most waiting fetches; further ones are refused."""
    call_bytes_max: ByteSize = Field(ByteSize(256 * MIB), ge=8 * MIB)
    """Most bytes of messages of calls in progress; each of ``hosts_max`` hosts has an equal share. Decoded messages
    take about five times as much memory."""
    registrations_max: int = Field(256, ge=1, le=65536)
    """Most regions of registered memory; each of ``hosts_max`` hosts has an equal share
    (docs/guides/two-machines.md)."""
    registered_bytes_max: ByteSize = Field(ByteSize(64 * 1024 * MIB), ge=1)
    """Most bytes of registered memory; each of ``hosts_max`` hosts has an equal share."""
    registration_idle_s: Positive = 600.0
    """Time without a call after which registered memory is removed; its owner can register it again."""
    quarantine_s: Positive = 300.0
    """Time for which lookups miss a key with a faulty record, unless it is stored again."""
    delete_corrupt: bool = True
    """Delete records with wrong checksums from storage, so that they can be stored again."""
    shutdown_timeout_s: Positive = 4.0
    """Time limit of a stop: jobs have half of it to finish, then they are cancelled."""

    @field_validator("storage_password", "storage_username", mode="before")
    @classmethod
    def _read_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value  # YAML reads 1234 so

    @field_validator("storage")
    @classmethod
    def _check_storage(cls, value: str) -> str:
        if value and split_address(value)[1] == 0:
            raise ValueError(f"'{value}': the storage server cannot have port 0")
        return value

    @field_validator("metrics_port", mode="before")
    @classmethod
    def _read_port(cls, value: Any) -> Any:
        return None if value == "none" else value

    @field_validator("storage_cluster", "storage_nodes")
    @classmethod
    def _check_several(cls, value: list[str] | str, info: ValidationInfo) -> list[str] | str:
        if info.field_name == "storage_cluster":  # its nodes have no weights
            for address in value:
                split_address(address)
        return members.check(value) if value else []

    @model_validator(mode="before")
    @classmethod
    def _choose_storage(cls, values: Any) -> Any:
        """With tiers and without a storage key, there is no storage."""
        if (
            isinstance(values, dict)
            and values.get("tiers")
            and not values.keys() & {"storage", "storage_nodes", "storage_cluster"}
        ):
            return values | {"storage": ""}
        return values

    @model_validator(mode="after")
    def _check_storage_tls(self) -> Self:
        if not (self.storage or self.storage_nodes or self.storage_cluster or self.tiers):
            raise ValueError("neither storage nor tiers are configured: nothing could be stored")
        if token := self.query_token.get_secret_value():
            if self.metrics_port is None:
                raise ValueError("query_token needs metrics_port: queries come to the HTTP endpoint")
            if len(token) < _TOKEN_MIN or not token.isascii() or not token.isprintable() or " " in token:
                raise ValueError(f"query_token has at least {_TOKEN_MIN} visible ASCII characters")
        check_pair(self.storage_tls_cert, self.storage_tls_key, prefix="storage_")
        if (self.storage_tls_cert or self.storage_server_name) and not self.storage_tls_ca:
            given = "storage_tls_cert" if self.storage_tls_cert else "storage_server_name"
            raise ValueError(f"{given} needs storage_tls_ca: without it there is no TLS")
        if self.storage_server_name and self.storage_cluster:
            raise ValueError(
                "storage_server_name is one name, and a cluster has several nodes: their certificates must hold the "
                "names or addresses of the nodes (cluster-announce-hostname, cluster-announce-ip)"
            )
        if self.storage_server_name and self.storage_nodes and not members.service_of(self.storage_nodes):
            raise ValueError(
                "storage_server_name is one name, and storage_nodes are several: their certificates must hold the "
                "names or addresses in storage_nodes"
            )
        if self.storage_nodes and self.storage_cluster:
            raise ValueError(
                "storage_nodes are ShadowServe nodes, storage_cluster is a Redis or Valkey cluster: use one of them"
            )
        if self.storage_cluster_replicas and not self.storage_cluster:
            raise ValueError("storage_cluster_replicas needs storage_cluster: a single node has no replicas")
        return self

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        if self.backend == "software":
            if self.device:
                raise ValueError(f"device: '{self.device}' is not used by the software backend; use backend: doca")
            return self
        if self.fused is True:
            raise ValueError(f"fused: backend {self.backend} cannot fuse stages; use fused: auto")
        return self

    @model_validator(mode="after")
    def _check_listen(self) -> Self:
        if self.listen.startswith("unix:"):
            if len(self.listen) == len("unix:"):
                raise ValueError("listen: unix: needs a path, such as unix:/run/shadowserve/dpu.sock")
            return self
        host, _ = split_address(self.listen)
        if not is_loopback(host) and not self.allow_remote and not self.tls_client_ca:
            raise ValueError(
                f"listen: '{host}' can be reached from other machines, and calls are not authenticated; use 127.0.0.1, "
                "require client certificates (tls_cert, tls_key, tls_client_ca; docs/guides/two-machines.md), or set "
                "allow_remote: true if the network is trusted"
            )
        return self

    @property
    def memory_shared(self) -> bool:
        """``shares_host_memory``, with ``auto`` resolved."""
        return self.backend == "software" if self.shares_host_memory == "auto" else self.shares_host_memory

    @property
    def stages_fused(self) -> bool:
        """``fused``, with ``auto`` resolved."""
        return self.backend == "software" if self.fused == "auto" else self.fused

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        check_served(self.tls_cert, self.tls_key, self.tls_client_ca)
        return self

    def memory_budgets(self) -> dict[str, int]:
        """Return the memory that the data plane allocates, in bytes by configuration key."""
        keys = ["decompression_buffer_bytes", "store_buffer_bytes"]
        if not self.stages_fused:
            keys += ["dequantization_buffer_bytes", "dma_source_buffer_bytes"]
        budgets = {key: int(getattr(self, key)) for key in keys}
        if self.tiers is not None:
            budgets["tiers.memory_budget_bytes"] = int(self.tiers.memory_budget_bytes)
        return budgets

    def process_cores(self) -> list[int]:
        """Return the cores of the process, with ``auto`` resolved; ConfigurationError for cores that it may not use."""
        return chosen_cores("cores", self.cores)

    def stage_cores(self) -> dict[str, list[int]]:
        """Return the cores of each stage, with ``auto`` resolved; ConfigurationError for cores that it may not use.

        With up to four cores, all stages share all cores, and the kernel schedules them: a pinned decoder would wait
        for other threads on its core. Network threads are pinned even then: the kernel would wake them on the sender's
        core. With more cores, stages own their cores, as in the paper (2 of 16 for the network).
        """
        usable = self.process_cores()
        given = {
            "net": self.net_cores,
            "decompress": self.decompress_cores,
            "dequantize": self.dequantize_cores,
            "dma": self.dma_cores,
            "store": self.store_cores,
        }
        automatic = _share(usable, self.connections, self.stages_fused)
        chosen = {}
        for stage, cores in given.items():
            if stage == "net" and cores != "auto" and len(cores) != self.connections:
                raise ConfigurationError(
                    f"net_cores names {len(cores)} cores, and there are {self.connections} connections, each with its "
                    f"own thread; name {self.connections} cores, or set connections: {len(cores)}"
                )
            chosen[stage] = automatic[stage] if cores == "auto" else list(cores)
            absent = [core for core in chosen[stage] if core != CORE_ANY and core not in usable]
            if absent or not chosen[stage]:
                raise ConfigurationError(
                    f"{stage}_cores: " + (f"core {absent[0]} is not" if absent else "an empty list; give some of")
                    + f" among the cores this process may use: {', '.join(map(str, usable))}, or -1 for any"
                )  # fmt: skip
        return chosen


def _share(usable: list[int], connections: int, fused: bool) -> dict[str, list[int]]:
    count = len(usable)
    net = [usable[index % count] for index in range(connections)]
    if count <= 4:
        anywhere = [CORE_ANY] * count
        return {"net": net, "decompress": anywhere, "dequantize": anywhere, "dma": [CORE_ANY], "store": anywhere}
    net = [usable[index % max(1, count // 8)] for index in range(connections)]
    rest = [core for core in usable if core not in net]
    if fused:
        return {"net": net, "decompress": rest, "dequantize": rest, "dma": rest[:1], "store": rest}
    dma, compute = rest[:1], rest[1:]
    half = len(compute) // 2
    return {"net": net, "decompress": compute[:half], "dequantize": compute[half:], "dma": dma, "store": compute}
