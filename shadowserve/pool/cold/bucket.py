"""A bucket: objects are written once as a whole, and read by ranges; each call has a deadline.

No answer takes more memory than the requested range, a list takes one page at a time, and a redirect is an error:
credentials go to the endpoint alone.
"""

import hashlib
import html
import os
import re
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from http.client import HTTPException, IncompleteRead
from typing import Final, NamedTuple
from urllib.parse import unquote_plus, urlsplit

from shadowserve.errors import ShadowServeError
from shadowserve.pool.cold.config import S3Config
from shadowserve.pool.cold.credentials import (
    EMPTY_SHA256,
    CredentialError,
    CredentialSource,
    encoded_path,
    encoded_query,
    signed_headers,
)
from shadowserve.pool.cold.http import Answer, HttpClient, OversizeError, tls_context

PAGE_BYTES_MAX: Final = 8 << 20
"""Most bytes of a list's page: 1,000 names of 1,024 bytes, three characters for each byte, and S3's other fields."""
_PAGE_KEYS: Final = 1_000
_TRIES: Final = 2
_PAUSE_S: Final = 0.05
_WRITE_TIMES: Final = 10
_AGAIN: Final = frozenset({429, 500, 502, 503, 504})
_TEXT_MAX: Final = 400
_CODES: Final = {
    "NoSuchBucket": "no_bucket",
    "NoSuchKey": "absent",
    "QuotaExceeded": "full",
    "InsufficientStorage": "full",
    "ExpiredToken": "denied",
    "InvalidAccessKeyId": "denied",
    "InvalidToken": "denied",
    "SlowDown": "busy",
}
"""Reasons for S3's error codes that the status alone does not tell."""
_OF_LISTS: Final = {"absent": "no_bucket", "damaged": "bad_list"}
_STATUSES: Final = {401: "denied", 403: "denied", 404: "absent", 409: "busy", 416: "damaged", 429: "busy", 503: "busy",
                    507: "full"}  # fmt: skip


class BucketError(ShadowServeError):
    """An operation on a bucket has failed.

    Attributes:
        reason: no_bucket, bad_list, absent, full, denied, busy, timeout, redirected, damaged, unreachable or other.
            ``absent`` and ``damaged`` concern one object only.
    """

    def __init__(self, operation: str, what: str, reason: str, text: object) -> None:
        self.reason = _OF_LISTS.get(reason, reason) if operation == "list" else reason
        super().__init__(f"cannot {operation} {what}: {' '.join(str(text).split())[:_TEXT_MAX]}")


class Listed(NamedTuple):
    """An object of the bucket: name without the prefix, bytes, and Unix time when it was written."""

    name: str
    size: int
    written_s: float


class Bucket:
    """One prefix of one bucket. All methods wait, raise :class:`BucketError`, and may be called by any thread."""

    def __init__(self, config: S3Config) -> None:
        """Read credentials and certificates, without connecting; ConfigurationError if that is not possible."""
        self._config = config
        self._what = f"s3://{config.bucket}/{config.prefix}"
        region = config.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        endpoint = config.endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        endpoint = endpoint or f"https://s3.{region}.amazonaws.com"
        url = urlsplit(endpoint)
        if not config.path_style and (url.hostname or "") and not (url.hostname or "").startswith(f"{config.bucket}."):
            url = url._replace(netloc=f"{config.bucket}.{url.netloc}")
        self._region = region
        self._client = HttpClient(url.geturl(), tls_context(config.ca_file) if url.scheme == "https" else None)
        self._root = url.path.rstrip("/") + (f"/{config.bucket}" if config.path_style else "")
        is_aws = bool(re.search(r"\.amazonaws\.com(\.cn)?$", url.hostname or ""))
        self._credentials = CredentialSource(f"s3: {self._what}", region, is_aws=is_aws)

    def close(self) -> None:
        """Close connections; those in use are closed after their answer."""
        self._client.close()

    def list(self, folder: str = "") -> Iterator[Listed]:
        """Yield all objects under the prefix, or those whose names begin with ``folder``; fails after
        ``list_timeout_s``."""
        prefix = f"{self._config.prefix}/{folder}"
        ends_s, token = time.monotonic() + self._config.list_timeout_s, ""
        while True:
            query = {"list-type": "2", "prefix": prefix, "max-keys": str(_PAGE_KEYS), "encoding-type": "url"}
            if token:
                query["continuation-token"] = token
            try:
                answer = self._call("list", "", "GET", query, bytes_max=PAGE_BYTES_MAX, ends_s=ends_s)
            except BucketError as error:
                if error.reason != "timeout" or time.monotonic() < ends_s:
                    raise
                text = f"no end after list_timeout_s, {self._config.list_timeout_s:g} s"
                raise BucketError("list", self._what, "bad_list", text) from error
            try:
                found, more = _parse_page(answer.body.decode("utf-8", "replace"), f"{self._config.prefix}/")
            except (ValueError, OverflowError) as error:
                raise BucketError("list", self._what, "damaged", error) from None
            yield from found
            if not more:
                return
            if more == token:
                raise BucketError("list", self._what, "damaged", "a page names itself as the next one")
            token = more

    def read(self, name: str, start: int, end: int) -> memoryview:
        size = end - start
        wanted = {"Range": f"bytes={start}-{end - 1}"}
        answer = self._call("read", name, "GET", headers=wanted, bytes_max=size, length=size)
        returned = answer.headers.get("content-range", "")
        if answer.status != 206 or not returned.startswith(f"bytes {start}-{end - 1}/"):  # noqa: PLR2004  Partial Content
            raise BucketError("read", f"{self._what}/{name}", "damaged", f"{answer.status} {returned!r} for a range")
        return memoryview(answer.body)

    def create(self, name: str, data: bytes | bytearray) -> bool:
        """Write an object unless one of that name exists; return whether it was written."""
        headers = {"If-None-Match": "*", "Content-Type": "application/octet-stream"}
        answer = self._call("write", name, "PUT", headers=headers, body=data, expected=(412,))
        return answer.status != 412  # noqa: PLR2004  Precondition Failed

    def delete(self, name: str) -> None:
        """Delete an object, which may be absent."""
        try:
            self._call("delete", name, "DELETE")
        except BucketError as error:
            if error.reason != "absent":
                raise

    def _call(
        self,
        operation: str,
        name: str,
        method: str,
        query: Mapping[str, str] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | bytearray = b"",
        bytes_max: int = 1 << 16,
        length: int | None = None,
        ends_s: float | None = None,
        expected: tuple[int, ...] = (),
    ) -> Answer:
        config, what = self._config, f"{self._what}/{name}"
        timeout_s = config.timeout_s * (_WRITE_TIMES if method == "PUT" else 1)
        deadline_s = min(time.monotonic() + timeout_s, ends_s or float("inf"))
        path = encoded_path(f"{self._root}/{config.prefix}/{name}" if name else self._root or "/")
        text = encoded_query(query or {})
        digest = hashlib.sha256(body).hexdigest() if body else EMPTY_SHA256
        for tries_left in reversed(range(_TRIES)):
            try:
                signed = signed_headers(
                    method, self._client.host, path, text, self._credentials.get(), self._region, body_sha256=digest
                )
                answer = self._client.request(
                    method,
                    f"{path}?{text}" if text else path,
                    {**(headers or {}), **signed},
                    body,
                    deadline_s=deadline_s,
                    bytes_max=bytes_max,
                    length=length,
                )
            except CredentialError as error:
                raise BucketError(operation, what, "denied", error) from None
            except TimeoutError as error:
                raise BucketError(operation, what, "timeout", error) from error
            except (OversizeError, IncompleteRead) as error:
                raise BucketError(operation, what, "damaged", error) from error
            except (OSError, HTTPException) as error:
                failure = BucketError(operation, what, "unreachable", f"{type(error).__name__} {error}")
                is_passing = True
            else:
                if answer.status < 300 or answer.status in expected:  # noqa: PLR2004  the first of redirects
                    return answer
                failure, is_passing = _refusal(operation, what, answer), answer.status in _AGAIN
            if not tries_left or not is_passing or time.monotonic() + _PAUSE_S >= deadline_s:
                raise failure
            time.sleep(_PAUSE_S)
        raise AssertionError("the last try raises")


def _refusal(operation: str, what: str, answer: Answer) -> BucketError:
    text = answer.body.decode("utf-8", "replace")
    match = re.search(r"<Code>([^<]{1,100})</Code>", text)
    code = "" if match is None else match[1]
    reason = _CODES.get(code) or _STATUSES.get(answer.status, "other")
    if 300 <= answer.status < 400:  # noqa: PLR2004  redirects
        reason = "redirected"
    message = re.search(r"<Message>([^<]*)</Message>", text)
    return BucketError(operation, what, reason, f"{answer.status} {code} {'' if message is None else message[1]}")


_FIELDS: Final = tuple(re.compile(rf"<{name}>([^<]*)</{name}>") for name in ("Key", "Size", "LastModified"))
_TRUNCATED: Final = re.compile(r"<IsTruncated>\s*true\s*</IsTruncated>")
_NEXT: Final = re.compile(r"<NextContinuationToken>([^<]*)</NextContinuationToken>")
_ENCODED: Final = re.compile(r"<EncodingType>\s*url\s*</EncodingType>")


def _parse_page(text: str, prefix: str) -> tuple[list[Listed], str]:
    """Return the objects of a list's page, and the token of the next page, empty at the end; ValueError: it is none.

    Reads elements without an XML parser, since names may have characters that XML does not allow. An unreadable name
    costs only its object, which ShadowServe has not written: its own names are letters, digits and four signs.
    """
    if "<ListBucketResult" not in text:
        raise ValueError("the answer is no list")
    is_encoded, found = _ENCODED.search(text) is not None, []
    objects = text.split("<Contents>", _PAGE_KEYS + 1)[1:]
    if len(objects) > _PAGE_KEYS:
        raise ValueError(f"a page of more than the {_PAGE_KEYS} requested objects")
    for each in objects:
        fields = [pattern.search(each.partition("</Contents>")[0]) for pattern in _FIELDS]
        key, size, written = ("" if field is None else html.unescape(field[1]) for field in fields)
        if not key or not size.isdigit() or not written:
            raise ValueError("an object without Key, Size or LastModified")
        name = unquote_plus(key) if is_encoded else key
        if not name.startswith(prefix):
            raise ValueError("an object that is not under the prefix")
        found.append(Listed(name.removeprefix(prefix), int(size), datetime.fromisoformat(written).timestamp()))
    if _TRUNCATED.search(text) is None:
        return found, ""
    following = _NEXT.search(text)
    if following is None or not following[1]:
        raise ValueError("a page that is not the last one does not name the next one")
    return found, html.unescape(following[1])
