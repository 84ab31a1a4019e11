"""Loads: what each takes of each KV cache group, and which way it goes.

It goes beside other requests, within the step that computes on it, or by layers in that step. The scheduler's half
decides, counts each load that goes a slower way than configured, and writes the way into the
:class:`~host_control.vllm.metadata.LoadOperation`. The worker's half follows that and has no rule of its own.
"""

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any, Final

from host_control.config import HostConfig
from host_control.lookup import LookupAnswer
from host_control.vllm.groups import Group, Groups
from host_control.vllm.metadata import GroupLoad
from host_control.vllm.metrics import SlowerPaths
from host_control.vllm.tracked import Tracked

__all__ = ["LoadWays", "group_loads", "has_own_logits_processors"]

_DETAILS: Final = {
    "several_groups": "asynchronous_fetch: false is configured, and this engine has several KV cache groups, windows, "
    "recurrent state or draft layers; its requests wait for their loads beside others",
    "seed": "the outcome of a request with a seed depends on its random generator, which vLLM does not set back when a "
    "load falls short; such requests wait for their loads beside others",
    "sampling_state": "a thinking token budget or a custom logits processor keeps state, which vLLM does not set back "
    "when a load falls short; such requests wait for their loads beside others",
    "beyond_fetch_buffer": "layer_order is configured, and a load has more chunks than fetch_buffer_bytes holds; it "
    "goes chunk by chunk. Raise fetch_buffer_bytes, or chunk_tokens where it holds 128 chunks already",
    "other_requests": "layer_order is configured, and other requests run or load; such loads go chunk by chunk, so "
    "that the others do not wait for them",
    "shard_layout": "layer_order is configured, and the records are of an engine with another number of tensor-parallel"
    " ranks or pipeline stages; they go chunk by chunk",
    "preempted": "layer_order is configured, and a load brings back what a preempted request held, which is stored "
    "apart from the records that others share; it goes chunk by chunk",
    "pending_chunks": "layer_order is configured, and a load waits for chunks that another engine is still storing, "
    "or that are in object storage alone; it goes chunk by chunk",
    "no_publishing": "a request is to wait for chunks that another engine is storing, and storage publishes no chunks "
    "(Redis, Valkey and clusters of them do not); it loads what is stored when it looks. Use a storage node of "
    "ShadowServe, or a proxy that carries kv_transfer_params (docs/disaggregation.md)",
}
"""What each reason's log line says. docs/combinations.md has the same reasons."""


def has_own_logits_processors(vllm_config: Any) -> bool:
    """Return whether the engine runs logits processors that are not vLLM's own, which may keep state."""
    model = getattr(vllm_config, "model_config", None)
    return bool(getattr(model, "logits_processors", None) or entry_points(group="vllm.logits_processors"))


def group_loads(
    tracked: Tracked, groups: Sequence[Group], tables: Sequence[list[int]], end_tokens: int, chunk_tokens: int
) -> dict[int, GroupLoad]:
    """Return what a load up to ``end_tokens`` takes of each group, by the group's index.

    Raises:
        ValueError: a block that the engine expects to be filled is in no record.
    """
    assert tracked.offered is not None, "blocks for a load that was not offered"
    loads, tail = {}, end_tokens == tracked.offered_tail
    for group in groups:
        chunks, blocks = group.wanted(tables[group.index], tracked.local_tokens, end_tokens, tail=tail)
        chunk_keys = [tracked.offered[chunk] for chunk in chunks.tolist()]
        numbers = (chunks - tracked.local_tokens // chunk_tokens).tolist()
        loads[group.index] = GroupLoad(chunk_keys, blocks.reshape(-1).tolist(), numbers)
    return loads


class LoadWays:
    """Decides which way each load goes. On the engine's thread alone.

    Args:
        config: of the host.
        groups: of the engine; ``None`` where the plugin is off.
        slower: counts the loads that go a slower way than configured.
        sampling_state: the engine runs logits processors that may keep state.

    Attributes:
        in_step: ``asynchronous_fetch: false`` is configured: steps that compute on loads wait for them.
        layerwise_chunks: of the longest load that can go by layers; 0 where none can.
    """

    def __init__(
        self, config: HostConfig, groups: Groups | None, slower: SlowerPaths, *, sampling_state: bool = False
    ) -> None:
        self.in_step = not config.asynchronous_fetch
        self._several_groups = groups is not None and not groups.one
        self._slower = slower
        self._sampling_state = sampling_state
        self.layerwise_chunks = 0

    def goes_in_step(self, request: Any) -> bool:
        """Return whether the step that computes on a load waits for all of it first."""
        return self.in_step and not self._kept_beside(request)

    def not_by_layers(self, request: Any, *, pending: bool, other_records: str, alone: bool) -> str:
        """Return why a load may not go by layers, however short it is, in an engine where some do; empty where it may.

        Args:
            request: of vLLM.
            pending: other engines still store some of its chunks.
            other_records: reason for which its records are not those that this engine stores for others; or empty.
            alone: no other request runs or loads.
        """
        if reason := self._kept_beside(request):
            return reason
        if pending:
            return "pending_chunks"
        if other_records:
            return other_records
        return "" if alone else "other_requests"

    def looked_up(self, answer: LookupAnswer) -> None:
        """Count a lookup that could not wait for chunks that another engine is storing."""
        if answer.unpublished:
            self._slower.add("no_publishing", _DETAILS["no_publishing"])

    def begin(self, request: Any, why_not_by_layers: str) -> None:
        """Count a load that begins, where it goes a slower way than configured."""
        reason = self._kept_beside(request) if self.in_step else ""
        if not reason and self.layerwise_chunks:
            reason = why_not_by_layers
        if reason:
            self._slower.add(reason, _DETAILS[reason])

    def _kept_beside(self, request: Any) -> str:
        """Return why no step may compute on this request's load before it has ended; empty where one may.

        vLLM drops what that step has sampled when the load falls short, and runs it again. Whatever else the step has
        moved on by then, and vLLM's model runner does not set back, would change the request's tokens.
        """
        if self._several_groups:  # of these vLLM takes no single blocks that a load left out
            return "several_groups"
        sampling = request.sampling_params
        if sampling is not None and sampling.seed is not None:
            return "seed"
        if self._sampling_state or getattr(sampling, "thinking_token_budget", None) is not None:
            return "sampling_state"
        return ""
