"""Log lines: text and JSON are the same events with the same fields."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from shadowserve.logs import JsonFormatter, TextFormatter, configure_logging


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, which is restored afterwards."""
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


def record(template: Any, *arguments: Any, error: BaseException | None = None) -> logging.LogRecord:
    info = (type(error), error, error.__traceback__) if error else None
    return logging.LogRecord("storage_kv.server", logging.INFO, __file__, 1, template, arguments, info)


def as_json(template: Any, *arguments: Any, error: BaseException | None = None) -> dict[str, Any]:
    text = JsonFormatter().format(record(template, *arguments, error=error))
    assert "\n" not in text
    line: dict[str, Any] = json.loads(text)
    assert line.pop("time").endswith("Z") and line.pop("level") == "INFO" and line.pop("logger") == "storage_kv.server"
    return line


def test_an_event_becomes_its_name_and_typed_fields() -> None:
    line = as_json("ready address=%s metrics_port=%s budget_bytes=%d share=%.2f", "127.0.0.1:1", None, 7, 0.123)
    assert line == {"event": "ready", "address": "127.0.0.1:1", "metrics_port": None, "budget_bytes": 7, "share": 0.123}


def test_a_field_of_several_parts_and_one_that_is_written_in_the_template() -> None:
    line = as_json("client_denied address=%s:%d reason='protected mode' retry_s=1", "::1", 80)
    assert line == {"event": "client_denied", "address": "::1:80", "reason": "protected mode", "retry_s": "1"}


def test_an_event_without_fields() -> None:
    assert as_json("draining") == {"event": "draining"}


@pytest.mark.parametrize("hostile", ["x event=y", "a\nready address=evil", "'quoted' b=1", '"}{"', "\u2028", "%s %d"])
def test_what_a_client_sends_adds_neither_a_field_nor_a_line(hostile: str) -> None:
    assert as_json("client_refused reason=%s", hostile) == {"event": "client_refused", "reason": hostile}
    assert len(TextFormatter().format(record("client_refused reason=%s", hostile)).split("\n")) == 1


def test_a_sentence_stays_a_sentence() -> None:
    assert as_json("backend %s on %d cores", "software", 4) == {"message": "backend software on 4 cores"}
    assert as_json(ValueError("odd")) == {"message": "odd"}
    assert as_json("stopping at %d%%", 5) == {"message": "stopping at 5%"}


def test_a_field_that_has_a_name_of_ours_is_kept_beside_it() -> None:
    assert as_json("log_changed level=%s", "DEBUG") == {"event": "log_changed", "level_": "DEBUG"}


def test_an_exception_is_a_field_and_in_text_it_follows_the_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        line = as_json("callback_failed function=%r", len, error=error)
        text = TextFormatter().format(record("callback_failed function=%r", len, error=error))
    assert "ValueError: broken" in line["exception"] and line["function"] == str(len)
    assert "callback_failed function=<built-in function len>\nTraceback" in text


def test_the_format_and_the_level_are_those_that_were_asked_for(root: logging.Logger) -> None:
    stream = io.StringIO()
    configure_logging("warning", "json", stream)
    logging.getLogger("a").info("unseen x=%d", 1)
    logging.getLogger("a").warning("seen x=%d", 2)
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["seen"]
    stream = io.StringIO()
    configure_logging("INFO", "text", stream)
    logging.getLogger("a").info("seen x=%d", 3)
    assert stream.getvalue().endswith(" INFO a seen x=3\n") and len(root.handlers) == 1
