"""The S3 client: signatures, credentials of each source, and wrong or endless answers."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import psutil
import pytest
from cold_support import MIB, s3_config
from faulty_s3 import Answer, FaultyS3, faulty_s3
from machine import http_server

from shadowserve.errors import ConfigurationError
from shadowserve.pool.cold.bucket import PAGE_BYTES_MAX, Bucket, BucketError
from shadowserve.pool.cold.credentials import Credentials, signed_headers

NAME = "000/t/" + 40 * "0" + ".kv"
PREFIX = "shadowserve/"
RSS_GROWTH_MAX = 8 * PAGE_BYTES_MAX
"""Memory of a page as bytes, as text and as objects, and of the allocator."""


@contextmanager
def opened(endpoint: str, **keys: Any) -> Iterator[Bucket]:
    bucket = Bucket(s3_config(endpoint, **keys))
    try:
        yield bucket
    finally:
        bucket.close()


@pytest.fixture
def client(bucket: FaultyS3) -> Iterator[Bucket]:
    with opened(bucket.endpoint) as client:
        yield client


@pytest.mark.parametrize(
    ("query", "signature"),
    [
        ("lifecycle=", "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        ("max-keys=2&prefix=J", "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"),
    ],
)
def test_signatures_are_those_of_aws_documentation(query: str, signature: str) -> None:
    credentials = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    now = datetime(2013, 5, 24, tzinfo=UTC)
    headers = signed_headers("GET", "examplebucket.s3.amazonaws.com", "/", query, credentials, "us-east-1", now=now)
    assert headers["authorization"].endswith(f"Signature={signature}")


# ---- Names, lists


@pytest.mark.parametrize("odd", ["a//b", "./x", "../x", "a\tb", "a\nb", "a\x01b", "a b+c%2F&<>", "é", "/", ""])
def test_an_odd_name_under_the_prefix_costs_that_object_alone(bucket: FaultyS3, client: Bucket, odd: str) -> None:
    """Symptom: with one such name the list failed: the node found none of its records, and FLUSHALL was an error."""
    bucket.objects = {f"{PREFIX}{odd}": b"x", f"{PREFIX}{NAME}": b"ours", "elsewhere": b"y"}
    assert {listed.name: listed.size for listed in client.list()} == {odd: 1, NAME: 4}


def test_a_server_that_does_not_encode_names_in_lists_is_understood(bucket: FaultyS3, client: Bucket) -> None:
    bucket.encodes = False
    bucket.objects = {f"{PREFIX}{name}": b"x" for name in (NAME, "a//b", "a\x01b", "a&<b+%41")}
    assert {listed.name for listed in client.list()} == {NAME, "a//b", "a\x01b", "a&<b+%41"}


def test_a_list_of_many_pages_is_complete(bucket: FaultyS3, client: Bucket) -> None:
    bucket.objects = {f"{PREFIX}{number}": b"x" for number in range(100)}
    assert {listed.name for listed in client.list()} == {str(number) for number in range(100)}


def test_a_list_of_a_folder_requests_only_its_prefix(bucket: FaultyS3, client: Bucket) -> None:
    bucket.objects = {f"{PREFIX}00a/1": b"x", f"{PREFIX}00ab/1": b"x", f"{PREFIX}00b/1": b"x"}
    assert [listed.name for listed in client.list("00a/")] == ["00a/1"]
    assert len(list(client.list())) == 3


def page(names: int, *, token: str = "") -> bytes:
    when = "2026-01-01T00:00:00.000Z"
    objects = "".join(
        f"<Contents><Key>{PREFIX}{number}</Key><Size>1</Size><LastModified>{when}</LastModified></Contents>"
        for number in range(names)
    )
    more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return f"<ListBucketResult>{more}{objects}</ListBucketResult>".encode()


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        page(1001),
        page(1).replace(b"<Size>1", b"<Size>-1"),
        page(1).replace(b"<Size>1", b"<Size>" + b"9" * 10_000),
        page(1).replace(b"2026", b"9999999"),
        page(1).replace(PREFIX.encode(), b"another/"),
        page(1).replace(b"</Key>", b""),
        page(1, token="t"),
        b"<ListBucketResult>" + b"<Contents>" * (PAGE_BYTES_MAX // 10 - 10),
        b"<ListBucketResult>" + b"<Contents><Key>" * (PAGE_BYTES_MAX // 15 - 10),
        b"<ListBucketResult>" + b" " * PAGE_BYTES_MAX,
    ],
    ids=lambda body: repr(body[:20]),
)
def test_an_invalid_page_ends_the_list_with_an_error(bucket: FaultyS3, client: Bucket, body: bytes) -> None:
    bucket.fault = lambda asked: Answer(200, body=body)
    with pytest.raises(BucketError, match="cannot list") as raised:
        list(client.list())
    assert raised.value.reason == "bad_list"


def test_an_endless_list_ends_at_its_deadline(bucket: FaultyS3) -> None:
    """Symptom: FLUSHALL was never answered."""
    bucket.fault = lambda asked: Answer(200, body=page(3, token=str(len(bucket.asked))))
    with opened(bucket.endpoint, list_timeout_s=0.5) as client, pytest.raises(BucketError) as raised:
        for _ in client.list():
            """Each page has another continuation."""
    assert raised.value.reason == "bad_list" and "no end" in str(raised.value)


# ---- Bodies


@contextmanager
def endless(headers: dict[str, str], piece: bytes) -> Iterator[str]:
    """Yield the endpoint of a server that sends a body as long as the client reads."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def do_GET(self) -> None:  # noqa: N802
            self.send_response(206 if "Range" in self.headers else 200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            while not ended.wait(0.0 if len(piece) > 1 else 0.01):
                try:
                    self.wfile.write(piece)
                except OSError:
                    return

    ended = threading.Event()
    try:
        with http_server(Handler) as address:
            yield f"http://{address}"
    finally:
        ended.set()


CHUNK = b"%x\r\n%b\r\n" % (1 << 20, b"x" * (1 << 20))
BODIES = {
    "1 TiB": ({"Content-Length": str(1 << 40)}, b"x" * (1 << 20)),
    "to the end of the connection": ({}, b"x" * (1 << 20)),
    "in chunks": ({"Transfer-Encoding": "chunked"}, CHUNK),
    "a chunk of 1 EiB": ({"Transfer-Encoding": "chunked"}, b"fffffffffffffff\r\n" + b"x" * (1 << 20)),
    "no end of its headers": ({f"x-{number}": "y" * 60_000 for number in range(90)}, b"x-more: y\r\n"),
}


@pytest.mark.parametrize("how", BODIES)
@pytest.mark.parametrize("operation", ["read", "list"])
@pytest.mark.usefixtures("bucket")  # for its credentials
def test_an_endless_body_uses_bounded_memory(how: str, operation: str) -> None:
    """Symptom: 2.5 GiB of memory for a range of some KiB, and 2 GiB for a page of a list."""
    process = psutil.Process()
    with endless(*BODIES[how]) as endpoint, opened(endpoint) as client:
        before, stop, peak = process.memory_info().rss, threading.Event(), [0]

        def watch() -> None:
            while not stop.wait(0.005):
                peak[0] = max(peak[0], process.memory_info().rss)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with pytest.raises(BucketError):
                if operation == "read":
                    client.read(NAME, 0, 1 << 16)
                else:
                    list(client.list())
        finally:
            stop.set()
            watcher.join()
    assert peak[0] - before <= RSS_GROWTH_MAX, f"{(peak[0] - before) / MIB:.0f} MiB"


@pytest.mark.usefixtures("bucket")  # for its credentials
def test_a_slow_server_is_cut_off_at_the_deadline() -> None:
    with endless({"Content-Length": str(1 << 16)}, b"x") as endpoint, opened(endpoint, timeout_s=0.5) as client:
        with pytest.raises(BucketError) as raised:
            client.read(NAME, 0, 1 << 16)
        assert raised.value.reason == "timeout"


# ---- Sources and receivers of credentials


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(monkeypatch: pytest.MonkeyPatch, bucket: FaultyS3, status: int) -> None:
    """Symptom: another host received x-amz-security-token."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "secret token")
    with faulty_s3() as elsewhere, opened(bucket.endpoint) as client:
        bucket.fault = lambda asked: Answer(status, "TemporaryRedirect", {"Location": f"{elsewhere.endpoint}/x"})
        calls: list[Callable[[], object]] = [
            lambda: client.read(NAME, 0, 10),
            lambda: list(client.list()),
            lambda: client.create(NAME, b"x"),
            lambda: client.delete(NAME),
        ]
        for call in calls:
            with pytest.raises(BucketError) as raised:
                call()
            assert raised.value.reason == "redirected"
        assert not elsewhere.asked


def test_the_error_about_missing_credentials_says_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Symptom: a log line of a node over MinIO named the metadata service of AWS."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        Bucket(s3_config("http://127.0.0.1:9000"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="without AWS_SECRET_ACCESS_KEY"):
        Bucket(s3_config("http://127.0.0.1:9000"))


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("aws_secret_access_key = TOPSECRET\n", r"line 1 is not below a \[profile\]"),
        ("[default]\naws_secret_access_key TOPSECRET\n", "line 2 is not written as key = value"),
        ("[default]\naws_secret_access_key = TOPSECRET\n", "it lacks aws_access_key_id"),
        ("[team]\naws_secret_access_key = TOPSECRET\n", "it lacks default"),
        ("[default]\na = TOPSECRET\na = TOPSECRET\n", "option 'a' in section 'default' already exists"),
    ],
)
def test_an_error_in_the_file_of_credentials_shows_no_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str, cause: str
) -> None:
    """Symptom: the log of a node had the secret key, as the parser of the file quotes the line that it cannot read."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    (file := tmp_path / "credentials").write_text(content)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    with pytest.raises(ConfigurationError, match=cause) as raised:
        Bucket(s3_config("http://127.0.0.1:9000"))
    assert "TOPSECRET" not in str(raised.value) and "\n" not in str(raised.value)


class _Roles(BaseHTTPRequestHandler):
    """Issues credentials like STS, a container's agent, and an instance's metadata service."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _send(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_PUT(self) -> None:  # noqa: N802
        self._send("metadata token")

    def do_GET(self) -> None:  # noqa: N802
        found = {"AccessKeyId": "of json", "SecretAccessKey": "s", "Token": "t", "Expiration": "2099-01-01T00:00:00Z"}
        if self.path == "/container" and self.headers["Authorization"] == "pod token":
            self._send(json.dumps(found))
        elif self.headers["X-aws-ec2-metadata-token"] != "metadata token":
            self._send("who are you", 401)
        elif self.path.endswith("/security-credentials/"):
            self._send("role-of-node\n")
        elif self.path.endswith("/security-credentials/role-of-node"):
            self._send(json.dumps(found))

    def do_POST(self) -> None:  # noqa: N802
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        wanted = "Action=AssumeRoleWithWebIdentity" in asked and "WebIdentityToken=web+token" in asked
        fields = {"AccessKeyId": "of sts", "SecretAccessKey": "s", "SessionToken": "t"}
        fields["Expiration"] = "2099-01-01T00:00:00Z"
        self._send("".join(f"<{name}>{value}</{name}>" for name, value in fields.items()), 200 if wanted else 400)


@pytest.mark.parametrize("place", ["web identity", "container", "instance"])
def test_roles_give_credentials(monkeypatch: pytest.MonkeyPatch, bucket: FaultyS3, tmp_path: Path, place: str) -> None:
    (tmp_path / "token").write_text("web token" if place == "web identity" else "pod token")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    endpoint = "https://s3.eu-central-1.amazonaws.com" if place == "instance" else bucket.endpoint
    with http_server(_Roles) as address:
        variables = {
            "web identity": {
                "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
                "AWS_ROLE_ARN": "arn:aws:iam::1:role/node",
                "AWS_ENDPOINT_URL_STS": f"http://{address}",
            },
            "container": {
                "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://{address}/container",
                "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(tmp_path / "token"),
            },
            "instance": {"AWS_METADATA_ENDPOINT": f"http://{address}"},
        }
        for name, value in variables[place].items():
            monkeypatch.setenv(name, value)
        found = Bucket(s3_config(endpoint))._credentials.get()
    assert found[:3] == ("of sts" if place == "web identity" else "of json", "s", "t")
