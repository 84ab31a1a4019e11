"""What a request, and this engine's place among others, say of handing prompts over: ``kv_transfer_params``.

A proxy in front of two pools has a prompt computed by an engine of the one and sends the same request to the other.
Proxies after vLLM's own example say so in the request (``do_remote_decode``, then ``do_remote_prefill``) and carry what
the first engine answers to the second one. Those for shared storage, llm-d's, say nothing: there the configuration does
(``host.pd_role``). Whatever a proxy has put there besides is passed over, and what makes no sense counts as absent.
"""

from collections.abc import Mapping
from typing import Any, Final

from host_control.config import HostConfig
from host_control.disaggregation import Disaggregation
from host_control.vllm.metrics import SlowerPaths
from shadowserve.proto import dataplane_pb2 as pb

__all__ = [
    "ENDS_WITH_CHUNK",
    "LET_GO",
    "TAILLESS",
    "VERSION",
    "count_reach",
    "count_tail",
    "disaggregation_of",
    "reply_of",
]

ENDS_WITH_CHUNK: Final = "with windows or states no hit may end with a prompt, and this one ends with a whole chunk"
TAILLESS: Final = "models with states, and engines that compute drafts, have no records of prompts' tails"
LET_GO: Final = "vLLM let go of blocks of a window before the prompt's tail was stored"
"""Why a tail is not shared."""

VERSION: Final = 1
"""Of what is under ``shadowserve``."""


def disaggregation_of(
    request: Any,
    config: HostConfig,
    chunk_tokens: int,
    block_tokens: int,
    *,
    fetch: bool,
    store: bool,
    to_the_end: bool = True,
) -> Disaggregation:
    """Return what a request that arrives is to be handed over with.

    Args:
        request: of vLLM.
        config: of the host.
        chunk_tokens: tokens in a chunk.
        block_tokens: tokens in whose multiples tails end; 0 of an engine whose prompts have no tails.
        fetch, store: whether this engine does either at all.
        to_the_end: whether a tail may hold the prompt's last token.
    """
    params = _mapping(request.kv_transfer_params)
    load_most, store_most = _count(params.get("max_load_tokens")), _count(params.get("max_offload_tokens"))
    gives = store and store_most != 0 and (config.pd_role == "prefill" or params.get("do_remote_decode") is True)
    takes = fetch and load_most != 0 and (config.pd_role == "decode" or params.get("do_remote_prefill") is True)
    if not (params or gives or takes):
        return _PLAIN
    told = _mapping(params.get("shadowserve"))
    if told.get("v") != VERSION:
        told = {}
    expected = min(_count(told.get("tokens")) or 0, request.num_prompt_tokens)
    deadline_ms = _count(told.get("deadline_ms"))
    whole = request.num_prompt_tokens // chunk_tokens * chunk_tokens
    end = expected if expected > whole and block_tokens and expected % block_tokens == 0 else request.num_prompt_tokens
    end = min(end, request.num_prompt_tokens - (not to_the_end))
    tail = max(end - whole, 0) // block_tokens * block_tokens if block_tokens and (gives or takes) else 0
    return Disaggregation(
        publishes=config.pd_timeout_s if gives else 0.0,
        waits=min(config.pd_timeout_s, deadline_ms / 1000 if deadline_ms else 60.0) if takes else 0.0,
        expected_tokens=expected if takes else 0,
        tail_tokens=tail,
        load_tokens_max=load_most,
        store_tokens_max=store_most,
    )


def reply_of(request: Any, config: HostConfig, stored_tokens: int) -> dict[str, Any] | None:
    """Return what the proxy is told for the engine that goes on; ``None`` where it has not asked, or nothing is stored.

    Args:
        request: that has ended.
        config: of the host.
        stored_tokens: leading tokens that are stored, or on their way.
    """
    if _mapping(request.kv_transfer_params).get("do_remote_decode") is not True or not stored_tokens:
        return None
    told = {"v": VERSION, "tokens": stored_tokens, "deadline_ms": int(1000 * config.pd_timeout_s)}
    return {"do_remote_prefill": True, "do_remote_decode": False, "shadowserve": told}


def count_tail(slower: SlowerPaths, disaggregation: Disaggregation, why: str, chunk_tokens: int) -> None:
    """Count a prompt whose tail is not shared between its engines, if it is computed for another one at all."""
    if disaggregation.publishes or disaggregation.waits:
        slower.add(
            "prompt_tail_not_shared",
            f"{why}, so the decode engine computes up to {chunk_tokens} tokens, and not only those behind the prompt's "
            "last block; see docs/disaggregation.md",
        )


def count_reach(slower: SlowerPaths, disaggregation: Disaggregation, reach: int) -> None:
    """Count a prompt that is computed for another engine which does not hear of it through the store.

    Args:
        slower: to count in.
        disaggregation: of the prompt.
        reach: of what its engine publishes, a ``Reach`` of the wire.
    """
    if reach == pb.REACH_DATA_PLANE and disaggregation.publishes:
        slower.add(
            "pages_stay_here",
            "with host.pages what a prefill engine stores stays in the tiers of its data plane, and decode engines of "
            "other data planes compute it; give both engines one data plane, or switch host.pages off",
        )
    elif reach == pb.REACH_NONE and disaggregation.publishes:
        slower.add(
            "no_publishing",
            "storage publishes no chunks (Redis, Valkey and clusters of them), so a decode engine takes what it finds "
            "there, or waits for what its proxy says; use a storage node of ShadowServe for P/D disaggregation",
        )


_PLAIN: Final = Disaggregation()


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None
