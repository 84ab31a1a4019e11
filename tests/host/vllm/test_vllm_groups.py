"""KV cache groups, compared with vLLM's own specs, rules and block tables."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from scheduler_support import full, groups_of, kv_cache_manager, local, state, window

from host_control.layouts import NOWHERE
from shadowserve.pieces import Flags

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

BLOCK, CHUNK, CHUNKS = 32, 256, 6


@dataclass(frozen=True)
class Model:
    """A model with KV cache groups of given kinds."""

    kinds: Sequence[tuple[str, int]]
    eagle: Sequence[int] = ()
    drafts: bool = False
    hash_block: int = 0

    def specs(self) -> list[Any]:
        def spec(index: int, kind: str, size: int) -> Any:
            if kind == "full":
                return full(block_size=size, head_size=8 * (1 + index))
            if kind == "state":
                return state(block_size=size)
            return (window if kind == "window" else local)(size, block_size=BLOCK)

        return [spec(index, *kind) for index, kind in enumerate(self.kinds)]

    def groups(self) -> Any:
        return groups_of(*self.specs(), drafts=self.drafts, chunk_tokens=CHUNK)

    def manager(self) -> Any:
        return kv_cache_manager(*self.specs(), eagle=self.eagle, drafts=self.drafts, hash_block=self.hash_block)


FULL = ("full", BLOCK)
MODELS = {
    **{f"full and a window of {tokens}": Model([FULL, ("window", tokens)]) for tokens in (32, 128, 512, 1000)},
    "full and two windows": Model([FULL, ("window", 100), ("window", 700)]),
    "full and states": Model([FULL, ("state", BLOCK)]),
    "full, a window and states": Model([FULL, ("window", 70), ("state", BLOCK)]),
    "full of two head sizes": Model([FULL, FULL]),
    "full of two block sizes": Model([FULL, ("full", 64)]),
    "full and chunked local": Model([FULL, ("local", 128)]),
    "a window alone": Model([("window", 128)]),
    "two windows": Model([("window", 128), ("window", 300)]),
    "states alone": Model([("state", BLOCK)]),
    "states with shorter hashes": Model([FULL, ("state", BLOCK)], hash_block=16),
    "a draft's full alone": Model([FULL], eagle=[0], drafts=True),
    "full, a window, a draft's full": Model([FULL, ("window", 128), FULL], eagle=[2], drafts=True),
    "full, a draft's window": Model([FULL, ("window", 100)], eagle=[1], drafts=True),
    "full, a window, an unmarked draft layer": Model([FULL, ("window", 128)], drafts=True),
    "full, states, a draft's full": Model([FULL, ("state", BLOCK), FULL], eagle=[2], drafts=True),
}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))


def request(manager: Any, tokens: int, name: str = "r") -> Any:
    """Return a vLLM request. Prompts of all lengths are prefixes of each other."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(manager.coordinator.block_pool.hash_block_size, sha256)
    prompt = [number * 7919 % 50000 for number in range(tokens)]
    return Request(name, prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher)


def cache(manager: Any, one: Any, groups: Any, present: Sequence[Flags]) -> None:
    """Put exactly the blocks in these records into vLLM's own block pool."""
    pool = manager.block_pool
    for group, flags in zip(groups.groups, present, strict=True):
        for chunk in np.flatnonzero(flags).tolist():
            end = (chunk + 1) * group.chunk_blocks
            for place in range(end - group.record_blocks, end):
                blocks = [pool.null_block] * place + pool.get_new_blocks(1)
                pool.cache_full_blocks(one, blocks, place, place + 1, group.block_tokens, group.index)


def drawn(draw: random.Random, groups: Any) -> tuple[int, list[Flags]]:
    """Return a prompt's length, and many, few or all stored chunks of each group."""
    tokens = CHUNKS * CHUNK + draw.choice([0, 1, BLOCK, BLOCK + 1, 5 * BLOCK, draw.randrange(CHUNK)])
    count = tokens // groups.chunk_tokens
    share = draw.choice([0.3, 0.8, 0.95, 1.0])
    return tokens, [np.array([draw.random() < share for _ in range(count)], np.bool_) for _ in groups.groups]


@every_model
def test_a_hit_is_as_long_as_in_vllms_own_block_pool(model: Model) -> None:
    draw = random.Random(5)
    groups, hits = model.groups(), []
    for _ in range(25):
        tokens, present = drawn(draw, groups)
        manager = model.manager()
        groups.bind(manager)
        one = request(manager, tokens)
        cache(manager, one, groups, present)
        hit = groups.hit_tokens(present, tokens)
        _, expected, _ = manager.get_computed_blocks(one)
        if groups._plain:  # the hit may end with any token, vLLM's hit with a block
            hit -= hit % math.lcm(*(group.block_tokens for group in groups.groups))
        assert hit == expected, (tokens, [flags.tolist() for flags in present])
        hits.append(hit)
    assert len(set(hits)) > 2 and max(hits) > 500, "a rule with a constant result tests nothing"


def test_without_vllms_rules_only_full_attention_has_hits() -> None:
    everything = [np.ones(4, np.bool_)] * 2
    assert Model([FULL, ("window", 100)]).groups().hit_tokens(everything, 4 * CHUNK) == 0
    assert Model([FULL, FULL]).groups().hit_tokens(everything, 4 * CHUNK) == 4 * CHUNK - 1


@every_model
@pytest.mark.parametrize("computed", [0, 300, 700])
def test_a_load_fills_exactly_the_blocks_that_vllm_expects(model: Model, computed: int) -> None:
    """No shared block, and no null block."""
    draw = random.Random(7)
    groups, loads = model.groups(), 0
    for _ in range(12):
        tokens, present = drawn(draw, groups)
        manager = model.manager()
        groups.bind(manager)
        if computed:  # by another request; its blocks are in the engine's own prefix cache
            other = request(manager, computed, "other")
            assert manager.allocate_slots(other, computed) is not None
            manager.free(other)
        one = request(manager, tokens)
        blocks, own, _ = manager.get_computed_blocks(one)
        hit = groups.hit_tokens(present, tokens)
        if hit <= own:
            continue
        loads += 1
        shared = {block.block_id for held in blocks.blocks for block in held}
        assert manager.allocate_slots(
            one, 0, own, blocks, num_external_computed_tokens=hit - own, delay_cache_blocks=True
        )
        tables = manager.get_block_ids("r")
        for group in groups.groups:
            table = tables[group.index][: -(-hit // group.block_tokens)]
            expected = {place: block for place, block in enumerate(table) if block and block not in shared}
            chunks, rows = group.wanted(tables[group.index], own, hit)
            places = (chunks[:, None] + 1) * group.chunk_blocks - group.record_blocks + np.arange(group.record_blocks)
            pairs = zip(places.reshape(-1).tolist(), rows.reshape(-1).tolist(), strict=True)
            assert {place: block for place, block in pairs if block != NOWHERE} == expected
            assert (rows != NOWHERE).any(axis=1).all(), "no useless fetch of a chunk"
            flags = dict(zip(groups.groups, present, strict=True))[group]
            assert flags[chunks].all(), "all loaded chunks were stored at lookup"
    assert loads > 2


def computed_in_steps(draw: random.Random, manager: Any, one: Any, groups: Any, held: int) -> list[list[int]]:
    """Let a request compute tokens; return its block tables with all blocks that it ever had."""
    tables: list[list[int]] = [[] for _ in groups.groups]
    while one.num_computed_tokens < held:
        new = min(draw.choice([1, 7, 300]), held - one.num_computed_tokens)
        blocks = manager.allocate_slots(one, new).get_block_ids()
        for group, table in zip(groups.groups, tables, strict=True):
            table += blocks[group.index]
        one.num_computed_tokens += new
    return tables


def positions(group: Any, chunk: int, tail_end: int) -> list[int]:
    """Return the table indexes of the blocks in the record of a chunk or a tail; -1 for none."""
    if tail_end:
        return [int(number) - 1 for number in group.tail(range(1, CHUNKS * CHUNK), tail_end)]
    end = (chunk + 1) * group.chunk_blocks
    return list(range(end - group.record_blocks, end))


FOLLOWED = {name: model for name, model in MODELS.items() if not model.drafts and "states" not in name}


@pytest.mark.parametrize("model", FOLLOWED.values(), ids=list(FOLLOWED))
def test_saved_blocks_are_those_that_vllm_expects_after_a_resume(model: Model) -> None:
    draw, ends = random.Random(8), []
    groups = model.groups()
    assert groups.followed
    for _ in range(60):
        held, manager = draw.randrange(CHUNK, (CHUNKS - 1) * CHUNK), model.manager()
        groups.bind(manager)
        one = request(manager, held + 1)
        tables = computed_in_steps(draw, manager, one, groups, held)
        if draw.random() < 0.5:  # as for a request that preempts itself
            manager.coordinator.remove_skipped_blocks("r", held)
        now = manager.get_block_ids("r")
        kept = [groups.kept(place, table, held) for place, table in enumerate(tables)]
        for group, table in zip(groups.groups, kept, strict=True):
            assert len(table) == len(now[group.index])
            assert all(block in (0, own) for block, own in zip(table, now[group.index], strict=True)), (
                "now used by other requests"
            )
        end = groups.saved_tokens(held, held)
        whole, size = divmod(end, CHUNK)
        assert 0 <= held - end < (CHUNK if not size else math.lcm(*(group.block_tokens for group in groups.groups)))
        ends.append(size)
        present = [np.ones(whole + bool(size), np.bool_) for _ in groups.groups]
        assert groups.hit_tokens(present, end + 1, size) == end
        for flags in present if size else ():
            flags[-1] = False
            if not any(kind == "local" for kind, _ in model.kinds):  # local attention may need no block
                assert groups.hit_tokens(present, end + 1, size) == whole * CHUNK, "a group lacks its tail"
            flags[-1] = True
        again = model.manager()
        groups.bind(again)
        back = request(again, held + 1)
        nothing, own, _ = again.get_computed_blocks(back)
        assert own == 0
        assert again.allocate_slots(
            back, 0, 0, nothing, num_external_computed_tokens=end, delay_cache_blocks=True
        )  # fmt: skip
        filled = again.get_block_ids("r")
        for group, table in zip(groups.groups, kept, strict=True):
            own_table = filled[group.index][: -(-end // group.block_tokens)]
            chunks, rows = group.wanted(filled[group.index], 0, end, tail=size > 0)
            found: dict[int, int] = {}
            for chunk, row in zip(chunks.tolist(), rows.tolist(), strict=True):
                tail_end = end if chunk == whole else 0
                for place, block in zip(positions(group, chunk, tail_end), row, strict=True):
                    if block != NOWHERE:
                        assert not tail_end or table[place], "the saved table has it"
                        found[place] = block
            assert found == {place: block for place, block in enumerate(own_table) if block}
    # A window that is not a multiple of a block frees the first block that a hit ending with a block needs.
    in_blocks = all(size % BLOCK == 0 for _, size in model.kinds)
    assert sum(size > 0 for size in ends) > (40 if in_blocks else 2), "tails, and not only chunks"


def test_a_block_that_no_record_holds_fails_the_load() -> None:
    (_, group) = Model([FULL, ("window", 64)]).groups().groups
    assert group.record_blocks == 2
    table = list(range(1, 17))
    with pytest.raises(ValueError, match="group 1: the load needs blocks"):
        group.wanted(table, 0, 2 * CHUNK)
    chunks, rows = group.wanted([0] * 14 + [15, 16], 0, 2 * CHUNK)
    assert (chunks.tolist(), rows.tolist()) == ([1], [[15, 16]])


@pytest.mark.parametrize("tokens", [32, 128, 512, 1000])
@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize("chunk", [256, 512, 1024])
def test_records_of_windows_hold_exactly_the_needed_blocks(tokens: int, block: int, chunk: int) -> None:
    groups = groups_of(full(block_size=block), window(tokens, block_size=block), chunk_tokens=chunk)
    _, group = groups.groups
    needed = min(-(-(tokens - 1) // block) * block, chunk)
    assert needed <= group.record_blocks * block <= 1.05 * needed


def test_records_hold_blocks_needed_with_draft_layers() -> None:
    """vLLM looks up one block more and drops it, so the window ends a block earlier."""
    _, group = groups_of(full(), window(64), drafts=True, chunk_tokens=CHUNK).groups
    assert group.record_blocks == group.chunk_blocks == CHUNK // 16


@pytest.mark.parametrize(
    ("sizes", "configured", "expected"),
    [((16,), 256, 256), ((48,), 256, 288), ((32, 48), 256, 288), ((272,), 256, 272)],
)
def test_chunks_are_whole_blocks_of_every_group(sizes: Sequence[int], configured: int, expected: int) -> None:
    groups = groups_of(*(full(block_size=size) for size in sizes), chunk_tokens=configured)
    assert groups.chunk_tokens == expected
    assert [group.chunk_blocks * group.block_tokens for group in groups.groups] == [expected] * len(sizes)


def test_with_recurrent_state_a_chunk_is_a_block() -> None:
    groups = groups_of(full(block_size=16), state(block_size=528), chunk_tokens=CHUNK)
    assert groups.chunk_tokens == 528 and [group.record_blocks for group in groups.groups] == [33, 1]


def test_rows_of_a_table_that_ends_early_are_null() -> None:
    (group,) = groups_of(chunk_tokens=64).groups
    assert group.rows(list(range(1, 7)), 0, 2).tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert group.rows([], 1, 2).tolist() == [[0, 0, 0, 0]]
