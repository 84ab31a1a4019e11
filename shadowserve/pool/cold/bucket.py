"""A bucket, as the tier above it needs it: whole objects written once, ranges read, each call within its time."""

import configparser
import logging
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shadowserve.errors import ConfigurationError, NotInstalledError, ShadowServeError
from shadowserve.pool.cold.config import S3Config

if TYPE_CHECKING:
    from obstore.store import S3Store

__all__ = ["Bucket", "BucketError", "Listed"]

_log = logging.getLogger(__name__)

_RETRIES: Final = 1
"""Of one request within its time: a connection that the other side has just closed costs no miss."""
_WRITE_TIMES: Final = 10
_CREDENTIALS_LAST: Final = timedelta(minutes=1)
"""How long credentials from a file are used before it is read again: whoever renews them writes it."""
_REASONS: Final = (
    # the first that the error's text has; object_store gives types to few of them
    ("no_bucket", ("NoSuchBucket",)),
    ("absent", ("NoSuchKey", "404 Not Found")),
    ("full", ("507 ", "QuotaExceeded", "InsufficientStorage")),
    ("denied", ("403 Forbidden", "401 Unauthorized", "ExpiredToken", "InvalidAccessKeyId")),
    ("busy", ("SlowDown", "503 Service", "429 Too Many")),
    ("timeout", ("TimedOut", "timed out")),
    ("redirected", ("redirect", "301 Moved", "307 Temporary")),
    ("damaged", ("Range Not Satisfiable", "non-partial", "Content-Range", "range", "body")),
    ("unreachable", ("error sending request", "dns error")),
)


class BucketError(ShadowServeError):
    """An operation on a bucket failed.

    Attributes:
        reason: no_bucket, absent, full, denied, busy, timeout, redirected, damaged, unreachable or other.
    """

    def __init__(self, operation: str, what: str, error: Exception) -> None:
        text = str(error)
        self.reason = next((reason for reason, signs in _REASONS if any(sign in text for sign in signs)), "other")
        text = text.partition("Debug source:")[0]  # what follows is the client's own structures
        super().__init__(f"cannot {operation} {what}: {' '.join(text.split())[:400]}")


class Listed(NamedTuple):
    """An object that the bucket has: its name behind the prefix, its bytes, and when it was written (Unix time)."""

    name: str
    size: int
    written_s: float


class Bucket:
    """One prefix of one bucket. All methods wait, and may be called by any number of threads.

    Every method raises :class:`BucketError`.
    """

    def __init__(self, config: S3Config) -> None:
        """Read credentials and certificates; nothing is connected to yet.

        Raises:
            ConfigurationError: a file cannot be read, or a setting not be used.
            NotInstalledError: obstore is not there.
        """
        try:
            import obstore  # noqa: PLC0415  what has no bucket needs no client
        except ImportError as error:
            raise NotInstalledError("s3 needs the package obstore", "pip install obstore") from error
        self._obstore = obstore
        self._what = f"s3://{config.bucket}/{config.prefix}"
        self._reads = _store(config, config.timeout_s)
        self._writes = _store(config, _WRITE_TIMES * config.timeout_s)

    def _call(self, operation: str, name: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:  # the client has exceptions of its own, OSError and ValueError
            raise BucketError(operation, f"{self._what}/{name}", error) from error

    def list(self) -> Iterator[Listed]:
        """Yield all objects under the prefix, some requests later each thousand."""
        pages = self._call("list", "", lambda: iter(self._obstore.list(self._reads)))
        while (page := self._call("list", "", lambda: next(pages, None))) is not None:
            for found in page:
                yield Listed(str(found["path"]), int(found["size"]), found["last_modified"].timestamp())

    def read(self, name: str, start: int, end: int) -> memoryview:
        """Return the bytes ``[start, end)`` of an object."""

        def read() -> memoryview:
            found = memoryview(self._obstore.get_range(self._reads, name, start=start, end=end))
            if len(found) != end - start:
                raise ValueError(f"a body of {len(found)} bytes for a range of {end - start}")
            return found

        found: memoryview = self._call("read", name, read)
        return found

    def create(self, name: str, data: bytes | bytearray) -> bool:
        """Write an object unless there is one of that name; return whether this has."""

        def create() -> bool:
            try:
                self._obstore.put(self._writes, name, data, mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError:
                return False
            return True

        return bool(self._call("write", name, create))

    def delete(self, name: str) -> None:
        """Delete an object; one that is not there is none the less gone."""
        try:
            self._call("delete", name, lambda: self._obstore.delete(self._reads, name))
        except BucketError as error:
            if error.reason != "absent":
                raise


def _store(config: S3Config, timeout_s: float) -> "S3Store":
    from obstore.store import S3Store  # noqa: PLC0415

    timeout = timedelta(seconds=timeout_s)
    client: Any = {"timeout": timeout, "connect_timeout": min(timeout, timedelta(seconds=2))}
    client["allow_http"] = config.endpoint.startswith("http://")
    keys: dict[str, Any] = {"virtual_hosted_style_request": not config.path_style, "conditional_put": "etag"}
    keys["disable_bulk_delete"] = True  # what deletes many at a time differs from store to store
    if config.endpoint:
        keys["endpoint"] = config.endpoint
    if config.region:
        keys["region"] = config.region
    if config.ca_file is not None:
        try:
            client["root_certificate"] = config.ca_file.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"s3.ca_file: cannot read {config.ca_file}: {error}; name a PEM file") from error
    if (provider := _file_credentials()) is not None:
        keys["credential_provider"] = provider
    backoff = {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1)}
    retries: Any = {"max_retries": _RETRIES, "retry_timeout": timeout, "backoff": backoff}
    try:
        return S3Store(config.bucket, prefix=config.prefix, client_options=client, retry_config=retries, **keys)
    except Exception as error:
        raise ConfigurationError(f"s3: the client cannot be made of these settings: {error}") from error


def _file_credentials() -> Callable[[], Any] | None:
    """Return what reads AWS' credentials file; None where the environment says more, or there is no such file.

    The client itself knows the environment, web identities, containers' and instances' roles, but not this file.
    """
    if {"AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"} & os.environ.keys():
        return None
    path = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials")
    profile = os.environ.get("AWS_PROFILE", "default")
    if not path.is_file():
        return None

    def read() -> dict[str, Any]:
        parser = configparser.RawConfigParser()
        parser.read_string(path.read_text(encoding="utf-8"))
        keys = parser[profile]
        return {
            "access_key_id": keys["aws_access_key_id"],
            "secret_access_key": keys["aws_secret_access_key"],
            "token": keys.get("aws_session_token"),
            "expires_at": datetime.now(UTC) + _CREDENTIALS_LAST,
        }

    try:
        read()
    except (OSError, KeyError, configparser.Error) as error:
        raise ConfigurationError(
            f"s3: {path} has no credentials of profile {profile!r}: {type(error).__name__} {error}; "
            "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from None
    return read
