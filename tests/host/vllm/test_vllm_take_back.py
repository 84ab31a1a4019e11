"""docs/design/vllm-take-back-steps.patch, which vLLM needs to take back more than one step or several KV cache groups.

vLLM's own scheduler runs, with a scripted connector, and with a worker that knows which blocks hold valid KV: it
samples ``GOOD`` where it has read valid KV alone, else ``BAD``. No model is needed.
"""

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from identity_support import engine_config, model_folder, spec
from patched_vllm import needs_release, schedulers

BLOCK, WINDOW, GOOD, BAD = 16, 64, 7, 9
PROMPT = list(range(100, 100 + 10 * BLOCK + 5))
LOADED = 8 * BLOCK

pytestmark = [pytest.mark.filterwarnings("ignore"), needs_release]


class Connector:
    """Loads the first blocks of request ``a`` within the step; of each group, up to a lost one."""

    def __init__(self, lost: dict[int, int]) -> None:
        self.lost, self.loads = lost, dict[str, Any]()

    def get_num_new_matched_tokens(self, request: Any, local: int) -> tuple[int, bool]:
        first = request.request_id == "a" and not self.loads
        return (LOADED - local if first else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        if tokens:
            self.loads[request.request_id] = blocks.get_block_ids()

    def request_finished(self, request: Any, blocks: Any) -> tuple[bool, None]:
        return False, None

    request_finished_all_groups = request_finished

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Engine:
    """A scheduler with up to ``depth`` steps in flight, and a worker that runs them in their order."""

    def __init__(self, scheduler: Any, depth: int, connector: Connector) -> None:
        self.scheduler, self.depth, self.connector = scheduler, depth, connector
        self.specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
        self.valid: set[int] = {0}  # the null block
        self.tables: dict[str, list[list[int]]] = {}
        self.prompts: dict[str, int] = {}
        self.loaded: set[str] = set()
        self.begun: list[tuple[str, int]] = []  # requests that have begun or resumed, with their computed tokens
        self.tokens: dict[str, list[int]] = {}

    def run(self) -> None:
        """Run until all requests have ended."""
        flying: deque[Any] = deque()
        for _ in range(100):
            while len(flying) < self.depth and self.scheduler.has_requests():
                flying.append(self.scheduler.schedule())
            if not flying:
                return
            output = flying.popleft()
            for outputs in self.scheduler.update_from_output(output, self._execute(output)).values():
                for each in outputs.outputs:
                    self.tokens[each.request_id] += each.new_token_ids
        raise AssertionError("the requests do not end")

    def add(self, name: str, tokens: list[int], hasher: Any) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        sampling.update_from_generation_config({}, 0)
        self.tokens[name], self.prompts[name] = [], len(tokens)
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=tokens,
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=hasher,
            )
        )

    def _execute(self, output: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        computed = self._follow(output)
        invalid: set[int] = set()
        for name in self.connector.loads.keys() & computed.keys() - self.loaded:
            self.loaded.add(name)
            for group, blocks in enumerate(self.connector.loads[name]):
                arrived = blocks[: LOADED // BLOCK]
                lost = arrived[self.connector.lost[group] :] if group in self.connector.lost else []
                invalid.update(lost)
                self.valid |= set(arrived) - set(lost)
        names = list(computed)
        sampled = [self._step(name, computed[name], output.num_scheduled_tokens[name]) for name in names]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(invalid_block_ids=invalid),
        )

    def _follow(self, output: Any) -> dict[str, int]:
        """Update the block tables as a model runner does; return how many tokens of each request are computed."""
        computed = {}
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(blocks) for blocks in new.block_ids]
            computed[new.req_id] = new.num_computed_tokens
            self.begun.append((new.req_id, new.num_computed_tokens))
        cached = output.scheduled_cached_reqs
        for name, blocks, tokens in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            computed[name] = tokens
            if name in cached.resumed_req_ids:
                self.tables[name] = [[] for _ in self.specs]
                self.begun.append((name, tokens))
            for table, more in zip(self.tables[name], blocks or [[]] * len(self.specs), strict=True):
                table += more
        return computed

    def _step(self, name: str, computed: int, new: int) -> list[int]:
        """Compute tokens of a request; return what is sampled."""
        end = computed + new
        read: set[int] = set()
        written: set[int] = set()
        for each, table in zip(self.specs, self.tables[name], strict=True):
            window = getattr(each, "sliding_window", None)
            first = max(computed - window + 1, 0) // BLOCK if window else 0
            read |= set(table[first : -(-computed // BLOCK)])
            written |= set(table[computed // BLOCK : -(-end // BLOCK)])
        sound = read <= self.valid
        self.valid = self.valid | written if sound else self.valid - written
        return [GOOD if sound else BAD] if end >= self.prompts[name] else []


CASES = {
    "a step in flight": (2, {0: 5}, 1),
    "several groups": (1, {0: 5, 1: 6}, 2),
    "several groups, a window alone": (1, {1: 7}, 2),
    "several groups and a step in flight": (2, {0: 5, 1: 6}, 2),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[False, True], ids=["vLLM", "patched"])
def classes(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = schedulers(tmp_path_factory.mktemp("sources"), patched=request.param)
    return SimpleNamespace(patched=request.param, of_depth={1: made[0], 2: made[1]})


def served(model: Path, scheduler_class: Any, depth: int, lost: dict[int, int], groups: int, budget: int) -> Engine:
    """Serve ``a``, whose load falls short, beside ``b`` and ``c``, and then ``d``; ``c`` and ``d`` have its prompt."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.structured_output import StructuredOutputManager

    full = spec(block_size=BLOCK)
    shape = {name: getattr(full, name) for name in ("block_size", "num_kv_heads", "head_size", "dtype")}
    specs = [full, SlidingWindowSpec(**shape, sliding_window=WINDOW)][:groups]
    config = engine_config(model, block_size=32, max_num_batched_tokens=budget, max_num_seqs=8, max_model_len=1024)
    config.cache_config.block_size, config.cache_config.num_gpu_blocks = BLOCK, 100
    config.scheduler_config.async_scheduling = depth > 1
    caches = [KVCacheGroupSpec([f"layer.{index}"], each) for index, each in enumerate(specs)]
    scheduler = scheduler_class(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=caches),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=False,
    )
    SupportsHMA.register(Connector)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    scheduler.connector, scheduler.defer_block_free = Connector(lost), depth > 1
    engine = Engine(scheduler, depth, scheduler.connector)
    engine.add("b", [5] * 20, hasher)
    engine.add("a", PROMPT, hasher)
    engine.add("c", PROMPT, hasher)
    engine.run()
    engine.add("d", PROMPT, hasher)
    engine.run()
    return engine


@pytest.mark.parametrize("depth", [1, 2])
def test_a_complete_load_is_served_in_the_step(model: Path, classes: Any, depth: int) -> None:
    engine = served(model, classes.of_depth[depth], depth, {}, 2, 1024)
    assert engine.tokens == dict.fromkeys("abcd", [GOOD] * 4) and ("a", LOADED) in engine.begun


@pytest.mark.parametrize("budget", [1024, 32])
@pytest.mark.parametrize("case", CASES)
def test_steps_on_a_load_that_fell_short_are_taken_back(model: Path, classes: Any, case: str, budget: int) -> None:
    depth, lost, groups = CASES[case]
    if not classes.patched and groups > 1:
        with pytest.raises(RuntimeError, match="multiple KV cache groups"):
            served(model, classes.of_depth[depth], depth, lost, groups, budget)
        return
    engine = served(model, classes.of_depth[depth], depth, lost, groups, budget)
    if not classes.patched:
        assert BAD in engine.tokens["a"]
        return
    assert engine.tokens == dict.fromkeys("abcd", [GOOD] * 4)
    first, resumed = [tokens for name, tokens in engine.begun if name == "a"]
    assert first == LOADED and resumed <= min(lost.values()) * BLOCK
    assert groups > 1 or resumed == min(lost.values()) * BLOCK, "valid blocks before the first lost one are used"
    assert [name for name, _ in engine.begun].count("b") == 1, "another request goes on"
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 99
