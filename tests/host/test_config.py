"""The host's configuration in an engine's options."""

from pathlib import Path

import pytest

from host_control.config import HostConfig
from shadowserve.errors import ConfigurationError


def test_plain_and_dotted_spellings_mean_the_same() -> None:
    assert HostConfig.from_engine({"quantizer": "binned"}) == HostConfig.from_engine(
        {"shadowserve.quantizer": "binned"}
    )


def test_a_key_given_twice_differently_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="sets 'bins' twice"):
        HostConfig.from_engine({"bins": 16, "shadowserve.bins": 32})
    assert HostConfig.from_engine({"bins": 16, "shadowserve.bins": 16}).bins == 16


@pytest.mark.parametrize("spelled", ["quantiser", "shadowserve.quantiser"])
def test_unknown_key_names_the_nearest(spelled: str) -> None:
    with pytest.raises(ConfigurationError, match="'quantizer'"):
        HostConfig.from_engine({spelled: "binned"})


def test_engine_wins_over_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "host.yaml"
    file.write_text("host:\n  bins: 16\n  order: sjf\n  fetch_timeout_s: 3\n")
    monkeypatch.setenv("SHADOWSERVE_CONFIG_FILE", str(file))
    monkeypatch.setenv("SHADOWSERVE_HOST_ORDER", "fifo")
    config = HostConfig.from_engine({"fetch_timeout_s": 4})
    assert (config.bins, config.order, config.fetch_timeout_s) == (16, "fifo", 4)


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


def test_address_of_each_rank() -> None:
    config = HostConfig.from_engine({"data_plane": "dpu{rank}:50151"})
    assert [config.data_plane_address(rank) for rank in (0, 3)] == ["dpu0:50151", "dpu3:50151"]
