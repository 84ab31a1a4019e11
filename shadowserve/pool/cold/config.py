"""Configuration of the bucket below a pool."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from shadowserve.sizes import ByteSize


class S3Config(BaseModel):
    """A bucket below the pool: ``s3`` of the storage node. Credentials: docs/guides/object-storage.md."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bucket: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", examples=["kv-cache"])
    """Name of an existing bucket."""
    prefix: str = Field("shadowserve", pattern=r"^[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*$", examples=["team/kv"])
    """Prefix of all objects' names. Nodes with the same bucket and prefix share their records."""
    endpoint: str = Field("", pattern=r"^(https?://.+)?$", examples=["https://minio.example:9000"])
    """URL of the server, such as ``https://minio.example:9000``; empty for AWS_ENDPOINT_URL, or AWS."""
    region: str = ""
    """The bucket's region; empty for AWS_REGION, or us-east-1."""
    path_style: bool = True
    """The bucket's name is in the path, as for MinIO and Ceph; false: in the host's name."""
    ca_file: Path | None = None
    """Certificates of additional trusted authorities, PEM."""
    write: Literal["at_once", "evicted", "never"] = "at_once"
    """When records are written to the bucket: soon after they are stored, when the node evicts them, or never."""
    object_bytes: ByteSize = Field(ByteSize(32 << 20), ge=1 << 20, le=64 << 20)
    """Bytes of consecutive records in one object; fewer if no more arrive within ``gather_s``."""
    gather_s: float = Field(2.0, ge=0.0, le=600.0)
    """Time that records wait for more of their chain."""
    bytes_max: ByteSize | None = Field(None, ge=64 << 20)
    """Most bytes of all objects under the prefix; beyond it, objects of the tenant beyond its share are deleted, least
    recently used first. None: lifecycle rules of the bucket delete objects."""
    index_ttl_s: float = Field(60.0, ge=0.1, le=86_400.0)
    """Interval between lists of the bucket, or of a fleet's news: of what other nodes have written."""
    list_timeout_s: float = Field(60.0, ge=0.1, le=3_600.0)
    """Longest time of a list of the whole bucket, and of FLUSHALL; each thousand objects have ``timeout_s``."""
    chunks_max: int = Field(4_000_000, ge=1)
    """Most records of the bucket that this node knows, the newest of each tenant; each takes 40 to 150 bytes."""
    reads_at_once: int = Field(16, ge=1, le=256)
    """Most ranges that are read at a time."""
    read_bytes_under_way_max: ByteSize = Field(ByteSize(128 << 20), ge=1 << 20)
    """Most bytes that are read at a time. A larger record is neither written to the bucket nor read from it."""
    writes_at_once: int = Field(2, ge=1, le=16)
    """Most objects that are written at a time, each with ``object_bytes`` of memory."""
    timeout_s: float = Field(5.0, ge=0.05, le=600.0)
    """Longest time of a read, queueing included; then it is a miss. A write may take ten times as long."""
