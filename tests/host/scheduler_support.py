"""Scripted requests and steps for the connector's scheduler half."""

from types import SimpleNamespace
from typing import Any

from machine import wait_for
from scripted import ScriptedDataPlane

from shadowserve.keys import Extra, chain_links, record_keys

BLOCK, CHUNK = 16, 64
MODEL = b"m" * 32
NAMESPACES = {0: b"0" * 32, 1: b"1" * 32}


class Request(SimpleNamespace):
    """As much of vLLM's request as the connector reads."""

    def __init__(self, request_id: str, tokens: list[int], **attributes: Any) -> None:
        given: dict[str, Any] = dict(
            request_id=request_id,
            prompt_token_ids=tokens,
            all_token_ids=list(tokens),
            prompt_embeds=None,
            pooling_params=None,
            lora_request=None,
            mm_features=[],
            cache_salt=None,
            resumable=False,
            skip_reading_prefix_cache=False,
            num_preemptions=0,
            num_computed_tokens=0,
        )
        super().__init__(**{**given, **attributes})

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


def step(
    new: dict[str, tuple[int, int]] | None = None,
    cached: dict[str, tuple[int, int]] | None = None,
    tables: dict[str, list[int]] | None = None,
) -> Any:
    """Return a scheduler output: request -> (computed, scheduled) tokens; block tables by default 1000, 1001, ..."""
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        num_scheduled_tokens={name: scheduled for name, (_, scheduled) in {**new, **cached}.items()},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed) for name, (computed, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[computed for computed, _ in cached.values()]
        ),
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=lambda name: ((tables or {}).get(name, list(range(1000, 1100))),)
        ),
    )


def links(tokens: list[int], extra: Extra | None = None) -> list[bytes]:
    return chain_links(MODEL, tokens, chunk_tokens=CHUNK, extra=extra)


def keys(rank: int, tokens: list[int]) -> list[bytes]:
    return record_keys(NAMESPACES[rank], links(tokens))


def matched(side: Any, request: Request, local: int = 0) -> int:
    found: list[int | None] = []

    def answered() -> bool:
        found.append(side.matched_tokens(request, local))
        return found[-1] is not None

    wait_for(answered)
    return int(found[-1] or 0)


def arrive(side: Any, plane: ScriptedDataPlane, tokens: list[int], stored: int = 0, **attributes: Any) -> Request:
    request = Request(attributes.pop("name", "r"), tokens, **attributes)
    for rank in NAMESPACES:
        plane.records.update(dict.fromkeys(keys(rank, tokens)[:stored], b""))
    side.on_new_request(request)
    return request


def report(*arguments: Any, **named: Any) -> Any:
    """Return what the workers report; vLLM is loaded only here."""
    from host_control.vllm.metadata import WorkerReport

    return WorkerReport(*arguments, **named)


TOKENS = list(range(5 * CHUNK + 10))
