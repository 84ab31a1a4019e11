"""P/D disaggregation as vLLM's requests carry it: ``kv_transfer_params``.

A proxy in front of two pools lets an engine of one pool compute a prompt, and sends the same request to an engine of
the other. Proxies after vLLM's own example say so in the request (``do_remote_decode``, then ``do_remote_prefill``) and
carry the first engine's reply to the second. Proxies for shared storage, such as llm-d's, say nothing: there the
configuration does (``host.pd_role``). Other entries are ignored, and invalid ones count as absent.
"""

from collections.abc import Mapping
from typing import Any, Final

from host_control.config import HostConfig
from host_control.disaggregation import Disaggregation
from host_control.vllm.metrics import SlowerPaths
from shadowserve.proto import dataplane_pb2 as pb

ENDS_WITH_CHUNK: Final = "with windows or states no hit may end with a prompt, and this one ends with a whole chunk"
TAILLESS: Final = "models with states, and engines that compute drafts, have no records of prompts' tails"
LET_GO: Final = "vLLM freed blocks of a window before the prompt's tail was stored"
"""Why a tail is not shared."""

VERSION: Final = 1
"""Version of the entry ``shadowserve``."""

_PLAIN: Final = Disaggregation()
_WAIT_S: Final = 60.0
"""Wait of a decode engine whose proxy gives no deadline."""


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
    """Return a new request's disaggregation.

    Args:
        block_tokens: Tails end with a multiple of this; 0 for an engine whose prompts have no tails.
        to_the_end: A tail may hold the prompt's last token.
    """
    params = _mapping(request.kv_transfer_params)
    load_most, store_most = _count(params.get("max_load_tokens")), _count(params.get("max_offload_tokens"))
    publishes = store and store_most != 0 and _has_role(config, params, "prefill", "do_remote_decode")
    waits = fetch and load_most != 0 and _has_role(config, params, "decode", "do_remote_prefill")
    if not (params or publishes or waits):
        return _PLAIN
    reply = _mapping(params.get("shadowserve"))
    if reply.get("v") != VERSION:
        reply = {}
    expected = min(_count(reply.get("tokens")) or 0, request.num_prompt_tokens)
    deadline_ms = _count(reply.get("deadline_ms"))
    wait_s = min(config.pd_timeout_s, deadline_ms / 1000 if deadline_ms else _WAIT_S)
    tail = 0
    if block_tokens and (publishes or waits):
        tail = _tail_tokens(request.num_prompt_tokens, expected, chunk_tokens, block_tokens, to_the_end=to_the_end)
    return Disaggregation(
        publishes=config.pd_timeout_s if publishes else 0.0,
        waits=wait_s if waits else 0.0,
        expected_tokens=expected if waits else 0,
        tail_tokens=tail,
        load_tokens_max=load_most,
        store_tokens_max=store_most,
    )


def _has_role(config: HostConfig, params: Mapping[str, Any], role: str, param: str) -> bool:
    return config.pd_role == role or params.get(param) is True


def _tail_tokens(prompt: int, expected: int, chunk_tokens: int, block_tokens: int, *, to_the_end: bool) -> int:
    """Return the tokens of a prompt's tail: whole blocks behind its last chunk, up to what the other engine stores."""
    whole = prompt // chunk_tokens * chunk_tokens
    end = expected if expected > whole and expected % block_tokens == 0 else prompt
    end = min(end, prompt - (not to_the_end))
    return max(end - whole, 0) // block_tokens * block_tokens


def reply_of(request: Any, config: HostConfig, stored_tokens: int) -> dict[str, Any] | None:
    """Return the reply to the proxy for the decode engine; None where it did not ask, or nothing is stored."""
    if _mapping(request.kv_transfer_params).get("do_remote_decode") is not True or not stored_tokens:
        return None
    reply = {"v": VERSION, "tokens": stored_tokens, "deadline_ms": int(1000 * config.pd_timeout_s)}
    return {"do_remote_prefill": True, "do_remote_decode": False, "shadowserve": reply}


def count_tail(slower: SlowerPaths, disaggregation: Disaggregation, why: str, chunk_tokens: int) -> None:
    """Count a prompt that two engines share, and its tail not."""
    if disaggregation.publishes or disaggregation.waits:
        slower.add(
            "prompt_tail_not_shared",
            f"{why}, so the decode engine computes up to {chunk_tokens} tokens, and not only those behind the prompt's "
            "last block; see docs/guides/disaggregation.md",
        )


def count_reach(slower: SlowerPaths, disaggregation: Disaggregation, reach: int) -> None:
    """Count a published prompt that its decode engine does not learn of through storage."""
    if reach == pb.REACH_DATA_PLANE and disaggregation.publishes:
        slower.add(
            "pages_stay_here",
            "with host.pages the chunks of a prefill engine stay in the tiers of its data plane, and decode engines of "
            "other data planes compute them; give both engines one data plane, or switch host.pages off",
        )
    elif reach == pb.REACH_NONE and disaggregation.publishes:
        slower.add(
            "no_publishing",
            "storage publishes no chunks (Redis, Valkey and clusters of them), so a decode engine loads the chunks "
            "that are stored, or waits for those that its proxy names; use a storage node of ShadowServe for P/D "
            "disaggregation",
        )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None
