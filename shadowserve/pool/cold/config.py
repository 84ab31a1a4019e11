"""Where the coldest tier lies, and what it may use."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from shadowserve.sizes import ByteSize


class S3Config(BaseModel):
    """A bucket below the pool: ``s3`` of the storage node. Credentials are found as docs/object-storage.md says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bucket: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")
    """Its name; it must be there."""
    prefix: str = Field("shadowserve", pattern=r"^[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*$")
    """What the names of all objects begin with; nodes that share it share what they hold."""
    endpoint: str = Field("", pattern=r"^(https?://.+)?$")
    """Where to connect to, such as ``https://minio.example:9000``; empty for AWS, or what AWS_ENDPOINT_URL says."""
    region: str = ""
    """The bucket's region; empty for what AWS_REGION says, or us-east-1."""
    path_style: bool = True
    """Whether the bucket's name stands in the path, as MinIO and Ceph have it; else in the host's name."""
    ca_file: Path | None = None
    """Certificates of authorities to trust beside the system's, PEM."""
    write: Literal["at_once", "evicted", "never"] = "at_once"
    """When records are written to the bucket: soon after they were stored, or when the node has no more room for them;
    never: it is only read."""
    object_bytes: ByteSize = Field(ByteSize(32 << 20), ge=1 << 20, le=64 << 20)
    """Bytes of neighbouring records that make an object; less where no more come within ``gather_s``."""
    gather_s: float = Field(2.0, ge=0.0, le=600.0)
    """How long records wait for more of their chain."""
    bytes_max: ByteSize | None = Field(None, ge=64 << 20)
    """Most bytes of all objects under the prefix; beyond it, the oldest go of the tenant that is beyond its share.
    None: for lifecycle rules."""
    index_ttl_s: float = Field(60.0, ge=0.1, le=86_400.0)
    """How often the bucket is listed, to hear of what other nodes have written or deleted."""
    list_timeout_s: float = Field(60.0, ge=0.1, le=3_600.0)
    """Longest that listing the whole bucket may take, so FLUSHALL, too; each thousand objects have ``timeout_s``."""
    chunks_max: int = Field(500_000, ge=1)
    """Most records in the bucket that this node knows of, each tenant's newest; each takes half a KiB of memory."""
    reads_at_once: int = Field(16, ge=1, le=256)
    """Ranges that are read at one time."""
    read_bytes_under_way_max: ByteSize = Field(ByteSize(128 << 20), ge=1 << 20)
    """Bytes of these. A record larger than that is neither written to the bucket nor read from it."""
    writes_at_once: int = Field(2, ge=1, le=16)
    """Objects that are made and written at one time, each with ``object_bytes`` of memory."""
    timeout_s: float = Field(5.0, ge=0.05, le=600.0)
    """Longest that a read may take, waiting included: then it is a miss. A write may take ten times as long."""
