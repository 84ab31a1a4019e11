"""Loads: which chunks a load takes of each KV cache group, and which way it takes.

A load runs in parallel with other requests, or before the step that computes on it, or layer by layer within that step.
The scheduler side decides, counts each load that takes a slower way than configured, and writes the way into the
:class:`~host_control.vllm.metadata.LoadOperation`. The worker side has no rule of its own.
"""

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any, Final

from host_control.config import HostConfig
from host_control.lookup import LookupAnswer, PrefixLookup
from host_control.vllm.groups import Group, Groups
from host_control.vllm.metadata import GroupLoad
from host_control.vllm.metrics import SlowerPaths
from host_control.vllm.requests import Load, RequestState

LAYERS_OFF: Final = "ShadowServe: layer_order: auto is off, prompts are loaded as a whole: %s"
NO_LAYERS: Final = "off"
"""Reason of an engine without layer order."""
WHOLE_IS_FASTER: Final = "whole_is_faster"
TIME_UNKNOWN: Final = "time_unknown"
_DETAILS: Final = {
    "several_groups": "asynchronous_fetch: false is configured, and this engine has several KV cache groups, windows, "
    "recurrent state or draft layers; its requests wait for their loads outside the running batch",
    "seed": "the outcome of a request with a seed depends on its random generator, which vLLM does not reset when a "
    "load falls short; such requests wait for their loads outside the running batch",
    "sampling_state": "a thinking token budget or a custom logits processor keeps state, which vLLM does not reset "
    "when a load falls short; such requests wait for their loads outside the running batch",
    "other_requests": "layer_order is configured, and other requests run or load, and its layers are not predicted to "
    "come within interference_budget of the step, or the first tokens would come later; such loads go chunk by chunk, "
    "so that the others do not wait for them",
    "partial_block": "layer_order is configured, and a load ends within a block, as of a preempted request; it goes "
    "chunk by chunk, because vLLM writes into that block before it waits for the layer",
    "pending_chunks": "layer_order is configured, and a load waits for chunks that another engine is still storing; it "
    "goes chunk by chunk",
    "no_publishing": "a request is to wait for chunks that another engine is storing, and storage publishes no chunks "
    "(Redis, Valkey and clusters of them do not); it loads the chunks that are stored by then. Use a storage node "
    "of ShadowServe, or a proxy that carries kv_transfer_params (docs/guides/disaggregation.md)",
}
"""Log lines by reason. docs/reference/combinations.md has a row for each reason."""


def has_own_logits_processors(vllm_config: Any) -> bool:
    """Tell if the engine runs logits processors that are not vLLM's own, which may keep state."""
    model = getattr(vllm_config, "model_config", None)
    return bool(getattr(model, "logits_processors", None) or entry_points(group="vllm.logits_processors"))


def group_loads(
    load: Load, groups: Sequence[Group], tables: Sequence[list[int]], end_tokens: int, chunk_tokens: int
) -> dict[int, GroupLoad]:
    """Return the chunks that a load up to ``end_tokens`` takes of each group, by the group's index.

    Raises:
        ValueError: vLLM expects KV in a block that no record has.
    """
    assert load.chunk_keys is not None, "blocks were allocated for a load that was not offered"
    loads, tail = {}, end_tokens == load.tail_end
    for group in groups:
        chunks, blocks = group.wanted(tables[group.index], load.local_tokens, end_tokens, tail=tail)
        chunk_keys = [load.chunk_keys[chunk] for chunk in chunks.tolist()]
        numbers = (chunks - load.local_tokens // chunk_tokens).tolist()
        loads[group.index] = GroupLoad(chunk_keys, blocks.reshape(-1).tolist(), numbers)
    return loads


def usable_tokens(state: RequestState, answer: LookupAnswer, groups: Groups) -> int:
    """Return how many of the stored tokens behind the engine's own prefix a load can bring."""
    save, local = state.current_save, state.load.local_tokens
    tail_end = state.tail_end if save is None else save.tokens
    tokens = groups.with_tail(tail_end, int(state.request.num_tokens)) if answer.tail else answer.tokens
    most = state.disaggregation.load_tokens_max
    if most is not None and tokens - local > most:
        end = (local + most) // groups.chunk_tokens * groups.chunk_tokens
        tokens = groups.hit_tokens(answer.present, end + 1) if answer.present else 0
    return tokens - local


def note_chunk_keys(
    state: RequestState, answer: LookupAnswer, lookup: PrefixLookup, usable: int, chunk_tokens: int
) -> None:
    """Set the keys of the chunks that a load of ``usable`` tokens takes, and where its tail ends."""
    save, load, request_id = state.current_save, state.load, state.request.request_id
    chunk_keys = lookup.chunk_keys(request_id)
    load.tail_end = 0
    if save is not None and (answer.tail or chunk_keys is None or save.apart):
        chunk_keys, load.tail_end = save.chunk_keys, save.tokens if save.tail_tokens else 0
    elif answer.tail and chunk_keys is not None:
        whole = state.tail_end // chunk_tokens
        chunk_keys = [*chunk_keys[:whole], *lookup.tail(request_id)]
        end = load.local_tokens + usable
        load.tail_end = end if end > whole * chunk_tokens else 0
    load.chunk_keys = chunk_keys


class LoadWays:
    """Chooses the way of each load. Used on the engine's thread only.

    Args:
        sampling_state: The engine runs logits processors that may keep state.

    Attributes:
        in_step: ``asynchronous_fetch: false`` is configured: steps that compute on loads wait for them.
        by_layers: Loads can go layer by layer.
    """

    def __init__(
        self, config: HostConfig, groups: Groups | None, slower: SlowerPaths, *, sampling_state: bool = False
    ) -> None:
        self.in_step = not config.asynchronous_fetch
        self._layers_first = config.layer_order is True
        self._several_groups = groups is not None and not groups.one
        self._slower = slower
        self._sampling_state = sampling_state
        self.by_layers = False

    def goes_in_step(self, request: Any) -> bool:
        """Tell if the step that computes on a load waits for all of it first."""
        return self.in_step and not self._why_not_in_step(request)

    def not_by_layers(self, request: Any, *, pending: bool, partial_block: bool, others: str) -> str:
        """Return the reason why a load cannot go layer by layer; empty if it can.

        Args:
            partial_block: It ends with a tail, within a block. vLLM writes the KV of the next tokens into that block
                before it waits for the layer, so the tail, which has no KV of them, would overwrite them.
            others: Reason why it cannot go beside other requests and loads, or empty.
        """
        if reason := self._why_not_in_step(request):
            return reason
        if pending:
            return "pending_chunks"
        if partial_block:
            return "partial_block"
        return others

    def count_lookup(self, answer: LookupAnswer) -> None:
        """Count a lookup that could not wait for chunks that another engine is storing."""
        if answer.unpublished:
            self._slower.add("no_publishing", _DETAILS["no_publishing"])

    def count_load(self, request: Any, not_layerwise: str) -> None:
        """Count a load that takes a slower way than configured.

        ``layer_order: auto`` configures no way of a load, so a whole one is not slower than configured.
        """
        reason = self._why_not_in_step(request) if self.in_step else ""
        if not_layerwise and self.by_layers:
            self._slower.counts.add("whole_loads", reason=not_layerwise)
            if self._layers_first and not_layerwise not in (WHOLE_IS_FASTER, TIME_UNKNOWN):
                reason = reason or not_layerwise
        if reason:
            self._slower.add(reason, _DETAILS[reason])

    def _why_not_in_step(self, request: Any) -> str:
        """Return the reason why no step may compute on this request's load before the load has ended, or empty.

        vLLM discards what such a step sampled when the load falls short, and runs the step again. State that the step
        advanced, and that vLLM's model runner does not reset, would change the request's tokens.
        """
        if self._several_groups:  # with several groups vLLM cannot recompute single blocks
            return "several_groups"
        sampling = request.sampling_params
        if sampling is not None and sampling.seed is not None:
            return "seed"
        if self._sampling_state or getattr(sampling, "thinking_token_budget", None) is not None:
            return "sampling_state"
        return ""
