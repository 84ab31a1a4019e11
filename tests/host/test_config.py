"""The host's configuration in an engine's options."""

import pytest

from host_control.config import HostConfig
from shadowserve.errors import ConfigurationError


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bins", 5),
        ("fetch_timeout_s", 0),
        ("order", "lifo"),
        ("chunk_tokens", 0),
        ("value_bins", 258),
        ("scale_tokens", 257),
    ],
)
def test_values_that_do_not_fit_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigurationError):
        HostConfig.from_engine({key: value})
