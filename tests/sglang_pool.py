"""A small host pool, and what SGLang passes to a storage backend of HiCache beside it."""

import hashlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from shadowserve.keys import ModelIdentity

PAGE, LAYERS, HEADS, SIZE, PAGES = 16, 3, 2, 8, 160
IDENTITY = ModelIdentity(model="m", dtype="bfloat16", chunk_tokens=PAGE)


class MHATokenToKVPoolHost:
    """A host pool of K and V with random values."""

    head_num, start_layer, layer_num, page_size, dtype = HEADS, 0, LAYERS, PAGE, torch.bfloat16
    kinds, row = (2,), (HEADS, SIZE)

    def __init__(
        self, layout: str = "page_first_direct", seed: int = 0, page_size: int = PAGE, head_size: int = SIZE
    ) -> None:
        self.layout, self.page_size = layout, page_size
        row = (*self.row[:-1], self.row[-1] // SIZE * head_size)
        tokens = PAGES * PAGE
        shape = {
            "page_first_direct": (tokens // page_size, LAYERS, page_size),
            "page_first": (tokens, LAYERS),
            "layer_first": (LAYERS, tokens),
        }[layout]
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(-9, 9, (*self.kinds, *shape, *row), dtype=torch.int8, generator=generator)
        self.kv_buffer = values.to(self.dtype)

    def page(self, number: int) -> torch.Tensor:
        """Return one page's values, layer first, whatever the pool's layout is."""
        tokens = slice(number * self.page_size, (number + 1) * self.page_size)
        buffer = self.kv_buffer if self.kinds else self.kv_buffer[None]
        if self.layout == "page_first_direct":
            return buffer[:, number]
        return buffer[:, tokens].transpose(1, 2) if self.layout == "page_first" else buffer[:, :, tokens]


class MLATokenToKVPoolHost(MHATokenToKVPoolHost):
    """A host pool of latents."""

    kinds, row = (), (1, HEADS * SIZE)


def chain(count: int, seed: str = "", page: int = PAGE) -> list[str]:
    """Return the hashes of a prompt's pages."""
    hashes, last = [], f"{seed} {page}".encode()
    for index in range(count):
        last = hashlib.sha256(last + index.to_bytes(4, "little")).digest()
        hashes.append(last.hex())
    return hashes


def indices(pool: Any, pages: Sequence[int]) -> torch.Tensor:
    """Return the token indices of pages, as SGLang passes them."""
    size = pool.page_size
    return torch.tensor([page * size + token for page in pages for token in range(size)])


def after(keys: Sequence[str]) -> Any:
    """Return SGLang's description of a call that comes after some pages."""
    return SimpleNamespace(prefix_keys=list(keys) or None, extra_info=None)


def ranks(**changes: Any) -> Any:
    extra = {"backend_name": "shadowserve", "module_path": "host_control.sglang", "interface_v1": 1}
    described = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_size": 1, "dcp_size": 1}
    return SimpleNamespace(**described | changes | {"extra_config": extra | changes.get("extra_config", {})})
