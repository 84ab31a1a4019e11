"""Configuration of the host side: section ``host`` of the configuration file, or an engine's own configuration.

vLLM users write the keys into ``kv_connector_extra_config``, plain (``"quantizer"``) or dotted
(``"shadowserve.quantizer"``); both win over environment and file, as a flag would.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from host_control.client import DataPlaneClient
from shadowserve.addresses import is_loopback, split_address
from shadowserve.chunk import TOKENS_MAX
from shadowserve.config import Section
from shadowserve.errors import ConfigurationError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.sizes import ByteSize
from shadowserve.tls import Credentials, check_pair

_DOTTED: Final = "shadowserve."
_MIB: Final = 1 << 20
_BUFFER_MAX: Final = 8192 * _MIB
"""128 chunks, more than which never pay, of a model with twice the KV of Llama-3.1-8B in bfloat16."""


class HostConfig(Section):
    """Keys of section ``host``. Times are in seconds; sizes take units: ``256MiB``."""

    section: ClassVar[str] = "host"

    data_plane: str = Field("127.0.0.1:50151", min_length=1)
    """Address of the data plane's gRPC service, ``host:port`` or ``unix:/path``. With ``{rank}`` in it, each
    worker has a data plane of its own: tensor-parallel ranks, of one pipeline stage after the other. A lookup asks all
    of them, and the fewest hits count."""
    tls_ca: str = ""
    """File of the authorities that must have signed the data plane's certificate, PEM; empty for no TLS. This and the
    two below are read again when a connection is made."""
    tls_cert: str = ""
    """File of the certificate that this host shows, with those that signed it, PEM; empty for none."""
    tls_key: str = ""
    """File of its private key, PEM, without a passphrase."""
    tls_server_name: str = ""
    """Name that the data plane's certificate must hold; empty for the name or IP in ``data_plane``."""
    fetch: bool = True
    """Look prompts up and fetch what is stored."""
    asynchronous_fetch: bool = True
    """Fetch while the engine goes on with other requests. False blocks the whole engine until a request's KV is in
    place; it is there to be measured (ShadowServe section 6.4, "No AF"). An engine with more than one step under way at
    a time refuses it. docs/combinations.md says which requests are fetched beside others all the same."""
    layer_order: bool = False
    """Fetch layer by layer, and begin to compute as the first layer arrives, for requests that come while no other
    runs. It needs one KV cache group of full attention and one step under way at a time: no pipeline stages,
    ``--no-async-scheduling``, ``VLLM_USE_V2_MODEL_RUNNER=0``. Other engines refuse it. docs/combinations.md says which
    requests are fetched chunk by chunk all the same."""
    pages: bool = False
    """Store chunks as this engine's pages are, not compressed, in the tiers of a data plane on this machine, and have
    its devices bring them straight into paged memory, which becomes shared memory (docs/tiers.md). It needs an engine
    on a CPU with one KV cache group of layers that are alike; other engines refuse it. At the start ``/dev/shm`` must
    have room for twice the engine's paged memory. Engines that have this and engines that have not share nothing."""
    fetch_or_recompute: bool = False
    """Compute a prompt, or more of it, that is stored, where that is predicted to bring its first token sooner than
    fetching. Until both have been seen often enough, what is stored is fetched, as all of it is without this, but for
    what is in object storage alone (docs/fetch-or-recompute.md)."""
    store: bool = True
    """Store the chunks that this engine computes."""
    quantizer: Literal["lossless", "binned", "passthrough"] = "lossless"
    """What is stored: exact values, or vector-wise bins (ShadowServe section 5). fp8 caches are stored as they are, but
    for E4M3 with ``binned``."""
    bins: int = Field(64, ge=4, le=256, multiple_of=2)
    """Bins of the ``binned`` quantizer for keys, and for the latents of MLA."""
    value_bins: int = Field(16, ge=4, le=256, multiple_of=2)
    """Bins of the ``binned`` quantizer for values, which bear much coarser ones than keys (docs/quality.md)."""
    scale_tokens: int = Field(1, ge=1, le=65536)
    """So many tokens share one scale of the ``binned`` quantizer. More than one pay where a rank has few KV heads: with
    vectors of 128 elements, 16 tokens to a scale save 0.23 bits an element."""
    chunk_tokens: int = Field(DEFAULT_CHUNK_TOKENS, ge=1, le=TOKENS_MAX)
    """Tokens in a chunk: the unit of storing and fetching. Rounded up to whole blocks of the
    engine's; where it keeps states (Mamba, GDN), a chunk is one block."""
    load_tokens_min: int = Field(64, ge=1)
    """A hit that would save fewer tokens than this beyond the local prefix is not worth a transfer."""
    lookup_timeout_s: float = Field(0.5, gt=0, le=60)
    """A request waits at most so long for its lookup, then counts as a miss. No lookup waits for object storage: loads
    do, for up to ``fetch_timeout_s`` (docs/object-storage.md)."""
    lookup_threads: int = Field(2, ge=1, le=64)
    """Threads that hash prompts and ask the data plane."""
    pd_role: Literal["none", "prefill", "decode"] = "none"
    """This engine's place where one pool of engines computes prompts and another goes on with them
    (docs/disaggregation.md). ``prefill``: it publishes what it is about to store, and stores prompts' tails.
    ``decode``: it waits for what is published. With ``none`` requests are handed over whose ``kv_transfer_params`` say
    so."""
    pd_timeout_s: float = Field(5.0, gt=0, le=60)
    """A request waits at most so long for what is published, and publications of an engine that died last so long."""
    fetch_timeout_s: float = Field(10.0, gt=0, le=600)
    """From the hand-over of a fetch job to its outcome, queueing and waiting for object storage included. Recomputation
    follows."""
    store_timeout_s: float = Field(10.0, gt=0, le=600)
    """For one batch of chunks."""
    connect_timeout_s: float = Field(2.0, gt=0, le=60)
    """For registering memory, releasing it and cancelling."""
    order: Literal["fifo", "sjf"] = "fifo"
    """Which fetch job goes next: the oldest, or the one with the fewest chunks (which lets long ones wait until their
    deadline while short ones keep coming)."""
    delivery: Literal["auto", "shared_memory", "pinned", "cuda_ipc", "exported"] = "auto"
    """How fetched chunks reach the engine (docs/gpu.md). ``auto``: ``shared_memory`` for engines on CPUs; for engines
    on GPUs ``pinned`` where the data plane is on this machine, else ``exported``. ``pinned``: shared memory that the
    GPU copies from. ``cuda_ipc``: a data plane on this machine copies into the GPU's memory. ``exported``: a DPU writes
    into the GPU's memory, or where that cannot be exported, and for engines on CPUs, into the host's."""
    device: str = Field("", max_length=64)
    """This side's function of the DPU, to export memory on: PCI address or name; empty takes the first that can."""
    fetch_buffer_bytes: ByteSize = Field(ByteSize(512 * _MIB), ge=4096, le=_BUFFER_MAX)
    """Memory that fetched chunks arrive in, of each worker: the GPU's, where they are delivered to one (ShadowServe
    section 4.3: the DMA registration buffer), else the host's. Two batches share it: one arrives while the other is
    scattered. Raised to two chunks where it is smaller, lowered to 128 where it is larger. Records of engines of other
    numbers of ranks or stages arrive in memory of their own, as much again, once there is a hit of them."""
    reshaping_buffer_bytes: ByteSize = Field(ByteSize(512 * _MIB), ge=4096, le=_BUFFER_MAX)
    """Most memory of the GPU that chunks are reordered in between that buffer and paged memory. With Triton, one chunk
    of it is used, for those that are to be stored; without it, as much as a batch takes."""
    store_buffer_bytes: ByteSize = Field(ByteSize(256 * _MIB), ge=4096, le=_BUFFER_MAX)
    """The host's memory that chunks wait in to be stored, of each worker. A chunk that finds it full is not stored."""
    store_batch_chunks: int = Field(8, ge=1, le=1024)
    """At most so many chunks in one Store call."""
    recent_keys: int = Field(65536, ge=0)
    """Keys that a worker remembers as stored, so that it does not store them again."""
    breaker_failures: int = Field(3, ge=1)
    """After so many failures in a row the data plane is left alone for a while."""
    breaker_backoff_s: float = Field(0.25, gt=0, le=60)
    """First pause; each further failure doubles it."""
    breaker_backoff_max_s: float = Field(5.0, gt=0, le=600)
    """Longest pause; then one call probes the data plane again, forever."""
    identity_cache: str = ""
    """File that remembers the hashes of weights and adapters (docs/identity.md), so that a start reads none that have
    not changed; empty for ``shadowserve/content.json`` in the user's cache folder, ``none`` to hash every time."""
    interference_budget: float = Field(0.02, ge=0, le=1)
    """By which fraction a step that decodes may be longer beside KV that moves: 0.02 is 2 %. Data planes hold all that
    they move, for whichever engine, to a rate for it, which the engine learns from its steps (docs/interference.md).
    While nothing decodes there is no bound. 0: this engine sets none."""
    computing_cache: str = ""
    """File that remembers how long this engine computes and loads, and what fetching costs it, by model and machine;
    empty for ``shadowserve/computing.json`` in the user's cache folder, ``none`` to learn it anew at each start."""
    close_timeout_s: float = Field(5.0, ge=0, le=60)
    """At shutdown, waiting stores and running fetches get so long to end."""

    @field_validator("data_plane")
    @classmethod
    def _check_data_plane(cls, value: str) -> str:
        if not value.startswith(("unix:", "dns:")):
            split_address(value.replace("{rank}", "0"))
        return value

    @model_validator(mode="after")
    def _backoffs(self) -> Self:
        if self.breaker_backoff_s > self.breaker_backoff_max_s:
            raise ValueError("breaker_backoff_s is above breaker_backoff_max_s")
        return self

    @model_validator(mode="after")
    def _tls(self) -> Self:
        check_pair(self.tls_cert, self.tls_key)
        if (self.tls_cert or self.tls_server_name) and not self.tls_ca:
            raise ValueError("tls_cert or tls_server_name is given without tls_ca: there is no TLS without it")
        return self

    @model_validator(mode="after")
    def _scales(self) -> Self:
        if self.scale_tokens > self.chunk_tokens:
            raise ValueError("scale_tokens is above chunk_tokens")
        return self

    @model_validator(mode="after")
    def _pages(self) -> Self:
        if not self.pages:
            return self
        if self.quantizer == "binned":
            raise ValueError(
                "pages: true stores chunks as they are in paged memory, and quantizer: binned stores coarser values; "
                "remove one of them"
            )
        if not self.data_plane_is_local:
            raise ValueError(
                f"pages: true needs a data plane on this machine, and data_plane is {self.data_plane}; name it by a "
                "loopback address or unix:/path, or remove pages"
            )
        return self

    @classmethod
    def from_engine(cls, extra: Mapping[str, Any], place: str = "kv_connector_extra_config") -> Self:
        """Return the configuration, with what an engine's own configuration holds above environment and file.

        Args:
            extra: keys, plain or with the prefix ``shadowserve.``.
            place: where they are, for messages.

        Raises:
            ConfigurationError: an unknown key (the message names the nearest), a key given in both spellings with
                different values, a value that does not fit.
        """
        flags: dict[str, Any] = {}
        for spelled, value in extra.items():
            key = str(spelled).removeprefix(_DOTTED)
            if key in flags and flags[key] != value:
                raise ConfigurationError(f"{place} gives '{key}' twice, as {flags[key]!r} and as {value!r}; keep one")
            flags[key] = value
        return cls.load(flags=flags, flags_place=place)

    def client(self, rank: int, engine: pb.Engine | None = None) -> DataPlaneClient:
        """Return a client of the data plane that serves worker ``rank``, of ``engine`` if it moves KV.

        Raises:
            ConfigurationError: a certificate or key cannot be used.
        """
        return DataPlaneClient(
            self.data_plane_address(rank),
            credentials=self.credentials(),
            engine=engine,
            connect_timeout_s=self.connect_timeout_s,
            failures=self.breaker_failures,
            backoff=self.breaker_backoff_s,
            backoff_max_s=self.breaker_backoff_max_s,
        )

    def credentials(self) -> Credentials | None:
        """Return what this host brings to a TLS connection, ``None`` for no TLS."""
        if not self.tls_ca:
            return None
        return Credentials(
            authorities=self.tls_ca, certificate=self.tls_cert, key=self.tls_key, server_name=self.tls_server_name
        )

    @property
    def data_plane_is_local(self) -> bool:
        """Whether the data plane's address can only be on this machine."""
        if self.data_plane.startswith("unix:"):
            return True
        return is_loopback(self.data_plane.rpartition(":")[0].strip("[]"))

    def data_plane_address(self, rank: int) -> str:
        """Return the address of the data plane that serves worker ``rank``."""
        return self.data_plane.replace("{rank}", str(rank))
