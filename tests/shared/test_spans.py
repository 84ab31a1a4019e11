"""The configuration of spans, and what they cost where they are off."""

import importlib.util
import subprocess
import sys

import pytest

from host_control.config import HostConfig
from shadowserve.errors import ConfigurationError


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://collector", "http://", "http://user:secret@collector"])
def test_another_address_than_a_collectors_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="otlp_endpoint.*http://HOST:4318") as raised:
        HostConfig.from_engine({"otlp_endpoint": endpoint})
    assert "secret" not in str(raised.value)


def test_without_the_packages_a_configured_endpoint_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", absent)
    assert HostConfig.from_engine({}).otlp_endpoint == ""
    with pytest.raises(ConfigurationError, match=r"otlp_endpoint.*pip install 'shadowserve\[otel\]'") as raised:
        HostConfig.from_engine({"otlp_endpoint": "http://127.0.0.1:4318"})
    assert "\n" not in str(raised.value)


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    script = (
        "import sys, dpu_dataplane.server, host_control.manager, storage_kv.server\n"
        "from shadowserve import spans\n"
        "spans.start('', 'test')\n"
        "with spans.span('any', '00-' + '1' * 32 + '-' + '2' * 16 + '-01') as span:\n"
        "    assert not span.context and not spans.current() and not spans.recording()\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
