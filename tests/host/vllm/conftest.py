"""Fixtures of the plugin's tests without an engine."""

from collections.abc import Callable
from typing import Any

import pytest
from scheduler_support import Scene, groups_of, kv_cache_manager
from scripted import ScriptedDataPlane


@pytest.fixture
def make_scene(make_side: Callable[..., Any], plane: ScriptedDataPlane) -> Callable[..., Scene]:
    """Return a function that starts the scheduler half; ``specs``: several KV cache groups, with vLLM's rules."""

    def make(*specs: Any, drafts: bool = False, eagle: tuple[int, ...] = (), **options: Any) -> Scene:
        if specs:
            options["groups"] = groups_of(*specs, drafts=drafts)
            options["groups"].bind(kv_cache_manager(*specs, eagle=eagle, drafts=drafts and bool(eagle)))
        return Scene(make_side(**options), plane)

    return make


@pytest.fixture
def scene(make_scene: Callable[..., Scene]) -> Scene:
    return make_scene()
