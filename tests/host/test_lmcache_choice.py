"""The fetch-or-recompute policy with configured times."""

from typing import Any

import pytest

from host_control.lmcache.choice import COMPUTE, LOAD, Choice
from shadowserve.errors import ConfigurationError

LENGTHS = (512, 2048, 8192, 32_768)
PROMPTS = (256, 1024, 4096, 65_536, 131_072)


def configs(load_s: float, token_load_s: float) -> dict[str, Any]:
    """Computing takes 0.2 ms a token, and more for long prompts; loading has a fixed time and one per token."""
    return {
        COMPUTE: {str(n): 0.005 + 2e-4 * n + 4e-9 * n * n for n in LENGTHS},
        LOAD: {str(n): load_s + token_load_s * n for n in LENGTHS},
        "plugin.frontend.other": 1,
    }


@pytest.mark.parametrize(
    ("load_s", "token_load_s", "loaded"),
    [
        (0.01, 2e-5, PROMPTS),  # a fast link
        (0.5, 2e-5, (4096, 65_536, 131_072)),  # a long way: short prompts are computed
        (0.01, 6e-4, (131_072,)),  # a slow link: only attention makes computing slower
        (5.0, 2e-3, ()),
    ],
)
def test_prompts_are_loaded_where_that_is_predicted_to_be_faster(
    load_s: float, token_load_s: float, loaded: tuple[int, ...]
) -> None:
    choice = Choice(configs(load_s, token_load_s))
    assert tuple(n for n in PROMPTS if choice.should_load(n, 0, 256)) == loaded


def test_what_the_engine_has_counts_as_neither_loaded_nor_computed() -> None:
    choice = Choice(configs(0.5, 2e-5))
    assert choice.should_load(8192, 0, 256)
    assert not choice.should_load(8192, 7168, 256)
    assert choice.should_load(8192, 8192, 256)


def test_lengths_far_beyond_the_configured_ones_are_loaded() -> None:
    assert Choice(configs(5.0, 2e-3)).should_load(10_000_000, 0, 256)


@pytest.mark.parametrize(
    "wrong", [None, {}, {"512": 1, "1024": 2}, {"a": 1, "b": 2, "c": 3}, {"1": 0, "2": 1, "3": 1}, [1, 2, 3], "1"]
)
@pytest.mark.parametrize("name", [COMPUTE, LOAD])
def test_missing_or_invalid_times_are_refused_by_their_name(name: str, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=name):
        Choice(configs(0.1, 1e-4) | {name: wrong})
