"""A collector of OpenTelemetry spans: an OTLP/HTTP server in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

from machine import http_server, wait_for
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Span(NamedTuple):
    """A span without the project's prefix in its name and attributes."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    seconds: float
    attributes: dict[str, Any]


class Collector:
    """Spans received so far, at ``endpoint``."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.spans: list[Span] = []

    def add(self, data: bytes) -> None:
        for each in ExportTraceServiceRequest.FromString(data).resource_spans:
            service = {one.key: one.value.string_value for one in each.resource.attributes}["service.name"]
            for span in (span for scope in each.scope_spans for span in scope.spans):
                attributes = {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
                seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
                ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                plain = {key.removeprefix("shadowserve."): value for key, value in attributes.items()}
                self.spans.append(Span(service, span.name.removeprefix("shadowserve."), *ids, seconds, plain))

    def trace(self, trace: str, caller: str, *names: str) -> list[Span]:
        """Return a trace once it has spans of these names, and every span's parent is one of them or the caller."""

        def found() -> list[Span]:
            spans = [span for span in self.spans if span.trace == trace]
            connected = {span.parent for span in spans} <= {caller, *(span.id for span in spans)}
            return spans if connected and set(names) <= {span.name for span in spans} else []

        return list(wait_for(found))


@contextmanager
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """No-op."""

        def do_POST(self) -> None:
            found.add(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with http_server(Handler) as address:
        found = Collector(f"http://{address}")
        yield found
