"""Credentials for a bucket, from the sources in docs/guides/object-storage.md; expiring ones are renewed. Signatures
of requests: AWS Signature Version 4, in headers.
"""

import configparser
import hashlib
import hmac
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http.client import HTTPException
from math import inf
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from shadowserve.errors import ConfigurationError, ShadowServeError
from shadowserve.pool.cold.http import HttpClient, OversizeError

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
    scope = f"{date}/{region}/s3/aws4_request"
    to_sign = "\n".join((_ALGORITHM, time_text, scope, hashlib.sha256(canonical.encode()).hexdigest()))
    key = f"AWS4{credentials.secret}".encode()
    for part in (date, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    del headers["host"]
    credential = f"Credential={credentials.key_id}/{scope}"
    headers["authorization"] = f"{_ALGORITHM} {credential},SignedHeaders={names},Signature={signature}"
    return headers


_FILE_S: Final = 60.0
"""Time until the credentials of a file are read again."""
_RENEWED_S: Final = 300.0
"""Credentials are renewed this long before they expire."""
_RETRY_S: Final = 1.0
_ANSWER_BYTES_MAX: Final = 64 << 10
_INSTANCE_TIMEOUT_S: Final = 2.0
_HOW: Final = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the node's environment, or write ~/.aws/credentials "
    "(docs/guides/object-storage.md, Credentials)"
)


class CredentialError(ShadowServeError):
    """There are no credentials, or they cannot be renewed."""


class CredentialSource:
    """The credentials of this process. get() may be called by any number of threads."""

    def __init__(self, what: str, region: str, *, is_aws: bool) -> None:
        """Choose the source.

        Args:
            what: The bucket, for error messages.
            region: Region of the STS that serves web identities.
            is_aws: The bucket is AWS' own: only there an instance's role is useful.

        Raises:
            ConfigurationError: There are none, or a file that should have them does not.
        """
        self._what = what
        self._region = region
        self._lock = threading.Lock()
        self._found: Credentials | None = None
        self._error: CredentialError | None = None
        self._tried_s = float("-inf")
        self._read = self._choose(os.environ, is_aws=is_aws)

    def _choose(self, environment: Mapping[str, str], *, is_aws: bool) -> Callable[[], Credentials]:
        if (key_id := environment.get("AWS_ACCESS_KEY_ID")) is not None:
            secret = environment.get("AWS_SECRET_ACCESS_KEY", "")
            if not key_id or not secret:
                raise ConfigurationError(f"{self._what}: AWS_ACCESS_KEY_ID is set without AWS_SECRET_ACCESS_KEY")
            found = Credentials(key_id, secret, environment.get("AWS_SESSION_TOKEN", ""))
            return lambda: found
        if "AWS_WEB_IDENTITY_TOKEN_FILE" in environment:
            if "AWS_ROLE_ARN" not in environment:
                raise ConfigurationError(f"{self._what}: AWS_WEB_IDENTITY_TOKEN_FILE is set without AWS_ROLE_ARN")
            return self._of_web_identity
        path = Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials")
        if path.is_file():
            profile = environment.get("AWS_PROFILE", "default")
            try:
                _of_file(path, profile)
            except CredentialError as error:
                raise ConfigurationError(f"{self._what}: {error}") from None
            return lambda: _of_file(path, profile)
        if {"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"} & environment.keys():
            return _of_container
        if not is_aws or environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
            raise ConfigurationError(f"{self._what}: no credentials: {_HOW}")
        return _of_instance

    def get(self) -> Credentials:
        """Return valid credentials; CredentialError if there are none."""
        with self._lock:
            found, now_s = self._found, time.time()
            if found is not None and now_s < found.expires_s - _RENEWED_S:
                return found
            if time.monotonic() - self._tried_s >= _RETRY_S or (found is None and self._error is None):
                self._renew()
            if self._found is not None and now_s < self._found.expires_s:
                return self._found
            raise self._error or CredentialError(f"{self._what}: the credentials have expired, and there are no others")

    def _renew(self) -> None:
        self._tried_s = time.monotonic()
        try:
            self._found, self._error = self._read(), None
        except CredentialError as error:
            self._error = error
        except (OSError, HTTPException, OversizeError, ConfigurationError, ValueError, KeyError) as error:
            self._error = CredentialError(f"no credentials: {type(error).__name__} {error}")

    def _of_web_identity(self) -> Credentials:
        token = Path(os.environ["AWS_WEB_IDENTITY_TOKEN_FILE"]).read_text(encoding="ascii").strip()
        session = os.environ.get("AWS_ROLE_SESSION_NAME", "shadowserve")
        fields = {"Action": "AssumeRoleWithWebIdentity", "Version": "2011-06-15", "WebIdentityToken": token}
        fields |= {"RoleArn": os.environ["AWS_ROLE_ARN"], "RoleSessionName": session}
        url = os.environ.get("AWS_ENDPOINT_URL_STS") or f"https://sts.{self._region}.amazonaws.com"
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        text = _ask("POST", url, "/", headers, urlencode(fields).encode()).decode("utf-8", "replace")

        def field(name: str) -> str:
            match = re.search(rf"<{name}>([^<]+)</{name}>", text)
            if match is None:
                raise CredentialError(f"no credentials: the answer of {url} has no {name}")
            return match[1]

        ends_s = _unix_time(field("Expiration"))
        return Credentials(field("AccessKeyId"), field("SecretAccessKey"), field("SessionToken"), ends_s)


def _cause(error: Exception) -> str:
    """Return why a file of credentials cannot be used; the parser's own texts quote lines, which may hold a secret."""
    if isinstance(error, KeyError):
        return f"it lacks {error.args[0]}"
    if isinstance(error, configparser.MissingSectionHeaderError):
        return f"line {error.lineno} is not below a [profile]"
    if isinstance(error, configparser.ParsingError):
        return f"line {error.errors[0][0]} is not written as key = value"
    return str(error)


def _of_file(path: Path, profile: str) -> Credentials:
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
        keys = parser[profile]
        key_id, secret = keys["aws_access_key_id"], keys["aws_secret_access_key"]
    except (OSError, ValueError, KeyError, configparser.Error) as error:
        raise CredentialError(
            f"{path} has no credentials of profile {profile!r}: {_cause(error)}; correct it, or set AWS_PROFILE, or "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from None
    return Credentials(key_id, secret, keys.get("aws_session_token", ""), time.time() + _RENEWED_S + _FILE_S)


def _of_container() -> Credentials:
    headers = {}
    relative = os.environ.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    url = f"http://169.254.170.2{relative}" if relative else os.environ["AWS_CONTAINER_CREDENTIALS_FULL_URI"]
    token = os.environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN", "")
    if file := os.environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"):
        token = Path(file).read_text(encoding="ascii").strip()
    if token:
        headers["Authorization"] = token
    parts = urlsplit(url)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    return _of_json(_ask("GET", f"{parts.scheme}://{parts.netloc}", target, headers))


def _of_instance() -> Credentials:
    url = os.environ.get("AWS_METADATA_ENDPOINT") or "http://169.254.169.254"
    where = "/latest/meta-data/iam/security-credentials/"
    try:
        lasts = {"X-aws-ec2-metadata-token-ttl-seconds": "300"}
        token = {"X-aws-ec2-metadata-token": _ask("PUT", url, "/latest/api/token", lasts).decode("ascii")}
        role = _ask("GET", url, where, token).decode("ascii").splitlines()[0]
        return _of_json(_ask("GET", url, where + role, token))
    except (OSError, HTTPException, ShadowServeError, ValueError, IndexError) as error:
        raise CredentialError(f"no credentials: {_HOW}; the machine has no role of an instance: {error}") from None


def _of_json(data: bytes) -> Credentials:
    found = json.loads(data)
    if not isinstance(found, dict):
        raise CredentialError("no credentials: the answer is no JSON object")
    key_id, secret, token = str(found["AccessKeyId"]), str(found["SecretAccessKey"]), str(found.get("Token", ""))
    return Credentials(key_id, secret, token, _unix_time(str(found["Expiration"])))


def _unix_time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _ask(method: str, url: str, target: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    client = HttpClient(url)
    deadline_s = time.monotonic() + _INSTANCE_TIMEOUT_S
    try:
        answer = client.request(method, target, headers, body, deadline_s=deadline_s, bytes_max=_ANSWER_BYTES_MAX)
    finally:
        client.close()
    if answer.status != 200:  # noqa: PLR2004  HTTP's OK
        raise CredentialError(f"no credentials: {url} answers {answer.status}")
    return bytes(answer.body)
