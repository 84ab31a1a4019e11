#!/usr/bin/env python3
"""Records what of vLLM host_control uses, for each release that it shall work with, and compares.

    scripts/vllm_interface.py                   compare the installed vLLM with what is recorded
    scripts/vllm_interface.py --record          write tests/assets/vllm/VERSION.json again from it, and the document
    scripts/vllm_interface.py --record --fetch  the same of the release that has no CPU build, from PyPI: 150 MB of /tmp
    scripts/vllm_interface.py --source FOLDER   from sources in a folder that contains vllm/
    scripts/vllm_interface.py --fetch --keep FOLDER   compare, and copy the fetched package into FOLDER

The script parses sources and never runs them, so it reads releases that cannot be installed here. It finds our imports
from vLLM in our own sources. All public members of our base classes count. ``OBJECTS`` names the objects that vLLM
passes to us, with the members that we read.
"""

import argparse
import ast
import copy
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["DOCUMENT", "RECORDED", "VERSIONS", "Ours", "Sources", "described", "differences", "document", "recorded"]

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests" / "assets" / "vllm"
DOCUMENT = ROOT / "docs" / "reference" / "vllm-versions.md"
VERSIONS = ("0.32.0", "0.33.0")
FETCHED = "vllm==0.33.0 --hash=sha256:f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112\n"
BEGIN, END = "<!-- begin differences -->\n", "<!-- end differences -->\n"

_SPEC = "block_size prefix_cacheable"
OBJECTS = {
    "vllm.config.VllmConfig": "model_config cache_config parallel_config scheduler_config load_config lora_config "
    "speculative_config kv_transfer_config compilation_config attention_config instance_id quant_config "
    "max_concurrent_batches offload_config kv_events_config",
    "vllm.config.kv_events.KVEventsConfig": "enable_kv_cache_events",
    "vllm.config.OffloadConfig": "offload_backend prefetch",
    "vllm.config.offload.PrefetchOffloadConfig": "offload_group_size",
    "vllm.v1.engine.core.EngineCore": "collective_rpc reset_prefix_cache wake_up",
    "vllm.model_executor.layers.fused_moe.routed_experts.RoutedExperts": "get_expert_weights",
    "vllm.config.ModelConfig": "model revision code_revision dtype seed max_model_len hf_config hf_text_config "
    "runner_type trust_remote_code is_encoder_decoder is_multimodal_model is_prefix_caching_supported "
    "multimodal_config get_total_num_kv_heads served_model_name",
    "vllm.config.CacheConfig": "cache_dtype enable_prefix_caching prefix_caching_hash_algo",
    "vllm.config.ParallelConfig": "tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size "
    "decode_context_parallel_size enable_eplb",
    "vllm.config.SchedulerConfig": "enable_chunked_prefill max_num_batched_tokens",
    "vllm.config.LoadConfig": "load_format download_dir model_loader_extra_config",
    "vllm.config.LoRAConfig": "lora_dtype target_modules enable_tower_connector_lora",
    "vllm.config.SpeculativeConfig": "method model draft_model_config use_eagle use_eagle_block_drop",
    "vllm.config.KVTransferConfig": "kv_connector_extra_config kv_load_failure_policy is_kv_consumer is_kv_producer "
    "engine_id",
    "vllm.config.CompilationConfig": "static_forward_context pass_config",
    "vllm.v1.kv_cache_interface.KVCacheConfig": "kv_cache_groups num_blocks",
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": "layer_names kv_cache_spec enable_kv_transfer",
    "vllm.v1.kv_cache_interface.FullAttentionSpec": f"{_SPEC} num_kv_heads num_heads head_size head_size_v dtype "
    "tokens_per_state state_content_bytes non_causal",
    "vllm.v1.kv_cache_interface.MLAAttentionSpec": f"{_SPEC} num_kv_heads head_size dtype cache_role tokens_per_state",
    "vllm.v1.kv_cache_interface.SlidingWindowSpec": f"{_SPEC} sliding_window extra_retained_tokens",
    "vllm.v1.kv_cache_interface.MambaSpec": f"{_SPEC} shapes dtypes mamba_cache_mode tp_replicated",
    "vllm.v1.kv_cache_interface.UniformTypeKVCacheSpecs": "kv_cache_specs prefix_cacheable",
    "vllm.v1.core.kv_cache_manager.KVCacheManager": "coordinator",
    "vllm.v1.core.kv_cache_coordinator.HybridKVCacheCoordinator": "hash_block_size single_type_managers block_pool "
    "find_longest_cache_hit",
    "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager": "reachable_block_mask find_longest_cache_hit",
    "vllm.v1.core.sched.output.KVConnectorBlockState": "get_block_ids boundary_state_offloads",
    "vllm.v1.kv_cache_interface.ChunkedLocalAttentionSpec": _SPEC,
    "vllm.v1.request.Request": "request_id prompt_token_ids prompt_embeds all_token_ids num_tokens num_prompt_tokens "
    "num_computed_tokens num_preemptions lora_request mm_features cache_salt pooling_params skip_reading_prefix_cache "
    "resumable trace_headers arrival_time",
    "vllm.lora.request.LoRARequest": "lora_int_id lora_name lora_path load_inplace is_3d_lora_weight",
    "vllm.multimodal.inputs.MultiModalFeatureSpec": "data modality identifier mm_position",
    "vllm.multimodal.inputs.PlaceholderRange": "offset length is_embed",
    "vllm.v1.core.sched.output.SchedulerOutput": "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens "
    "total_num_scheduled_tokens kv_connector_block_state preempted_req_ids new_block_ids_to_zero kv_cache_block_copies",
    "vllm.v1.core.sched.output.NewRequestData": "req_id num_computed_tokens block_ids",
    "vllm.v1.core.sched.output.CachedRequestData": "req_ids num_computed_tokens new_block_ids resumed_req_ids",
    "vllm.v1.core.kv_cache_utils.KVCacheBlockCopy": "dst_block_id",
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks": "get_block_ids",
    "vllm.v1.core.block_pool.BlockPool": "cached_block_hash_to_block evict_blocks get_num_free_blocks num_gpu_blocks",
    "vllm.v1.outputs.KVConnectorOutput": "finished_recving kv_connector_worker_meta",
    "vllm.v1.kv_offload.base.OffloadingSpec": "config kv_events_config tokens_per_hash blocks_per_chunk "
    "replicated_layout",
    "vllm.v1.kv_offload.base.ReqContext": "req_id",
    "vllm.v1.kv_offload.base.LookupResult": "HIT MISS RETRY",
    "vllm.v1.kv_offload.base.OffloadingEvent": "keys medium removed locality",
    "vllm.v1.kv_offload.config.OffloadingConfig": "model kv_cache_layout canonical_layout",
    "vllm.v1.kv_offload.config.OffloadingModelConfig": "dtype",
    "vllm.v1.kv_offload.file_mapper.FileMapper": "from_offloading_spec get_run_config",
    "vllm.v1.kv_offload.tiering.base.TransferJob": "job_id keys chunk_ids",
    "vllm.v1.kv_offload.tiering.base.JobResult": "job_id success successful_keys transfer_time transfer_bytes",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics.OffloadingConnectorStats": "increase_counter "
    "is_empty",
}
NOTES = {
    "KVConnectorBase_V1.supports_sleep_mode": "ShadowServe answers true, as vLLM does",
    "KVConnectorBase_V1.unregister_kv_caches": "running transfers end, and our memory is released",
    "KVConnectorBase_V1.restore_kv_caches": "memory is allocated and registered again; names stay",
    "SecondaryTierManager.tolerates_off_thread_polling": "false: the tier has no thread that waits between steps",
    "SecondaryTierManager.config_info": "nothing is shown",
    "SecondaryTierManager.config_info_keys": "nothing is shown",
}
"""How ShadowServe handles each difference, by class and member; one without a note was not examined."""


class Sources:
    """A vLLM's sources, parsed.

    Args:
        root: the folder that holds ``vllm/``.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @functools.cache  # noqa: B019
    def _tree(self, module: str) -> ast.Module | None:
        path = self._root.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text())
        return None

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Return where a name is defined and by what, behind all that only hand it on; ``None`` where it is not."""
        if (tree := self._tree(module)) is None:
            return None
        for node in _statements(tree.body):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom):
                place = self._absolute(module, node)
                for alias in node.names:
                    if (alias.asname or alias.name) == name and (found := self.find(place, alias.name)):
                        return found
            if name in _assigned(node):
                return module, node
        inner = f"{module}.{name}"
        return (inner, tree) if self._tree(inner) is not None else None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self._root.joinpath(*module.split("."), "__init__.py").is_file()
        up = node.level - package
        parts = module.split(".")[:-up] if up else module.split(".")
        return ".".join([*parts, *(node.module or "").split(".")]).rstrip(".")

    def members(self, module: str, node: ast.ClassDef) -> dict[str, str]:
        """Return the members of a class, its own over inherited ones: name -> form."""
        found: dict[str, str] = {}
        for base in reversed(node.bases):
            parent = self.find(module, base.id) if isinstance(base, ast.Name) else None
            if parent and isinstance(parent[1], ast.ClassDef):
                found |= self.members(parent[0], parent[1])
        return found | _own(node)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, those in conditions and attempts as well."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                for inner in getattr(node, part, []):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _assigned(node: ast.AST) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _own(node: ast.ClassDef) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in node.body:
        found |= dict.fromkeys(_assigned(part), "attribute")
        if isinstance(part, ast.FunctionDef):
            for inner in ast.walk(part):
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and _is_self(inner.value):
                    found.setdefault(inner.attr, "attribute")
            found[part.name] = _form(part)
    return found


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _form(node: ast.FunctionDef) -> str:
    """Return the kind and the parameters of a function, for its callers and subclasses."""
    names = {each.id if isinstance(each, ast.Name) else getattr(each, "attr", "") for each in node.decorator_list}
    words = [word for word in ("abstractmethod", "classmethod", "staticmethod") if word in names]
    if names & {"property", "cached_property"}:
        return " ".join([*words, "attribute"])
    parameters = copy.deepcopy(node.args)
    for argument in ast.walk(parameters):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return " ".join([*words, f"({ast.unparse(parameters)})"])


class Ours:
    """Uses of vLLM in our own sources.

    Attributes:
        imports: names of vLLM that are imported, as ``module.name``; of modules, what is read of them.
        heirs: classes of vLLM's that ours derive from -> our class.
    """

    def __init__(self, folder: Path = ROOT / "host_control") -> None:
        self.imports: set[str] = set()
        self.heirs: dict[str, list[ast.ClassDef]] = {}
        for path in sorted(folder.rglob("*.py")):
            text = path.read_text()
            if re.search(r"^\s*(from|import) vllm\b", text, re.MULTILINE):
                self._read(ast.parse(text))

    def _read(self, tree: ast.Module) -> None:
        known: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                known |= {a.asname or a.name: a.name for a in node.names if a.name.split(".")[0] == "vllm"}
        modules = {name: full for name, full in known.items() if full in ("vllm", "vllm.envs")}
        self.imports |= set(known.values()) - set(modules.values())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                self.imports.add(f"{modules[node.value.id]}.{node.attr}")
            elif isinstance(node, ast.ClassDef):
                for base in node.bases:
                    if isinstance(base, ast.Name) and base.id in known:
                        self.heirs.setdefault(known[base.id], []).append(node)


def described(sources: Sources, ours: Ours) -> dict[str, Any]:
    """Return the used parts of a vLLM: name -> form, for a class its members; ``null`` if missing."""
    found: dict[str, Any] = {}
    for name in sorted(ours.imports | ours.heirs.keys() | OBJECTS.keys()):
        module, _, plain = name.rpartition(".")
        place = sources.find(module, plain)
        if place is None or not isinstance(place[1], ast.ClassDef):
            node = place[1] if place else None
            found[name] = _form(node) if isinstance(node, ast.FunctionDef) else "attribute" if node else None
            continue
        members = sources.members(place[0], place[1])
        if name in ours.heirs:
            wanted = [member for member, form in members.items() if form != "attribute" or not member.startswith("_")]
            wanted = [member for member in wanted if not member.startswith("_") or member == "__init__"]
        else:
            wanted = OBJECTS.get(name, "").split()
        found[name] = {member: members.get(member) for member in sorted(wanted)}
    return found


def recorded(version: str) -> dict[str, Any]:
    """Return the record of a version."""
    value: dict[str, Any] = json.loads((RECORDED / f"{version}.json").read_text())
    return value


def differences() -> dict[str, tuple[str | None, str | None]]:
    """Return the differences of two versions: ``class.member`` or name -> its form in either."""
    old, new = (_flat(recorded(version)) for version in VERSIONS)
    return {
        name: (old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    }


def _flat(found: dict[str, Any]) -> dict[str, str]:
    flat = {}
    for name, form in found.items():
        plain = name.rpartition(".")[2]
        flat |= {f"{plain}.{m}": f for m, f in form.items()} if isinstance(form, dict) else {plain: form}
    return flat


def document() -> str:
    """Return docs/reference/vllm-versions.md with its table as it should be."""
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    rows = [f"| | {VERSIONS[0]} | {VERSIONS[1]} | here |", "|---|---|---|---|"]
    for name, (old, new) in differences().items():
        forms = [f"`{form}`" if form else "" for form in (old, new)]
        rows.append(f"| `{name}` | {forms[0]} | {forms[1]} | {NOTES.get(name, '')} |")
    return before + BEGIN + "".join(f"{row}\n" for row in rows) + END + rest.partition(END)[2]


def _fetch(folder: str) -> Path:
    """Unpack the release's sources with pip. Its build step fails without compilers, which does not matter."""
    wanted = Path(folder) / "wanted.txt"
    wanted.write_text(FETCHED)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "vllm", "--no-build-isolation"]
    command += ["--no-clean", "--require-hashes", "--quiet", "--dest", folder, "--requirement", str(wanted)]
    run = subprocess.run(command, env={**os.environ, "TMPDIR": folder}, capture_output=True, text=True, check=False)
    found = [path.parent.parent for path in Path(folder).glob("*/*/vllm/__init__.py")]
    if len(found) != 1:
        raise SystemExit(f"pip has not unpacked vLLM's sources:\n{run.stderr[-2000:]}")
    return found[0]


def _version(root: Path) -> str:
    (named,) = {
        line.split()[1] for line in (root / "PKG-INFO").read_text().splitlines() if line.startswith("Version: ")
    }
    return named


def installed() -> tuple[Path, str]:
    """Return where this environment's vLLM lies, and its version without what names its build."""
    import importlib.metadata

    return Path(sysconfig.get_path("purelib")), importlib.metadata.version("vllm").partition("+")[0]


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write what is found")
    parser.add_argument("--fetch", action="store_true", help="of the release that is pinned in this file, from PyPI")
    parser.add_argument("--source", type=Path, help="of the sources in this folder")
    parser.add_argument("--keep", type=Path, help="copy the package into this folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.fetch or arguments.source:
            root = arguments.source or _fetch(folder)
            version = _version(root)
        else:
            root, version = installed()
        text = json.dumps(described(Sources(root), Ours()), indent=1, sort_keys=True) + "\n"
        if arguments.keep:
            shutil.copytree(root / "vllm", arguments.keep / "vllm")
    file = RECORDED / f"{version}.json"
    if arguments.record:
        file.write_text(text)
        DOCUMENT.write_text(document())
    elif not file.is_file() or file.read_text() != text:
        raise SystemExit(f"{file.relative_to(ROOT)} is not what vLLM {version} has; run {Path(__file__).name} --record")
    print(f"vLLM {version}: {hashlib.sha256(text.encode()).hexdigest()[:12]}")


if __name__ == "__main__":
    main()
