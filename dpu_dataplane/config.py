"""What the data plane can be told: section ``dpu``; ``configs/emulated.yaml`` says why each default is what it is."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from shadowserve.addresses import is_loopback, split_address
from shadowserve.config import Section
from shadowserve.cores import ProcessCores, chosen_cores
from shadowserve.errors import ConfigurationError
from shadowserve.logs import LogFormat
from shadowserve.pool.config import PoolConfig
from shadowserve.sizes import ByteSize
from shadowserve.tls import check_pair, check_served

__all__ = ["CORE_ANY", "NODES_MAX", "CoreList", "DataPlaneConfig", "TiersConfig", "codec_name"]

CORE_ANY: Final = -1
MIB: Final = 1 << 20
NODES_MAX: Final = 256
"""Storage servers in one batch: the C core's limit."""

CoreList = Literal["auto"] | list[Annotated[int, Field(ge=CORE_ANY, le=4095)]]
"""Core of each thread of a stage, -1 for a thread that is not pinned; ``auto`` sizes it for this machine."""

Positive = Annotated[float, Field(gt=0, le=86400)]


def codec_name(codec: str, backend: str) -> str:
    """Return the codec that ``codec`` of the configuration stands for: ``auto`` goes by who decodes."""
    if codec != "auto":
        return codec
    return "kvrans" if backend == "software" else "deflate"


class TiersConfig(PoolConfig):
    """A pool of memory and devices, and how far ahead it is filled with what waiting requests will fetch."""

    ahead_requests: int | None = Field(4, ge=0)
    """So many requests that run next have what they fetch brought into memory, as far as it arrives before they run;
    none for all of them, 0 for nobody. TierKV's number is 1; engines begin several at a time."""
    ahead_s: Positive | None = None
    """Not before so long ahead of the time at which a request will probably begin; none for no such bound."""
    strict_order: bool = True
    """Never read from a device while it writes: nobody waits for what is written there."""


class DataPlaneConfig(Section):
    """Configuration of the data plane daemon. Sizes take units: ``256MiB``. Times are seconds."""

    section: ClassVar[str] = "dpu"
    headings: ClassVar[Mapping[str, str]] = {
        "listen": "Address and access",
        "metrics_port": "Metrics and logs",
        "storage": "Storage",
        "backend": "What decodes",
        "cores": "Cores",
        "queue_depth": "Pipeline and buffers",
        "fetch_queue": "Limits",
        "quarantine_s": "Faulty records, and the end",
    }

    listen: str = "127.0.0.1:50151"
    """Where gRPC listens, host:port (port 0 takes a free one) or unix:/path."""
    allow_remote: bool = False
    """Allow ``listen`` to be an address that other machines reach though callers are not authenticated (without
    ``tls_client_ca``)."""
    tls_cert: str = ""
    """File of the certificate to show callers, with those that signed it, PEM; empty for no TLS. Read again when it
    changes."""
    tls_key: str = ""
    """File of its private key, PEM, without a passphrase."""
    tls_client_ca: str = ""
    """File of the authorities that must have signed callers' certificates, PEM; empty to take callers without one."""
    hosts_max: int = Field(1, ge=1, le=1024)
    """Hosts at one time: machines that serve, all processes of one are one host. A further one is refused; several are
    kept apart."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Port on the loopback interface for Prometheus (/metrics) and probes (/healthz, /readyz); 0 for none."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log lines to print."""
    log_format: LogFormat = "text"
    """Log lines as text, or as one JSON object a line, with the same events and fields."""

    storage: str = "127.0.0.1:6380"
    """Storage server, host:port; empty for none, as where ``tiers`` are given and this is not. Not used with
    ``storage_nodes`` or ``storage_cluster``."""
    storage_nodes: list[str] = Field([], max_length=NODES_MAX)
    """Several storage servers over one bucket, host:port each, spelt alike for all data planes; empty for one server.
    Each prefix has one of them, and another one while that is away. docs/object-storage.md says more."""
    storage_cluster: list[str] = []
    """Some nodes of a Redis Cluster or Valkey Cluster, host:port each, to learn of the others from; empty for one
    server. docs/scale.md says when to use which."""
    storage_cluster_replicas: bool = False
    """Read from the cluster's replicas, too."""
    storage_username: str = ""
    """User to authenticate as; empty for the server's default user."""
    storage_password: SecretStr = SecretStr("")
    """Password; empty for none. Better in SHADOWSERVE_DPU_STORAGE_PASSWORD than in a file."""
    storage_tls_ca: str = ""
    """File of the authorities that must have signed storage's certificate, PEM; empty for no TLS. Read again when it
    changes."""
    storage_tls_cert: str = ""
    """File of the certificate to show storage, with those that signed it, PEM; empty for none."""
    storage_tls_key: str = ""
    """File of its private key, PEM, without a passphrase."""
    storage_server_name: str = ""
    """Name or IP address that storage's certificate must hold; empty for the one in ``storage``."""
    tiers: TiersConfig | None = None
    """Memory and SSDs of this machine above storage, or alone: a mapping as docs/tiers.md has it, of
    ``memory_budget_bytes`` and ``devices``."""
    connect_timeout_s: Positive = 2.0
    """To connect and authenticate to storage."""
    command_timeout_s: Positive = 5.0
    """Silence of the storage server, while it owes an answer, after which its connection is given up."""
    connections: int = Field(2, ge=1, le=64)
    """Data connections to storage, over which each batch is spread; one network thread serves each. To a cluster so
    many to each node."""

    backend: Literal["software", "doca"] = "software"
    """What decompresses and delivers: CPU cores, or the accelerators of a BlueField through DOCA. A build
    without DOCA has ``software`` alone; a checkout emulates DOCA, and says so."""
    device: str = ""
    """PCI address or name of the DPU's function to use, such as ``0000:03:00.0`` or ``mlx5_0``; empty for the first
    that can do the work. Only with ``doca``."""
    poll_interval_us: int = Field(10, ge=0, le=1_000_000)
    """Microseconds between two looks at an accelerator that has nothing done; 0 for no pause. Only with ``doca``."""
    device_timeout_s: Positive = 10.0
    """How long an accelerator, or a GPU that is copied to, may owe results and give none. Then it is given up, and the
    data plane ends, to be started again: until then nobody knows what the device still writes."""
    codec: Literal["auto", "kvrans", "deflate", "lz4", "zstd", "none"] = "auto"
    """Entropy codec for chunks that are stored. ``auto``: ``kvrans`` where CPU cores decode, ``deflate`` where a
    DPU's accelerator does. Reading takes whatever a record names."""
    fused: Literal["auto"] | bool = "auto"
    """Decompress, dequantize and deliver a slice in one go while it is in a core's cache, instead of stage by stage.
    ``auto``: where CPU cores do it all, so not with ``doca``."""
    cores: ProcessCores = "auto"
    """Cores that the whole process may use, all of its threads; ``auto`` for those that it was given."""
    net_cores: CoreList = "auto"
    """Network threads' cores; one core for each connection."""
    decompress_cores: CoreList = "auto"
    """Decompression threads' cores (with ``fused``: those that do everything after the network)."""
    dequantize_cores: CoreList = "auto"
    """Dequantization threads' cores; unused with ``fused``."""
    dma_cores: CoreList = "auto"
    """Delivery threads' cores; unused with ``fused``."""
    store_cores: CoreList = "auto"
    """Encoding threads' cores; they run at low priority."""
    queue_depth: int = Field(64, ge=1, le=65536)
    """Slices in each queue between two stages."""
    requests_in_flight: int = Field(8, ge=1, le=1024)
    """Range requests sent ahead on each data connection."""
    layer_request_bytes_min: ByteSize | None = Field(None, ge=0)
    """Least stored bytes of a fetch layer by layer that are asked for in one request (``KV.LAYERS``), where storage
    knows it; less goes by range requests. Null: what the link carries while a request is answered, as measured."""
    decompression_buffer_bytes: ByteSize = Field(ByteSize(256 * MIB), ge=MIB)
    """Buffer that compressed chunks are received into; with the shared memory it bounds a batch."""
    dequantization_buffer_bytes: ByteSize = Field(ByteSize(256 * MIB), ge=MIB)
    """Buffer of decompressed symbols; unused, and not allocated, with ``fused``."""
    dma_source_buffer_bytes: ByteSize = Field(ByteSize(512 * MIB), ge=MIB)
    """Buffer that is delivered from; unused, and not allocated, with ``fused``."""
    store_buffer_bytes: ByteSize = Field(ByteSize(128 * MIB), ge=MIB)
    """Buffer that chunks to store are encoded into, a batch at a time."""
    shares_host_memory: Literal["auto"] | bool = "auto"
    """Whether this data plane's own memory and devices are those of the host whose engines it serves: then prefetches,
    device writes and scrubs keep to the engines' interference budget, as all else does. ``auto``: not with ``doca``."""
    pin_memory: bool = True
    """Lock the buffers in memory, as far as the limit on locked memory (``ulimit -l``) allows."""

    slice_bytes: ByteSize = Field(ByteSize(MIB), ge=4096, le=2 * MIB)
    """Most bytes of symbols in one slice of a chunk that is stored. Reading takes whatever a record holds."""
    trace_events: int = Field(16384, ge=0, le=1 << 24)
    """Spans that each of the pipeline's threads has room to record for ``shadowserve trace``; 0 for none."""

    fetch_queue: int = Field(256, ge=1, le=65536)
    """Fetches that may wait for their batch; further ones are refused."""
    store_queue: int = Field(64, ge=1, le=65536)
    """Stores that may wait; further ones are refused."""
    keys_max: int = Field(65536, ge=1, le=1 << 20)
    """Keys in one call."""
    call_bytes_max: ByteSize = Field(ByteSize(256 * MIB), ge=8 * MIB)
    """Bytes of the messages of all calls in progress; each of ``hosts_max`` hosts has an equal share of them. What is
    made of them takes about five times as much."""
    timeout_max_s: Positive = 600.0
    """Longest deadline that a call may ask for."""
    head_cache_bytes: ByteSize = Field(ByteSize(32 * MIB), ge=0)
    """Heads of records remembered between a lookup and the fetches that follow it."""
    registrations_max: int = Field(256, ge=1, le=65536)
    """Regions of registered memory at one time; each of ``hosts_max`` hosts has an equal share of them. However many
    KV cache groups the model has, a worker registers one region to fetch into and one to store from; one more once it
    loads records of engines with other numbers of ranks or stages; and its paged memory with ``pages``."""
    registered_bytes_max: ByteSize = Field(ByteSize(64 * 1024 * MIB), ge=1)
    """Bytes of all registered memory; each of ``hosts_max`` hosts has an equal share of them."""
    registration_idle_s: Positive = 600.0
    """A registration that no call has used for so long is forgotten: its owner is gone, or will register again."""
    quarantine_s: Positive = 300.0
    """How long a key whose record was found faulty is not offered again, unless it is stored anew."""
    quarantine_max: int = Field(65536, ge=1)
    """Keys in quarantine at one time; beyond it the oldest go free."""
    delete_corrupt: bool = True
    """Delete records whose checksums are wrong from storage, so that they can be stored again."""
    shutdown_timeout_s: Positive = 4.0
    """After SIGTERM, jobs have half of this to finish; then they are cancelled."""

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

    @field_validator("storage_cluster", "storage_nodes")
    @classmethod
    def _check_several(cls, value: list[str]) -> list[str]:
        for address in value:
            if split_address(address)[1] == 0:
                raise ValueError(f"'{address}': a storage node cannot have port 0")
            if value.count(address) > 1:
                raise ValueError(f"'{address}' is given twice")
        return value

    @model_validator(mode="before")
    @classmethod
    def _choose_storage(cls, values: Any) -> Any:
        """Without a word about storage, tiers serve alone."""
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
            raise ValueError("there is neither storage nor tiers: nothing could be kept")
        check_pair(self.storage_tls_cert, self.storage_tls_key, prefix="storage_")
        if (self.storage_tls_cert or self.storage_server_name) and not self.storage_tls_ca:
            given = "storage_tls_cert" if self.storage_tls_cert else "storage_server_name"
            raise ValueError(f"{given} is given without storage_tls_ca: there is no TLS without it")
        if self.storage_server_name and self.storage_cluster:
            raise ValueError(
                "storage_server_name is one name, and a cluster has several nodes: their certificates must hold the "
                "names or addresses that the nodes publish (cluster-publish-hostname, cluster-publish-ip)"
            )
        if self.storage_server_name and self.storage_nodes:
            raise ValueError(
                "storage_server_name is one name, and storage_nodes are several: their certificates must hold the "
                "names or addresses that stand there"
            )
        if self.storage_nodes and self.storage_cluster:
            raise ValueError("storage_nodes are servers of ours, storage_cluster is one of Redis or Valkey: give one")
        if self.storage_cluster_replicas and not self.storage_cluster:
            raise ValueError("storage_cluster_replicas is given without storage_cluster: one server has no replicas")
        return self

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        if self.backend == "software":
            if self.device:
                raise ValueError(f"device: '{self.device}' is of no use to the software backend; use backend: doca")
            return self
        if self.fused is True:
            raise ValueError(f"fused: backend {self.backend} works stage by stage; use fused: auto")
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
                "have callers show a certificate (tls_cert, tls_key, tls_client_ca; docs/two-machines.md), or set "
                "allow_remote: true where the network is trusted"
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
        """Return the memory that the data plane takes for itself, in bytes by key."""
        unused = ("dequantization_buffer_bytes", "dma_source_buffer_bytes") if self.stages_fused else ()
        keys = (
            "decompression_buffer_bytes",
            "dequantization_buffer_bytes",
            "dma_source_buffer_bytes",
            "store_buffer_bytes",
        )
        budgets = {key: int(getattr(self, key)) for key in keys if key not in unused}
        if self.tiers is not None:
            budgets["tiers.memory_budget_bytes"] = int(self.tiers.memory_budget_bytes)
        return budgets

    def process_cores(self) -> list[int]:
        """Return the cores of the whole process, with ``auto`` resolved.

        Raises:
            ConfigurationError: a core that this process may not use, or an empty list.
        """
        return chosen_cores("cores", self.cores)

    def stage_cores(self) -> dict[str, list[int]]:
        """Return the cores of ``net``, ``decompress``, ``dequantize``, ``dma`` and ``store``, with ``auto`` resolved.

        They divide :meth:`process_cores` among them.

        Up to four cores every stage may use all of them and the kernel decides, since a pinned decoder would wait
        behind whatever else runs there. But each network thread has one of them: the kernel would wake it on its
        sender's. Above, stages own their cores, as in the paper (2 of 16 for the network).

        Raises:
            ConfigurationError: a core that this process may not use, or an empty list.
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
                    f"net_cores names {len(cores)} cores, and there are {self.connections} connections, each with a "
                    f"thread of its own; name {self.connections} cores, or set connections: {len(cores)}"
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
    """Divide the cores among the stages."""
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
