"""The fetch-or-recompute policy as LMCache's ``--kv-load-policy``, which versions after 0.5.6 have."""

from collections.abc import Mapping
from typing import Any, Final

from lmcache.v1.multiprocess.kv_load_policy import DefaultKVLoadPolicy, KVLoadContext

from host_control.lmcache.choice import Choice

_COMPUTED: Final = "lmcache.hint.engine_computed_tokens"


class FetchOrRecompute(DefaultKVLoadPolicy):  # type: ignore[misc]
    """Loads where that is predicted to be faster, and never what a request asks to skip.

    ``--runtime-plugin-config`` has the times; see :class:`~host_control.lmcache.choice.Choice`.
    """

    def __init__(self, configs: Mapping[str, Any]) -> None:
        super().__init__(configs)
        self._choice = Choice(configs)

    def should_load(self, ctx: KVLoadContext) -> bool:
        """Return whether the server should serve this lookup."""
        computed = (ctx.request_configs or {}).get(_COMPUTED, 0)
        known = computed if isinstance(computed, int) and computed > 0 else 0
        return super().should_load(ctx) and self._choice.should_load(ctx.num_lookup_tokens, known, ctx.chunk_size)
