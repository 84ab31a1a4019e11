"""Spans of requests, in OpenTelemetry's format, sent over OTLP. Nothing is imported or recorded before :func:`start`.

A span's context is its W3C ``traceparent``. It is one string in gRPC metadata, in ``KV.TRACE`` and in messages of the
engine. The engine begins traces. The other programs only continue a recorded one, so unsampled requests cost nothing.
Spans wait in a bounded queue for a thread that sends them. Without room they are dropped.
"""

import contextlib
import importlib.util
import logging
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator

from shadowserve import __version__

HEADER: Final = "traceparent"
CONTEXT_LENGTH: Final = 55

_CONTEXT: Final = re.compile("00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII)
_QUEUE_MAX: Final = 1024
_TEXT_MAX: Final = 256
_SEND_TIMEOUT_S: Final = 2.0
_SEND_INTERVAL_MS: Final = 1000
_LOG_INTERVAL_S: Final = 60.0

_tracer: Any = None
_stop: Callable[[], None]
_current: ContextVar[str] = ContextVar("span", default="")


def _check_endpoint(value: str) -> str:
    if not value:
        return value
    url = urlsplit(value)
    if url.scheme not in ("http", "https") or not url.hostname or url.username is not None:
        raise ValueError("use the address of a collector's OTLP/HTTP port, http://HOST:4318, without a user's name")
    try:
        installed = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ModuleNotFoundError:
        installed = None
    if installed is None:
        raise ValueError("the OpenTelemetry packages are not installed; run pip install 'shadowserve[otel]'")
    return value


OtlpEndpoint = Annotated[str, AfterValidator(_check_endpoint)]
"""Configuration value: address of a collector, or empty for no spans."""


class _Limiter:
    """Allows a log line a minute."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def allow(self, record: logging.LogRecord) -> bool:
        if record.created < self._next_s:
            return False
        self._next_s = record.created + _LOG_INTERVAL_S
        return True


class Span:
    """A span that has begun. Without a recorder, it does nothing."""

    __slots__ = ("_recorded", "context")

    def __init__(self, recorded: Any = None) -> None:
        self._recorded = recorded
        self.context = ""  # its ``traceparent``; empty if it is not recorded
        if recorded is not None:
            ids = recorded.get_span_context()
            self.context = f"00-{ids.trace_id:032x}-{ids.span_id:016x}-01"

    def set(self, **attributes: str | int | float | bool) -> None:
        if self._recorded is not None:
            self._recorded.set_attributes({f"shadowserve.{name}": value for name, value in attributes.items()})

    def end(self, **attributes: str | int | float | bool) -> None:
        """End the span; only the first call counts."""
        if self._recorded is not None:
            self.set(**attributes)
            self._recorded.end()
            self._recorded = None


_NOT_RECORDED: Final = Span()


def start(endpoint: str, service: str) -> None:
    """Record spans from now on under a service's name; an empty endpoint, and a second call, change nothing.

    The variables ``OTEL_*`` of the SDK apply, such as ``OTEL_TRACES_SAMPLER`` and ``OTEL_EXPORTER_OTLP_HEADERS``.
    """
    global _tracer, _stop
    if not endpoint or _tracer is not None:
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    path = "" if urlsplit(endpoint).path.strip("/") else "/v1/traces"
    logging.getLogger(OTLPSpanExporter.__module__).addFilter(_Limiter().allow)  # a lost collector
    exporter = OTLPSpanExporter(endpoint.rstrip("/") + path, timeout=_SEND_TIMEOUT_S)
    provider = TracerProvider(
        resource=Resource.create({"service.name": service, "service.version": __version__}),
        span_limits=SpanLimits(max_span_attribute_length=_TEXT_MAX),
    )
    sender = BatchSpanProcessor(
        exporter,
        max_queue_size=_QUEUE_MAX,
        max_export_batch_size=_QUEUE_MAX // 2,
        schedule_delay_millis=_SEND_INTERVAL_MS,
    )
    provider.add_span_processor(sender)
    _tracer = provider.get_tracer("shadowserve", __version__)
    _stop = provider.shutdown


def stop() -> None:
    """Send what is left, within some seconds, and record no more."""
    global _tracer
    if _tracer is not None:
        _tracer = None
        _stop()


def recording() -> bool:
    """Return True if this process records spans."""
    return _tracer is not None


def current() -> str:
    """Return the context of the span that this thread or task works for; empty for none."""
    return _current.get()


def begin(name: str, parent: str, *, root: bool = False, kind: str = "internal", **attributes: Any) -> Span:
    """Begin a span.

    Args:
        name: Name without the project's.
        parent: Context of the parent; an invalid one is ignored.
        root: Begin a trace where there is no parent. Otherwise the span is not recorded.
        kind: ``internal``, ``server`` or ``client``.
        attributes: Attributes, without the project's prefix.
    """
    if (tracer := _tracer) is None:  # stop() may be called meanwhile
        return _NOT_RECORDED
    from opentelemetry import trace
    from opentelemetry.context import Context

    context = Context()
    if match := _CONTEXT.fullmatch(parent):
        trace_id, span_id, flags = (int(part, 16) for part in match.groups())
        ids = trace.SpanContext(trace_id, span_id, True, trace.TraceFlags(flags))
        context = trace.set_span_in_context(trace.NonRecordingSpan(ids), context)
    elif not root:
        return _NOT_RECORDED
    recorded = tracer.start_span(f"shadowserve.{name}", context, trace.SpanKind[kind.upper()])
    if not recorded.is_recording():  # not sampled
        return _NOT_RECORDED
    span = Span(recorded)
    span.set(**attributes)
    return span


@contextlib.contextmanager
def use(context: str) -> Iterator[None]:
    """Work for a span while in this context: :func:`current` is its context."""
    before = _current.set(context)
    try:
        yield
    finally:
        _current.reset(before)


@contextlib.contextmanager
def span(name: str, parent: str | None = None, *, kind: str = "internal", **attributes: Any) -> Iterator[Span]:
    """Record a span while in this context, and work for it. ``parent``: by default the current span."""
    made = begin(name, current() if parent is None else parent, kind=kind, **attributes)
    with use(made.context):
        try:
            yield made
        except BaseException as error:
            made.set(error=f"{type(error).__name__}: {error}"[:_TEXT_MAX])
            raise
        finally:
            made.end()
