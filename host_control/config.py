"""Section ``host`` of the configuration.

vLLM users may also write its keys into ``kv_connector_extra_config``. These values have priority over environment and
file.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from host_control.client import DataPlaneClient
from shadowserve.addresses import is_loopback, split_address
from shadowserve.calibration import PRESETS
from shadowserve.chunk import TOKENS_MAX
from shadowserve.config import Section
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.sizes import ByteSize
from shadowserve.spans import OtlpEndpoint
from shadowserve.tls import Credentials, check_pair

_MIB: Final = 1 << 20
_BUFFER_MAX: Final = 8192 * _MIB
"""128 chunks of a model with twice the KV of Llama-3.1-8B in bfloat16. More chunks bring no benefit."""


class HostConfig(Section):
    """Keys of section ``host``. Sizes take units: ``256MiB``."""

    section: ClassVar[str] = "host"

    data_plane: str = Field("127.0.0.1:50151", min_length=1)
    """Address of the data plane's gRPC service: ``host:port`` or ``unix:/path``. With ``{rank}`` in it, each worker has
    its own data plane, numbered by pipeline stage, then by tensor-parallel rank. A lookup asks all of them and uses the
    shortest hit."""
    tls_ca: str = ""
    """PEM file of the authorities that verify the data plane's certificate. Empty: no TLS. The TLS files are read again
    for each connection."""
    tls_cert: str = ""
    """PEM file of this host's certificate chain; empty for none."""
    tls_key: str = ""
    """PEM file of this host's private key, without a passphrase."""
    tls_server_name: str = ""
    """Name in the data plane's certificate. Empty: the name or IP in ``data_plane``."""
    fetch: bool = True
    """Look up prompts and fetch stored chunks."""
    asynchronous_fetch: bool = True
    """Fetch while the engine runs other requests. False blocks the engine during each fetch; it exists to measure the
    difference (ShadowServe section 6.4, "No AF"). Engines that run several steps at once refuse it."""
    layer_order: bool | Literal["auto"] = "auto"
    """Fetch layer by layer, and start to compute when the first layer arrives (docs/guides/layer-order.md). ``auto``:
    where that is predicted to be faster, in engines that can do it as they are configured. ``true``: where possible;
    engines that cannot refuse it."""
    pages: bool = False
    """Store pages uncompressed in the tiers of a data plane on this machine, whose devices read them directly into
    paged memory (docs/guides/tiers.md). Paged memory becomes shared memory; ``/dev/shm`` needs room for twice its size.
    Needs an engine on a CPU with one KV cache group of identical layers; other engines refuse it. Engines with and
    without this share no KV."""
    fetch_or_recompute: bool = False
    """Compute a stored prompt, or a part of it, if the first token is predicted to come sooner than by fetching
    (docs/guides/fetch-or-recompute.md)."""
    store: bool = True
    """Store the chunks that this engine computes."""
    hints: bool = True
    """Apply requests' hints (docs/guides/tiers.md)."""
    quantizer: Literal["lossless", "near_lossless", "small", "tiny", "binned", "passthrough"] = "lossless"
    """Quantizer of stored chunks (docs/guides/quality.md). ``lossless``: exact values. ``near_lossless``, ``small``,
    ``tiny``: steps of a calibration, in float16, bfloat16 and float32 caches. ``binned``: vector-wise bins (ShadowServe
    section 5). ``passthrough``: bytes. fp8 caches are stored as bytes, except E4M3 with ``binned``."""
    calibration: str = ""
    """File of ``shadowserve calibrate`` for ``near_lossless``, ``small`` and ``tiny``. Engines with another calibration
    share no KV with this one."""
    exact_copies: bool = False
    """With a lossy quantizer: also store exact values in the local tiers of the data plane (docs/guides/tiers.md), and
    load these where they cover as much of a prompt. This engine stores the smaller records in storage only."""
    bins: int = Field(64, ge=4, le=256, multiple_of=2)
    """Bins of the ``binned`` quantizer for keys, and for MLA."""
    value_bins: int = Field(16, ge=4, le=256, multiple_of=2)
    """Bins of the ``binned`` quantizer for values, which tolerate fewer bins than keys (docs/guides/quality.md)."""
    scale_tokens: int = Field(1, ge=1, le=65536)
    """Number of tokens that share one scale of the ``binned`` quantizer. More than one pays if a rank has few KV heads:
    with vectors of 128 elements, 16 tokens per scale save 0.23 bits per element."""
    chunk_tokens: int = Field(DEFAULT_CHUNK_TOKENS, ge=1, le=TOKENS_MAX)
    """Tokens per chunk, rounded up to whole blocks of the engine. With recurrent state (Mamba, GDN), a chunk is one
    block. Use 64 for agents with short turns: less of each turn is computed again, and a lookup has four times as many
    keys."""
    load_tokens_min: int = Field(64, ge=1)
    """Hits that save fewer tokens than this, beyond the engine's own prefix cache, are not loaded."""
    lookup_timeout_s: float = Field(0.5, gt=0, le=60)
    """A request waits at most this long for its lookup, then counts as a miss. Lookups do not wait for object storage;
    loads do, for up to ``fetch_timeout_s`` (docs/guides/object-storage.md)."""
    lookup_threads: int = Field(2, ge=1, le=64)
    """Threads that hash prompts and query the data plane."""
    pd_role: Literal["none", "prefill", "decode"] = "none"
    """Role of this engine in P/D disaggregation (docs/guides/disaggregation.md). ``prefill``: it publishes keys that it
    is about to store, and stores the tails of prompts. ``decode``: it waits for published keys. ``none``: each
    request's ``kv_transfer_params`` decide."""
    pd_timeout_s: float = Field(5.0, gt=0, le=60)
    """A request waits at most this long for published keys. Published keys of a crashed engine expire after it."""
    fetch_timeout_s: float = Field(10.0, gt=0, le=600)
    """Time limit of a load, including queueing and waiting for object storage. Missing chunks are then computed."""
    store_timeout_s: float = Field(10.0, gt=0, le=600)
    """Time limit for storing one batch of chunks."""
    connect_timeout_s: float = Field(2.0, gt=0, le=60)
    """Time limit for connecting, registering and releasing memory, and cancelling."""
    order: Literal["fifo", "sjf"] = "fifo"
    """Order of queued loads: the oldest first, or the one with the fewest chunks first (long loads may then wait until
    their deadline)."""
    delivery: Literal["auto", "shared_memory", "pinned", "cuda_ipc", "exported"] = "auto"
    """How fetched chunks reach the engine (docs/guides/gpu.md). ``auto``: ``shared_memory`` for engines on CPUs; for
    engines on GPUs ``pinned`` with a data plane on this machine, else ``exported``. ``pinned``: shared memory that the
    GPU copies from. ``cuda_ipc``: the data plane copies into the GPU's memory. ``exported``: a DPU writes into the
    GPU's memory, or into the host's memory if the GPU's cannot be exported or the engine is on a CPU."""
    device: str = Field("", max_length=64)
    """PCI address or name of the DPU's function on this host that exports memory. Empty: the first suitable one."""
    fetch_buffer_bytes: ByteSize = Field(ByteSize(512 * _MIB), ge=4096, le=_BUFFER_MAX)
    """Memory per worker that fetched chunks are written to, on the GPU if they are delivered there (ShadowServe section
    4.3: the DMA destination buffer), else on the host. It holds two batches: one is written while the other is
    scattered. The size is limited to between 2 and 128 chunks. Hits on records of another shard layout use a second
    buffer of the same size."""
    reshaping_buffer_bytes: ByteSize = Field(ByteSize(512 * _MIB), ge=4096, le=_BUFFER_MAX)
    """GPU memory, at most, for reordering chunks between that buffer and paged memory. With Triton only chunks to be
    stored need it, one at a time; without Triton a batch does."""
    store_buffer_bytes: ByteSize = Field(ByteSize(256 * _MIB), ge=4096, le=_BUFFER_MAX)
    """Host memory per worker for chunks that wait to be stored. If it is full, chunks are not stored."""
    breaker_backoff_max_s: float = Field(5.0, gt=0, le=600)
    """Longest pause between attempts to use a data plane that fails repeatedly."""
    identity_cache: str = ""
    """File that caches the hashes of weights and adapters (docs/design/identity.md), so that unchanged files are not
    read at the next start. Empty: ``shadowserve/content.json`` in the user's cache folder; ``none``: no cache."""
    interference_budget: float = Field(0.02, ge=0, le=1)
    """By how much KV transfers may slow down decode steps: 0.02 is 2 %. Data planes limit the rate of all transfers,
    for any engine, while this engine decodes. The engine learns the rate from its steps
    (docs/guides/interference.md). 0: no limit."""
    computing_cache: str = ""
    """File that keeps measured computing times, loading times and slowdown by model and machine. Empty:
    ``shadowserve/computing.json`` in the user's cache folder; ``none``: measured again after each start."""
    metrics_port: int | None = Field(None, ge=0, le=65535)
    """Port on the loopback interface for the page of the plugin's metrics; 0 for a free one, none for no port. vLLM's
    own /metrics has them, too."""
    close_timeout_s: float = Field(5.0, ge=0, le=60)
    """Time limit at shutdown for waiting stores and running loads."""

    otlp_endpoint: OtlpEndpoint = ""
    """OpenTelemetry collector for one trace per request (docs/guides/trace.md); empty for none."""

    @field_validator("metrics_port", mode="before")
    @classmethod
    def _read_port(cls, value: Any) -> Any:
        return None if value == "none" else value

    @field_validator("data_plane")
    @classmethod
    def _check_data_plane(cls, value: str) -> str:
        if not value.startswith(("unix:", "dns:")):
            split_address(value.replace("{rank}", "0"))
        return value

    @model_validator(mode="after")
    def _tls(self) -> Self:
        check_pair(self.tls_cert, self.tls_key)
        if (self.tls_cert or self.tls_server_name) and not self.tls_ca:
            raise ValueError("tls_cert or tls_server_name is set without tls_ca; set tls_ca to enable TLS")
        return self

    @model_validator(mode="after")
    def _scales(self) -> Self:
        if self.scale_tokens > self.chunk_tokens:
            raise ValueError("scale_tokens is above chunk_tokens")
        return self

    @model_validator(mode="after")
    def _calibration(self) -> Self:
        if self.quantizer in PRESETS and not self.calibration:
            raise ValueError(
                f"quantizer: {self.quantizer} needs a calibration of the model; run 'shadowserve calibrate MODEL "
                "--output FILE' and set calibration: FILE"
            )
        if self.calibration and self.quantizer not in PRESETS:
            raise ValueError(
                f"calibration is set, and quantizer: {self.quantizer} does not use it; remove it, or set quantizer to "
                + " or ".join(PRESETS)
            )
        if self.exact_copies and not self.lossy:
            raise ValueError(
                f"exact_copies: true needs a lossy quantizer, and quantizer is {self.quantizer}; remove exact_copies"
            )
        return self

    @model_validator(mode="after")
    def _pages(self) -> Self:
        if not self.pages:
            return self
        if self.lossy:
            raise ValueError(
                f"pages: true stores pages unchanged, which quantizer: {self.quantizer} does not; remove one of them"
            )
        if not self.data_plane_is_local:
            raise ValueError(
                f"pages: true needs a data plane on this machine, and data_plane is {self.data_plane}; set it to a "
                "loopback address or unix:/path, or remove pages"
            )
        return self

    @classmethod
    def from_engine(cls, extra: Mapping[str, Any], place: str = "kv_connector_extra_config") -> Self:
        """Load the configuration, with keys of an engine's own configuration above environment and file.

        Args:
            place: Where the keys were found, for messages.

        Raises:
            ConfigurationError: An unknown key (the message has the most similar one), or an invalid value.
        """
        return cls.load(flags=extra, flags_place=place)

    def client(self, rank: int, engine: pb.Engine | None = None) -> DataPlaneClient:
        """Return a client of a worker's data plane.

        Args:
            rank: Index of the worker.
            engine: Description of the engine whose KV moves; ``None`` if the client moves none.

        Raises:
            ConfigurationError: A certificate or key cannot be used.
        """
        return DataPlaneClient(
            self.data_plane_address(rank),
            credentials=self.credentials(),
            engine=engine,
            connect_timeout_s=self.connect_timeout_s,
            backoff_max_s=self.breaker_backoff_max_s,
        )

    def credentials(self) -> Credentials | None:
        """Return the credentials for TLS connections; ``None`` for no TLS."""
        if not self.tls_ca:
            return None
        return Credentials(
            authorities=self.tls_ca, certificate=self.tls_cert, key=self.tls_key, server_name=self.tls_server_name
        )

    @property
    def lossy(self) -> bool:
        """True if stored chunks may have other values than the engine computed."""
        return self.quantizer not in ("lossless", "passthrough")

    @property
    def data_plane_is_local(self) -> bool:
        """True if the data plane's address is always on this machine."""
        if self.data_plane.startswith("unix:"):
            return True
        return is_loopback(self.data_plane.rpartition(":")[0].strip("[]"))

    def data_plane_address(self, rank: int) -> str:
        """Return the address of a worker's data plane."""
        return self.data_plane.replace("{rank}", str(rank))
