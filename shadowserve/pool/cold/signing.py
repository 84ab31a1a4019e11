"""Signatures of requests to S3 and its kin: AWS Signature Version 4, in headers."""

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from math import inf
from typing import Final, NamedTuple
from urllib.parse import quote

EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest()
_ALGORITHM: Final = "AWS4-HMAC-SHA256"


class Credentials(NamedTuple):
    """Credentials for signing requests. ``expires_s``: Unix time."""

    key_id: str
    secret: str
    token: str = ""
    expires_s: float = inf


def encoded_path(path: str) -> str:
    """Return a path as it is sent and signed."""
    return quote(path, safe="/-_.~")


def encoded_query(query: Mapping[str, str]) -> str:
    """Return a query as it is sent and signed."""
    pairs = ((quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in query.items())
    return "&".join(f"{name}={value}" for name, value in sorted(pairs))


def signed_headers(
    method: str,
    host: str,
    path: str,
    query: str,
    credentials: Credentials,
    region: str,
    *,
    body_sha256: str = EMPTY_SHA256,
    service: str = "s3",
    now: datetime | None = None,
) -> dict[str, str]:
    """Return the headers that sign a request. ``host``: as the ``Host`` header has it; path and query are encoded."""
    time_text = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    date = time_text[:8]
    headers = {"host": host, "x-amz-content-sha256": body_sha256, "x-amz-date": time_text}
    if credentials.token:
        headers["x-amz-security-token"] = credentials.token
    names = ";".join(headers)  # they are in order
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    canonical = "\n".join((method, path, query, lines, names, body_sha256))
    scope = f"{date}/{region}/{service}/aws4_request"
    to_sign = "\n".join((_ALGORITHM, time_text, scope, hashlib.sha256(canonical.encode()).hexdigest()))
    key = f"AWS4{credentials.secret}".encode()
    for part in (date, region, service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    del headers["host"]
    credential = f"Credential={credentials.key_id}/{scope}"
    headers["authorization"] = f"{_ALGORITHM} {credential},SignedHeaders={names},Signature={signature}"
    return headers
