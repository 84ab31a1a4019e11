"""What the scheduler's half knows of one request."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from host_control.disaggregation import Disaggregation
from host_control.fetch_policy import Decision
from shadowserve.keys import Extra

__all__ = ["Tracked"]


@dataclass
class Tracked:
    """A request, from arrival to end."""

    request: Any
    extra: Extra | Callable[[], Extra] = field(default_factory=Extra)  # see RequestInputs.extra()
    preemptions: int = 0  # at the time of the last lookup
    counted: bool = False
    refused: bool = False  # a load failed: never offer another, or vLLM would ask without end
    mixed: bool = False  # holds KV of earlier weights, or goes on behind some: stored under no name
    stored_chunks: int = 0  # leading chunks that are stored or on their way
    local_tokens: int = 0  # the engine's own prefix, when the last offer was made
    offered: list[bytes] | None = None  # chunk keys of the chunks that it could load
    offered_tail: int = 0  # tokens up to the end of the tail of what was saved of it, if that is among them
    disaggregation: Disaggregation = field(default_factory=Disaggregation)
    tail_end: int = 0  # tokens up to the end of the prompt's tail, which has a record of its own; 0 where it has none
    tail_stored: bool = False  # or on its way
    offered_epoch: str = ""
    offered_cut: int = 0
    layerwise: bool = False  # it was offered in the order of layers
    not_by_layers: str = ""  # why not, by the reasons of loads.LoadWays
    decision: Decision | None = None  # what came of the last question, until it is carried out
    foreseen: bool = False  # it was asked whether any answer to its lookup would have it loaded
    first_chunk: int = 0  # of the load that is under way
    load_chunks: int = 0  # of the same, of the first group

    @property
    def was_computed_here(self) -> bool:
        """Whether it has run, was preempted, and has generated tokens or a prompt that is not handed over."""
        request, disaggregation = self.request, self.disaggregation
        handed_over = (
            disaggregation.publishes or disaggregation.waits
        ) and request.num_tokens == request.num_prompt_tokens
        return request.num_preemptions > 0 and not handed_over
