from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_COMPLETE: _ClassVar[Outcome]
    OUTCOME_BATCH_FULL: _ClassVar[Outcome]
    OUTCOME_ABSENT: _ClassVar[Outcome]
    OUTCOME_CORRUPT: _ClassVar[Outcome]
    OUTCOME_MISMATCH: _ClassVar[Outcome]
    OUTCOME_NOT_A_RECORD: _ClassVar[Outcome]
    OUTCOME_UNSUPPORTED_CODEC: _ClassVar[Outcome]
    OUTCOME_STORAGE_UNAVAILABLE: _ClassVar[Outcome]
    OUTCOME_STORAGE_REFUSED: _ClassVar[Outcome]
    OUTCOME_DEADLINE: _ClassVar[Outcome]
    OUTCOME_CANCELLED: _ClassVar[Outcome]
    OUTCOME_UNKNOWN_MEMORY: _ClassVar[Outcome]
    OUTCOME_NOT_STORABLE: _ClassVar[Outcome]
    OUTCOME_INTERNAL: _ClassVar[Outcome]
    OUTCOME_DEVICE: _ClassVar[Outcome]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_NONE: _ClassVar[Tier]
    TIER_MEMORY: _ClassVar[Tier]
    TIER_DEVICE: _ClassVar[Tier]
    TIER_STORAGE: _ClassVar[Tier]
    TIER_COLD: _ClassVar[Tier]

class Reach(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REACH_ALL: _ClassVar[Reach]
    REACH_DATA_PLANE: _ClassVar[Reach]
    REACH_NONE: _ClassVar[Reach]

class Order(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORDER_CHUNKS: _ClassVar[Order]
    ORDER_LAYERS: _ClassVar[Order]

class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PURPOSE_REQUEST: _ClassVar[Purpose]
    PURPOSE_PREEMPTION: _ClassVar[Purpose]
    PURPOSE_OFFLOADING_TIER: _ClassVar[Purpose]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_COMPLETE: Outcome
OUTCOME_BATCH_FULL: Outcome
OUTCOME_ABSENT: Outcome
OUTCOME_CORRUPT: Outcome
OUTCOME_MISMATCH: Outcome
OUTCOME_NOT_A_RECORD: Outcome
OUTCOME_UNSUPPORTED_CODEC: Outcome
OUTCOME_STORAGE_UNAVAILABLE: Outcome
OUTCOME_STORAGE_REFUSED: Outcome
OUTCOME_DEADLINE: Outcome
OUTCOME_CANCELLED: Outcome
OUTCOME_UNKNOWN_MEMORY: Outcome
OUTCOME_NOT_STORABLE: Outcome
OUTCOME_INTERNAL: Outcome
OUTCOME_DEVICE: Outcome
TIER_NONE: Tier
TIER_MEMORY: Tier
TIER_DEVICE: Tier
TIER_STORAGE: Tier
TIER_COLD: Tier
REACH_ALL: Reach
REACH_DATA_PLANE: Reach
REACH_NONE: Reach
ORDER_CHUNKS: Order
ORDER_LAYERS: Order
PURPOSE_REQUEST: Purpose
PURPOSE_PREEMPTION: Purpose
PURPOSE_OFFLOADING_TIER: Purpose

class ChunkLayout(_message.Message):
    __slots__ = ("namespace", "dtype", "layers", "kinds", "vector_length", "tokens", "quantizer", "bins", "value_bins", "scale_tokens")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    VECTOR_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUANTIZER_FIELD_NUMBER: _ClassVar[int]
    BINS_FIELD_NUMBER: _ClassVar[int]
    VALUE_BINS_FIELD_NUMBER: _ClassVar[int]
    SCALE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    dtype: str
    layers: int
    kinds: int
    vector_length: int
    tokens: int
    quantizer: str
    bins: int
    value_bins: int
    scale_tokens: int
    def __init__(self, namespace: _Optional[bytes] = ..., dtype: _Optional[str] = ..., layers: _Optional[int] = ..., kinds: _Optional[int] = ..., vector_length: _Optional[int] = ..., tokens: _Optional[int] = ..., quantizer: _Optional[str] = ..., bins: _Optional[int] = ..., value_bins: _Optional[int] = ..., scale_tokens: _Optional[int] = ...) -> None: ...

class Engine(_message.Message):
    __slots__ = ("model", "chunk_tokens", "quantizer", "process")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUANTIZER_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    model: bytes
    chunk_tokens: int
    quantizer: str
    process: str
    def __init__(self, model: _Optional[bytes] = ..., chunk_tokens: _Optional[int] = ..., quantizer: _Optional[str] = ..., process: _Optional[str] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("protocol_version", "version", "record_version", "key_schema", "host", "process", "layout", "chunk_bytes", "session", "engine")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RECORD_VERSION_FIELD_NUMBER: _ClassVar[int]
    KEY_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    version: str
    record_version: int
    key_schema: int
    host: str
    process: str
    layout: ChunkLayout
    chunk_bytes: int
    session: bytes
    engine: Engine
    def __init__(self, protocol_version: _Optional[int] = ..., version: _Optional[str] = ..., record_version: _Optional[int] = ..., key_schema: _Optional[int] = ..., host: _Optional[str] = ..., process: _Optional[str] = ..., layout: _Optional[_Union[ChunkLayout, _Mapping]] = ..., chunk_bytes: _Optional[int] = ..., session: _Optional[bytes] = ..., engine: _Optional[_Union[Engine, _Mapping]] = ...) -> None: ...

class HelloResponse(_message.Message):
    __slots__ = ("session", "protocol_version", "version", "backend", "emulated", "device", "memory_kinds", "page_devices", "differences")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    EMULATED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_KINDS_FIELD_NUMBER: _ClassVar[int]
    PAGE_DEVICES_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    protocol_version: int
    version: str
    backend: str
    emulated: bool
    device: str
    memory_kinds: _containers.RepeatedScalarFieldContainer[str]
    page_devices: bool
    differences: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session: _Optional[bytes] = ..., protocol_version: _Optional[int] = ..., version: _Optional[str] = ..., backend: _Optional[str] = ..., emulated: _Optional[bool] = ..., device: _Optional[str] = ..., memory_kinds: _Optional[_Iterable[str]] = ..., page_devices: _Optional[bool] = ..., differences: _Optional[_Iterable[str]] = ...) -> None: ...

class KeyChain(_message.Message):
    __slots__ = ("keys", "namespace")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    namespace: bytes
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., namespace: _Optional[bytes] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("chains", "timeout_ms", "published", "prefetch")
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    chains: _containers.RepeatedCompositeFieldContainer[KeyChain]
    timeout_ms: int
    published: bool
    prefetch: bool
    def __init__(self, chains: _Optional[_Iterable[_Union[KeyChain, _Mapping]]] = ..., timeout_ms: _Optional[int] = ..., published: _Optional[bool] = ..., prefetch: _Optional[bool] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("outcome", "detail", "present", "published", "cold_ms", "stored_bytes", "tiers")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    COLD_MS_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    detail: str
    present: _containers.RepeatedScalarFieldContainer[bytes]
    published: _containers.RepeatedScalarFieldContainer[bytes]
    cold_ms: _containers.RepeatedScalarFieldContainer[int]
    stored_bytes: _containers.RepeatedScalarFieldContainer[int]
    tiers: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., detail: _Optional[str] = ..., present: _Optional[_Iterable[bytes]] = ..., published: _Optional[_Iterable[bytes]] = ..., cold_ms: _Optional[_Iterable[int]] = ..., stored_bytes: _Optional[_Iterable[int]] = ..., tiers: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("keys", "lasts_ms", "timeout_ms", "plain")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LASTS_MS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    lasts_ms: int
    timeout_ms: int
    plain: bool
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., lasts_ms: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., plain: _Optional[bool] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("outcome", "detail", "reach")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    detail: str
    reach: Reach
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., detail: _Optional[str] = ..., reach: _Optional[_Union[Reach, str]] = ...) -> None: ...

class Arrival(_message.Message):
    __slots__ = ("request", "chains")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    request: int
    chains: _containers.RepeatedCompositeFieldContainer[KeyChain]
    def __init__(self, request: _Optional[int] = ..., chains: _Optional[_Iterable[_Union[KeyChain, _Mapping]]] = ...) -> None: ...

class ExpectRequest(_message.Message):
    __slots__ = ("queue", "number", "whole", "arrivals", "gone", "order", "begins_in_ms", "lasts_ms")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    ARRIVALS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    BEGINS_IN_MS_FIELD_NUMBER: _ClassVar[int]
    LASTS_MS_FIELD_NUMBER: _ClassVar[int]
    queue: bytes
    number: int
    whole: bool
    arrivals: _containers.RepeatedCompositeFieldContainer[Arrival]
    gone: _containers.RepeatedScalarFieldContainer[int]
    order: _containers.RepeatedScalarFieldContainer[int]
    begins_in_ms: _containers.RepeatedScalarFieldContainer[int]
    lasts_ms: int
    def __init__(self, queue: _Optional[bytes] = ..., number: _Optional[int] = ..., whole: _Optional[bool] = ..., arrivals: _Optional[_Iterable[_Union[Arrival, _Mapping]]] = ..., gone: _Optional[_Iterable[int]] = ..., order: _Optional[_Iterable[int]] = ..., begins_in_ms: _Optional[_Iterable[int]] = ..., lasts_ms: _Optional[int] = ...) -> None: ...

class ExpectResponse(_message.Message):
    __slots__ = ("again", "unused")
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    UNUSED_FIELD_NUMBER: _ClassVar[int]
    again: bool
    unused: bool
    def __init__(self, again: _Optional[bool] = ..., unused: _Optional[bool] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("engine", "decodes", "rate", "interference_budget", "lasts_ms", "pause_ms")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    DECODES_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    INTERFERENCE_BUDGET_FIELD_NUMBER: _ClassVar[int]
    LASTS_MS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    engine: bytes
    decodes: bool
    rate: int
    interference_budget: float
    lasts_ms: int
    pause_ms: int
    def __init__(self, engine: _Optional[bytes] = ..., decodes: _Optional[bool] = ..., rate: _Optional[int] = ..., interference_budget: _Optional[float] = ..., lasts_ms: _Optional[int] = ..., pause_ms: _Optional[int] = ...) -> None: ...

class StepAnswer(_message.Message):
    __slots__ = ("moved_bytes", "moving")
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    moved_bytes: int
    moving: bool
    def __init__(self, moved_bytes: _Optional[int] = ..., moving: _Optional[bool] = ...) -> None: ...

class RegisterMemoryRequest(_message.Message):
    __slots__ = ("layouts", "shared_memory", "exported_memory", "cuda_ipc", "pages")
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    EXPORTED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    layouts: _containers.RepeatedCompositeFieldContainer[ChunkLayout]
    shared_memory: SharedMemory
    exported_memory: ExportedMemory
    cuda_ipc: CudaIpcMemory
    pages: PagedMemory
    def __init__(self, layouts: _Optional[_Iterable[_Union[ChunkLayout, _Mapping]]] = ..., shared_memory: _Optional[_Union[SharedMemory, _Mapping]] = ..., exported_memory: _Optional[_Union[ExportedMemory, _Mapping]] = ..., cuda_ipc: _Optional[_Union[CudaIpcMemory, _Mapping]] = ..., pages: _Optional[_Union[PagedMemory, _Mapping]] = ...) -> None: ...

class PagedMemory(_message.Message):
    __slots__ = ("first", "stride", "blocks")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    first: _containers.RepeatedScalarFieldContainer[int]
    stride: int
    blocks: int
    def __init__(self, first: _Optional[_Iterable[int]] = ..., stride: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class SharedMemory(_message.Message):
    __slots__ = ("name", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class ExportedMemory(_message.Message):
    __slots__ = ("address", "size", "descriptor")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    address: int
    size: int
    descriptor: bytes
    def __init__(self, address: _Optional[int] = ..., size: _Optional[int] = ..., descriptor: _Optional[bytes] = ...) -> None: ...

class CudaIpcMemory(_message.Message):
    __slots__ = ("handle", "size", "device")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    size: int
    device: str
    def __init__(self, handle: _Optional[bytes] = ..., size: _Optional[int] = ..., device: _Optional[str] = ...) -> None: ...

class RegisterMemoryResponse(_message.Message):
    __slots__ = ("memory_id", "chunk_bytes")
    MEMORY_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    memory_id: int
    chunk_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, memory_id: _Optional[int] = ..., chunk_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseMemoryRequest(_message.Message):
    __slots__ = ("memory_id",)
    MEMORY_ID_FIELD_NUMBER: _ClassVar[int]
    memory_id: int
    def __init__(self, memory_id: _Optional[int] = ...) -> None: ...

class ReleaseMemoryResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchPart(_message.Message):
    __slots__ = ("memory_id", "offset", "length", "keys", "wanted", "layout")
    MEMORY_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    memory_id: int
    offset: int
    length: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    wanted: bytes
    layout: int
    def __init__(self, memory_id: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., wanted: _Optional[bytes] = ..., layout: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("job_id", "timeout_ms", "parts", "order", "progress", "window_us", "purpose")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_US_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    timeout_ms: int
    parts: _containers.RepeatedCompositeFieldContainer[FetchPart]
    order: Order
    progress: int
    window_us: int
    purpose: Purpose
    def __init__(self, job_id: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[FetchPart, _Mapping]]] = ..., order: _Optional[_Union[Order, str]] = ..., progress: _Optional[int] = ..., window_us: _Optional[int] = ..., purpose: _Optional[_Union[Purpose, str]] = ...) -> None: ...

class FetchPagesRequest(_message.Message):
    __slots__ = ("job_id", "memory_id", "keys", "blocks", "timeout_ms", "progress")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MEMORY_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    memory_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    timeout_ms: int
    progress: int
    def __init__(self, job_id: _Optional[str] = ..., memory_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., blocks: _Optional[_Iterable[int]] = ..., timeout_ms: _Optional[int] = ..., progress: _Optional[int] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("outcome", "detail", "fetched_bytes", "delivered_bytes", "delivered")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    detail: str
    fetched_bytes: int
    delivered_bytes: int
    delivered: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., detail: _Optional[str] = ..., fetched_bytes: _Optional[int] = ..., delivered_bytes: _Optional[int] = ..., delivered: _Optional[_Iterable[bytes]] = ...) -> None: ...

class FetchLayersResponse(_message.Message):
    __slots__ = ("layers", "answer")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    layers: int
    answer: FetchResponse
    def __init__(self, layers: _Optional[int] = ..., answer: _Optional[_Union[FetchResponse, _Mapping]] = ...) -> None: ...

class StoreRequest(_message.Message):
    __slots__ = ("job_id", "memory_id", "offset", "keys", "timeout_ms", "parents", "lasts_ms", "plain", "layout", "purpose")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MEMORY_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    LASTS_MS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    memory_id: int
    offset: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    timeout_ms: int
    parents: _containers.RepeatedScalarFieldContainer[bytes]
    lasts_ms: int
    plain: bool
    layout: int
    purpose: Purpose
    def __init__(self, job_id: _Optional[str] = ..., memory_id: _Optional[int] = ..., offset: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., timeout_ms: _Optional[int] = ..., parents: _Optional[_Iterable[bytes]] = ..., lasts_ms: _Optional[int] = ..., plain: _Optional[bool] = ..., layout: _Optional[int] = ..., purpose: _Optional[_Union[Purpose, str]] = ...) -> None: ...

class StoreResponse(_message.Message):
    __slots__ = ("outcome", "detail", "raw_bytes", "stored_bytes", "stored")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    detail: str
    raw_bytes: int
    stored_bytes: int
    stored: bytes
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., detail: _Optional[str] = ..., raw_bytes: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., stored: _Optional[bytes] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: _Optional[bool] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("timeout_ms", "fetches")
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    fetches: int
    def __init__(self, timeout_ms: _Optional[int] = ..., fetches: _Optional[int] = ...) -> None: ...

class TraceSpan(_message.Message):
    __slots__ = ("step", "thread", "core", "begin_ns", "end_ns", "batch", "piece", "slice", "input_bytes", "output_bytes", "decision")
    STEP_FIELD_NUMBER: _ClassVar[int]
    THREAD_FIELD_NUMBER: _ClassVar[int]
    CORE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    INPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    step: str
    thread: int
    core: int
    begin_ns: int
    end_ns: int
    batch: int
    piece: int
    slice: int
    input_bytes: int
    output_bytes: int
    decision: Decision
    def __init__(self, step: _Optional[str] = ..., thread: _Optional[int] = ..., core: _Optional[int] = ..., begin_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., batch: _Optional[int] = ..., piece: _Optional[int] = ..., slice: _Optional[int] = ..., input_bytes: _Optional[int] = ..., output_bytes: _Optional[int] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("kind", "tokens", "loaded_tokens", "predicted", "predicted_seconds", "seconds", "stored_bytes", "cold_seconds", "queued_seconds", "tier_bytes")
    class PredictedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TierBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COLD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIER_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    tokens: int
    loaded_tokens: int
    predicted: _containers.ScalarMap[str, float]
    predicted_seconds: float
    seconds: float
    stored_bytes: int
    cold_seconds: float
    queued_seconds: float
    tier_bytes: _containers.ScalarMap[str, int]
    def __init__(self, kind: _Optional[str] = ..., tokens: _Optional[int] = ..., loaded_tokens: _Optional[int] = ..., predicted: _Optional[_Mapping[str, float]] = ..., predicted_seconds: _Optional[float] = ..., seconds: _Optional[float] = ..., stored_bytes: _Optional[int] = ..., cold_seconds: _Optional[float] = ..., queued_seconds: _Optional[float] = ..., tier_bytes: _Optional[_Mapping[str, int]] = ...) -> None: ...

class DecidedResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TraceResponse(_message.Message):
    __slots__ = ("spans", "dropped")
    SPANS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedCompositeFieldContainer[TraceSpan]
    dropped: int
    def __init__(self, spans: _Optional[_Iterable[_Union[TraceSpan, _Mapping]]] = ..., dropped: _Optional[int] = ...) -> None: ...

class StatisticsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StageStatistics(_message.Message):
    __slots__ = ("stage", "items", "input_bytes", "output_bytes", "busy_ns")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    INPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUSY_NS_FIELD_NUMBER: _ClassVar[int]
    stage: str
    items: int
    input_bytes: int
    output_bytes: int
    busy_ns: int
    def __init__(self, stage: _Optional[str] = ..., items: _Optional[int] = ..., input_bytes: _Optional[int] = ..., output_bytes: _Optional[int] = ..., busy_ns: _Optional[int] = ...) -> None: ...

class StatisticsResponse(_message.Message):
    __slots__ = ("version", "backend", "batches", "registrations", "buffer_bytes", "resident_bytes", "stages", "fetch_outcomes", "store_outcomes", "fetched_bytes", "delivered_bytes", "stored_raw_bytes", "stored_bytes", "engines", "lookup_keys", "lookup_hits", "storage", "storage_connected", "up_seconds")
    class FetchOutcomesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class StoreOutcomesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    REGISTRATIONS_FIELD_NUMBER: _ClassVar[int]
    BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    FETCH_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    STORE_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_KEYS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_HITS_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    UP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    version: str
    backend: str
    batches: int
    registrations: int
    buffer_bytes: int
    resident_bytes: int
    stages: _containers.RepeatedCompositeFieldContainer[StageStatistics]
    fetch_outcomes: _containers.ScalarMap[str, int]
    store_outcomes: _containers.ScalarMap[str, int]
    fetched_bytes: int
    delivered_bytes: int
    stored_raw_bytes: int
    stored_bytes: int
    engines: _containers.RepeatedCompositeFieldContainer[Engine]
    lookup_keys: int
    lookup_hits: int
    storage: str
    storage_connected: bool
    up_seconds: float
    def __init__(self, version: _Optional[str] = ..., backend: _Optional[str] = ..., batches: _Optional[int] = ..., registrations: _Optional[int] = ..., buffer_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[StageStatistics, _Mapping]]] = ..., fetch_outcomes: _Optional[_Mapping[str, int]] = ..., store_outcomes: _Optional[_Mapping[str, int]] = ..., fetched_bytes: _Optional[int] = ..., delivered_bytes: _Optional[int] = ..., stored_raw_bytes: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., engines: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ..., lookup_keys: _Optional[int] = ..., lookup_hits: _Optional[int] = ..., storage: _Optional[str] = ..., storage_connected: _Optional[bool] = ..., up_seconds: _Optional[float] = ...) -> None: ...
