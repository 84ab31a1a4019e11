"""The fetch-or-recompute policy with configured times, for a cache server that measures neither loads nor computing.

Times to the first token are given for some prompt lengths, once with nothing cached and once with everything in the
store. :mod:`host_control.fetch_policy` fits its models to them and predicts all other lengths.
"""

from collections.abc import Mapping
from typing import Any, Final

from host_control.fetch_policy import FetchOrRecompute, Hit
from host_control.interference.loading import LoadTable
from host_control.interference.table import ComputeTable, attention_pairs
from shadowserve.errors import ConfigurationError
from shadowserve.tier import Tier

COMPUTE, LOAD = "shadowserve.compute_s", "shadowserve.load_s"
_POINTS_MIN: Final = 3
"""As many as the models need."""
_ONE_STEP: Final = 1 << 40
"""The measured times are of whole prompts, so a prediction is, too."""


class Choice:
    """Chooses for each prompt whether to load or to compute.

    LMCache asks before its lookup, and does not say what its own memory (L1) has. So a prompt that is declined is
    computed even if L1 has it.

    Args:
        configs: ``shadowserve.compute_s`` and ``shadowserve.load_s``, each the seconds to the first token by the number
            of prompt tokens, for three lengths or more. Other keys are ignored.

    Raises:
        ConfigurationError: One of them is missing or invalid.
    """

    def __init__(self, configs: Mapping[str, Any]) -> None:
        self._computing, self._loads = ComputeTable(), LoadTable()
        for tokens, seconds in _points(configs, COMPUTE):
            self._computing.observe("prompts", tokens, attention_pairs(0, tokens), seconds)
        for tokens, seconds in _points(configs, LOAD):
            self._loads.observe({Tier.STORAGE: tokens}, 0.0, seconds)

    def should_load(self, tokens: int, computed: int, chunk_tokens: int) -> bool:
        """Return whether loading is predicted to be faster; true for lengths that cannot be predicted.

        Args:
            tokens: Tokens that could be loaded, from the prompt's begin.
            computed: Leading tokens that the engine has.
        """
        if tokens <= computed:
            return True
        policy = FetchOrRecompute(
            self._computing, self._loads, chunk_tokens=chunk_tokens, step_tokens=_ONE_STEP, load_tokens_min=1,
            fetch_timeout_s=float("inf"),
        )  # fmt: skip
        # Loads are learnt by tokens, so a token counts as a byte.
        hit = Hit(tokens=tokens, local_tokens=computed, end_tokens=tokens, chunk_bytes=chunk_tokens)
        return policy.decide(hit, 0.0).way != "compute"


def _points(configs: Mapping[str, Any], name: str) -> list[tuple[int, float]]:
    """Return the measured lengths and times in ascending order."""
    given = configs.get(name)
    try:
        points = sorted((int(tokens), float(seconds)) for tokens, seconds in dict(given or {}).items())
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name} maps prompt tokens to seconds, such as {{'1024': 0.2}}: {error}") from error
    if len(points) < _POINTS_MIN or any(tokens < 1 or not 0 < seconds < 1e6 for tokens, seconds in points):
        raise ConfigurationError(
            f"{name} has {given!r}; it needs {_POINTS_MIN} prompt lengths or more, with their seconds"
        )
    return points
