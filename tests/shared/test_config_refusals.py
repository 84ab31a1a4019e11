"""Keys without effect beside other keys: the configuration is refused with one line that names them."""

from typing import Any

import pytest

from dpu_dataplane.config import DataPlaneConfig
from host_control.config import HostConfig
from shadowserve.config import Section
from shadowserve.errors import ConfigurationError
from storage_kv.config import StorageConfig

DEVICE = [{"path": "/dev/null/values.pool", "size": "64MiB"}]


@pytest.mark.parametrize(
    ("section", "flags", "named"),
    [
        (StorageConfig, {"admission": "second_hit"}, ("admission: second_hit", "devices")),
        (StorageConfig, {"memory_homes": True}, ("memory_homes: true", "devices")),
        (StorageConfig, {"strict_order": True}, ("strict_order: true", "devices")),
        (StorageConfig, {"scrub_bytes_per_s": "4MiB"}, ("scrub_bytes_per_s", "devices")),
        (DataPlaneConfig, {"tiers": {"admission": "second_hit"}}, ("tiers", "admission: second_hit")),
        (DataPlaneConfig, {"tiers": {"scrub_bytes_per_s": "4MiB"}}, ("tiers", "scrub_bytes_per_s")),
        (HostConfig, {"pages": True, "quantizer": "binned"}, ("pages: true", "quantizer: binned")),
        (HostConfig, {"pages": True, "data_plane": "10.0.0.1:50151"}, ("pages: true", "data_plane", "10.0.0.1:50151")),
    ],
    ids=lambda value: str(value)[:50],
)
def test_keys_that_would_do_nothing_are_refused(
    section: type[Section], flags: dict[str, Any], named: tuple[str, ...]
) -> None:
    """Symptom: the program started, and the key had no effect."""
    with pytest.raises(ConfigurationError) as raised:
        section.load(flags=flags, environment={})
    assert all(name in str(raised.value) for name in named), raised.value
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("section", "flags"),
    [
        (StorageConfig, {"scrub_bytes_per_s": 0}),
        (StorageConfig, {"devices": DEVICE, "admission": "second_hit", "strict_order": True}),
        (DataPlaneConfig, {"tiers": {"strict_order": True}}),
        (DataPlaneConfig, {"tiers": {"devices": DEVICE, "scrub_bytes_per_s": "4MiB"}}),
        (HostConfig, {"pages": True, "data_plane": "unix:/run/dpu.sock", "quantizer": "passthrough"}),
    ],
    ids=lambda value: str(value)[:50],
)
def test_keys_that_do_what_they_say_are_accepted(section: type[Section], flags: dict[str, Any]) -> None:
    section.load(flags=flags, environment={})
