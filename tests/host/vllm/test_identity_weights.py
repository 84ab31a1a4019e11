"""The files of weights and code, with real configurations and folders."""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from identity_support import ASSET, digest, engine_config, model_folder, model_of, tensors, tick

from host_control.vllm.identity.weights import model_class
from host_control.vllm.support import UncacheableError

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

OTHER = tensors(b"\1" * 16384)


def test_any_edit_of_the_weights_changes_the_model(tmp_path: Path) -> None:
    # Sampling 16 times 64 KiB would miss this edit.
    weights = bytearray(tensors(bytes(4 << 20)))
    folder = model_folder(tmp_path / "m", weights=bytes(weights))
    before = digest(engine_config(folder))
    weights[200_000] = 1
    (folder / "model.safetensors").write_bytes(weights)
    assert digest(engine_config(folder)) != before


def test_the_path_of_weights_does_not_change_the_model(tmp_path: Path) -> None:
    one, other = model_folder(tmp_path / "one"), model_folder(tmp_path / "deeper" / "other")
    (other / "README.md").write_text("another text")
    (other / "tokenizer_config.json").write_text("{}")
    assert digest(engine_config(one)) == digest(engine_config(other))


def test_only_the_loaded_format_counts(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "pytorch_model.bin").write_bytes(b"other")
    (folder / "consolidated.safetensors").write_bytes(OTHER)
    found = {
        name: digest(engine_config(folder, load_format=name)) for name in ("hf", "safetensors", "mistral", "npcache")
    }
    assert len({found[name] for name in ("hf", "mistral", "npcache")}) == 3
    # Both formats load every .safetensors file that no index excludes.
    assert found["hf"] == found["safetensors"]


def test_files_outside_the_index_do_not_count(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    index = {"weight_map": {"model.layers.0.self_attn.k_proj.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    before = digest(engine_config(folder, load_format="hf"))
    (folder / "consolidated.safetensors").write_bytes(OTHER)
    assert digest(engine_config(folder, load_format="hf")) == before
    # vLLM caches the list of a folder's files in the process.
    again = shutil.copytree(folder, tmp_path / "again")
    assert digest(engine_config(again)) != before, "auto uses the consolidated files if there are any"


@pytest.mark.parametrize("load_format", ["sharded_state", "runai_streamer", "of a plugin"])
def test_all_weight_files_count_in_other_formats(tmp_path: Path, load_format: str) -> None:
    folder = model_folder(tmp_path / "m")
    config = engine_config(folder)
    auto = digest(config)
    config.load_config.load_format = load_format
    before = digest(config)
    assert before != auto
    (folder / "model-rank-0-part-0.safetensors").write_bytes(OTHER)
    tick()
    config.instance_id = str(time.time_ns())
    assert digest(config) != before


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"load_format": "modelexpress"}, "ModelExpress"),
        ({"load_format": "ipc_cache"}, "another process"),
        ({"load_format": "tensorizer", "model_loader_extra_config": {"tensorizer_uri": "s3://a/b"}}, "s3://a/b"),
        ({"model_weights": "s3://a/b"}, "s3://a/b"),
        ({"model": "no/such-model"}, "neither a folder nor in the hub's cache"),
        ({"model": "s3://a/b"}, "neither a folder nor in the hub's cache"),
    ],
)
def test_weights_with_unknown_content_are_uncacheable(change: dict[str, Any], why: str) -> None:
    config = engine_config(ASSET)
    for name, value in change.items():
        part = config.model_config if hasattr(config.model_config, name) else config.load_config
        object.__setattr__(part, name, value)
    with pytest.raises(UncacheableError, match=why):
        model_of(config)


def test_weights_of_other_models_are_uncacheable() -> None:
    from vllm.model_executor.model_loader import utils

    class Chosen:
        def __init__(self) -> None:
            self.secondary_weights = ["another"]

    config = engine_config(ASSET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "get_model_architecture", lambda config: (Chosen, "Chosen"))
        with pytest.raises(UncacheableError, match="weights of other models"):
            model_class(config.model_config, None)


def test_weights_changed_during_the_start_are_uncacheable(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    config = engine_config(folder)
    model_of(config)
    (folder / "model.safetensors").write_bytes(OTHER)
    os.utime(folder / "model.safetensors", (0, 0))
    with pytest.raises(UncacheableError, match="changed since this engine was configured"):
        model_of(config)
    model_of(engine_config(folder))


def snapshot(cache: Path, commit: str, weights: bytes, name: str | None = None) -> Path:
    """Create a hub cache of a model, with a main branch."""
    root = cache / "models--a--model"
    folder = root / "snapshots" / commit
    for made in (folder, root / "blobs", root / "refs"):
        made.mkdir(parents=True, exist_ok=True)
    source = model_folder(cache / f"source-{commit[:4]}", weights=weights)
    for file in source.iterdir():
        data = file.read_bytes()
        blob = hashlib.sha256(data).hexdigest() if file.suffix == ".safetensors" else hashlib.sha1(data).hexdigest()
        shutil.copyfile(file, root / "blobs" / blob)
        (folder / file.name).symlink_to(Path("../../blobs") / blob)
    (root / "refs" / "main").write_text(commit)
    return folder


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_hub_model_is_identified_by_content(hub_cache: Path, tmp_path: Path) -> None:
    snapshot(hub_cache, "a" * 40, tensors())
    config = engine_config(ASSET)
    config.model_config.model = "a/model"
    first = digest(config)
    assert digest(engine_config(model_folder(tmp_path / "local"))) == first, (
        "a folder with the same files has the same identity"
    )
    snapshot(hub_cache, "b" * 40, tensors())
    assert digest(config) == first
    snapshot(hub_cache, "c" * 40, OTHER)
    assert digest(config) != first
    config.model_config.revision = "a" * 40
    assert digest(config) == first


def test_a_hub_branch_moved_during_the_start_is_noticed(hub_cache: Path) -> None:
    snapshot(hub_cache, "a" * 40, tensors())
    config = engine_config(ASSET)
    config.model_config.model = "a/model"
    config.model_config.hf_config._commit_hash = "a" * 40
    model_of(config)
    snapshot(hub_cache, "b" * 40, OTHER)
    with pytest.raises(UncacheableError, match="commit"):
        model_of(config)


def test_remote_code_counts_if_trusted(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    found = {}
    for trusted in (False, True):
        for text in ("", "changed = 1"):
            (folder / "modeling.py").write_text(text)
            config = engine_config(folder)
            config.model_config.trust_remote_code = trusted
            config.model_config.hf_config.auto_map = {"AutoModelForCausalLM": "modeling.Model"}
            found[trusted, text] = digest(config)
    assert found[False, ""] == found[False, "changed = 1"]
    assert found[True, ""] != found[True, "changed = 1"]


def test_remote_code_that_is_missing_is_uncacheable() -> None:
    config = engine_config(ASSET)
    config.model_config.trust_remote_code = True
    config.model_config.hf_config.auto_map = {"AutoModelForCausalLM": "other/code--modeling.Model"}
    with pytest.raises(UncacheableError, match="other/code"):
        model_of(config)


def test_quantization_files_count(tmp_path: Path) -> None:
    class Quantization:
        @staticmethod
        def get_config_filenames() -> list[str]:
            return ["quantize_config.json"]

    folder = model_folder(tmp_path / "m")
    found = []
    for ignored in ("a", "b"):
        (folder / "quantize_config.json").write_text(json.dumps({"ignore": ignored}))
        config = engine_config(folder)
        object.__setattr__(config, "quant_config", Quantization())
        found.append(digest(config))
    assert found[0] != found[1]


def test_an_unexpected_error_is_uncacheable(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    monkeypatch.delattr(DefaultModelLoader, "_prepare_weights")
    with pytest.raises(UncacheableError, match="cannot be identified"):
        model_of(engine_config(ASSET))
