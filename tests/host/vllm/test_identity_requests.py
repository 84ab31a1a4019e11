"""Extra inputs of requests in the key, with vLLM's own requests, adapters and multimodal inputs."""

import copy
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from identity_support import hashes, tick

from host_control.vllm.identity import adapters, content, requests
from host_control.vllm.identity.adapters import Adapters
from host_control.vllm.identity.requests import RequestInputs, hash_tensors
from host_control.vllm.support import UncacheableError
from shadowserve.keys import Extra, prefix_chain

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def request(**attributes: Any) -> Any:
    return SimpleNamespace(**{"cache_salt": None, "lora_request": None, "mm_features": None, **attributes})


def lora_config(**options: Any) -> Any:
    from vllm.config import LoRAConfig

    return LoRAConfig(**{"lora_dtype": torch.bfloat16, **options})


def engine(adapters: bool = True, **options: Any) -> Any:
    """Return the request inputs of an engine that has just started."""
    tick()
    known = RequestInputs(Adapters(lora_config(**options), hashes()) if adapters else None)
    tick()
    return known


def extra(inputs: Any, epoch: str = "", **attributes: Any) -> Extra:
    """Return a request's extra inputs, as in the lookup's thread."""
    found = inputs.extra(request(**attributes), epoch)
    value: Extra = found if isinstance(found, Extra) else found()
    return value


def test_a_request_with_only_tokens_has_no_extra_inputs() -> None:
    assert engine().extra(request(), "") == Extra()


# ---------------------------------------------------------------------- adapters


def adapter(folder: Path, weights: bytes = b"weights", **described: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16, **described}))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def lora(path: Path | str, name: str = "one", number: int = 1, **options: Any) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(path), **options)


def test_an_adapter_is_identified_by_content(tmp_path: Path) -> None:
    here, there = adapter(tmp_path / "here"), adapter(tmp_path / "there")
    (there / "README.md").write_text("another text")
    same = [lora(here), lora(here, "two", 2), lora(there, "three", 3)]
    found = {extra(engine(), lora_request=one) for one in same}
    assert len(found) == 1 and extra(engine()) not in found


@pytest.mark.parametrize("change", ["weights", "lora_alpha", "use_rslora"])
def test_a_retrained_adapter_differs_for_the_next_engine(tmp_path: Path, change: str) -> None:
    folder = adapter(tmp_path / "a")
    before = extra(engine(), lora_request=lora(folder))
    adapter(folder, b"retrained" if change == "weights" else b"weights", **({change: 3} if change != "weights" else {}))
    assert extra(engine(), lora_request=lora(folder)) != before


@pytest.mark.parametrize("stamped", [False, True])
def test_an_adapter_retrained_while_the_engine_runs_is_uncacheable(tmp_path: Path, stamped: bool) -> None:
    # vLLM uses the loaded content, and the new content after an eviction. It does not report which.
    folder, inputs = adapter(tmp_path / "a"), None
    inputs = engine()
    before = extra(inputs, lora_request=lora(folder))
    adapter(folder, b"retrain")
    if stamped:
        os.utime(folder / "adapter_model.safetensors", (0, 0))
    with pytest.raises(UncacheableError, match="changed since the engine started"):
        extra(inputs, lora_request=lora(folder))
    assert extra(engine(), lora_request=lora(folder)) != before


def test_an_exchanged_adapter_folder_is_uncacheable(tmp_path: Path) -> None:
    folder, other = adapter(tmp_path / "a"), adapter(tmp_path / "b", b"other")
    inputs = engine()
    extra(inputs, lora_request=lora(folder))
    folder.rename(tmp_path / "old")
    other.rename(folder)
    with pytest.raises(UncacheableError, match="changed since the engine started"):
        extra(inputs, lora_request=lora(folder))


@pytest.mark.parametrize(
    ("options", "differs"),
    [({"target_modules": ["q_proj"]}, True), ({"enable_tower_connector_lora": True}, True),
     ({"enable_mixed_moe_lora_format": True}, True), ({"enable_moe_shared_loras": True}, True),
     ({"lora_dtype": "float16"}, True), ({"max_lora_rank": 64}, False), ({"max_loras": 4}, False),
     ({"max_cpu_loras": 9}, False), ({"fully_sharded_loras": True}, False), ({"specialize_active_lora": True}, False)],
    ids=lambda value: str(value),
)  # fmt: skip
def test_adapter_options_are_in_the_key_if_they_change_kv(
    tmp_path: Path, options: dict[str, Any], differs: bool
) -> None:
    folder = adapter(tmp_path / "a")
    keys = [extra(engine(**each), lora_request=lora(folder)) for each in (options, {})]
    assert (keys[0] != keys[1]) is differs


@pytest.mark.parametrize("reloaded", [False, True])
def test_an_adapter_number_used_twice_or_reloaded_is_uncacheable(tmp_path: Path, reloaded: bool) -> None:
    # vLLM keeps the first adapter that it has loaded for a number.
    one, other, inputs = adapter(tmp_path / "a"), adapter(tmp_path / "b", b"other"), engine()
    extra(inputs, lora_request=lora(one))
    for path, in_place in ((other, reloaded), (other, False), (one, False)):
        with pytest.raises(UncacheableError, match="more than one adapter"):
            extra(inputs, lora_request=lora(path, load_inplace=in_place))
    assert extra(inputs, lora_request=lora(other, "two", 2))


def test_an_adapter_of_the_hub_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = adapter(tmp_path / "hub" / "models--an--adapter" / "snapshots" / ("a" * 40))
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text("a" * 40)
    inputs = engine()
    assert extra(inputs, lora_request=lora("an/adapter")) == extra(engine(), lora_request=lora(folder))
    (folder.parents[1] / "refs" / "main").write_text("a" * 40)
    with pytest.raises(UncacheableError, match="changed since the engine started"):
        extra(inputs, lora_request=lora("an/adapter"))


@pytest.mark.parametrize("path", ["nowhere/adapter", "s3://a/b", "/nowhere", "empty"])
def test_an_unreadable_adapter_is_uncacheable(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UncacheableError):
        extra(engine(), lora_request=lora(tmp_path / path if path == "empty" else path))


def test_an_adapter_is_hashed_once_for_many_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    digest = content._digest
    monkeypatch.setattr(content, "_digest", lambda path, progress: (read.append(path), digest(path, progress))[1])
    folder = adapter(tmp_path / "a")
    inputs = adapters.Adapters(lora_config(), hashes(settle_seconds=-1e6))
    for _ in range(5):
        inputs.described(lora(folder))
    assert len(read) == 2


# ---------------------------------------------------------------------- multimodal inputs


def feature(content: Any, identifier: str = "i", offset: int = 0, length: int = 4, **options: Any) -> Any:
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )

    data = None
    if content is not None:
        tensors = content if isinstance(content, dict) else {"pixel_values": torch.tensor(content)}
        data = MultiModalKwargsItem(
            {name: MultiModalFieldElem(data=value, field=MultiModalBatchedField()) for name, value in tensors.items()}
        )
    place = PlaceholderRange(offset=offset, length=length, is_embed=options.pop("is_embed", None))
    return MultiModalFeatureSpec(
        data=data,
        modality=options.pop("modality", "image"),
        identifier=identifier,
        mm_position=place,
        mm_hash=identifier,
    )


def images(*features: Any) -> Extra:
    return extra(engine(), mm_features=list(features))


def test_an_image_is_identified_by_content() -> None:
    # Identifiers are counters with --mm-processor-cache-gb 0 and no prefix caching, or names from multi_modal_uuids.
    one, other = images(feature([1.0, 2.0], "0-image-0")), images(feature([1.0, 3.0], "0-image-0"))
    assert one != other
    assert images(feature([1.0, 2.0], "7-image-0")) == one


@pytest.mark.parametrize("word", ["0-image-0", "cat"])
def test_images_with_the_same_identifier_differ_by_content(word: str) -> None:
    # The first is the renderer's identifier of every engine's first image if no hash is needed.
    from PIL import Image
    from vllm.multimodal.parse import MultiModalDataParser, parse_mm_uuids
    from vllm.multimodal.processing.inputs import ProcessorInputs

    found = []
    for shade in (1, 200):
        picture = Image.new("RGB", (8, 8), (shade, 0, 0))
        items = MultiModalDataParser().parse_mm_data({"image": [picture]})
        inputs = ProcessorInputs(prompt=[1], mm_data_items=items, mm_uuid_items=parse_mm_uuids({"image": [word]}))
        (identifier,) = inputs.get_mm_hashes("model", "blake3")["image"]
        found.append((identifier, images(feature(np.asarray(picture) / 255, identifier))))
    assert found[0][0] == found[1][0] == word
    assert found[0][1] != found[1][1]


def test_processor_options_change_the_processed_content() -> None:
    small = {"pixel_values": torch.zeros(3, 4, 4), "image_grid_thw": torch.tensor([1, 2, 2])}
    large = {"pixel_values": torch.zeros(3, 4, 4), "image_grid_thw": torch.tensor([1, 4, 1])}
    found = [images(feature(small)), images(feature(large)), images(feature({**small, "extra": [1, 2.0, None, "a"]}))]
    assert len(set(found)) == 3


def test_position_length_modality_and_mask_of_an_image_change_the_key() -> None:
    found = [
        images(feature([1.0])),
        images(feature([1.0], offset=1)),
        images(feature([1.0], length=5)),
        images(feature([1.0], modality="video")),
        images(feature([1.0], is_embed=torch.tensor([True, False, True, True]))),
        images(feature([1.0]), feature([1.0], offset=9)),
        images(),
    ]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float16)),
        ([torch.zeros(2), torch.zeros(2)], [torch.zeros(4)]),
        (torch.arange(6).reshape(2, 3).t(), torch.arange(6).reshape(3, 2)),
        (torch.tensor(0), torch.tensor([0])),
        ([b"a", b"b"], [b"ab"]),
        ({"a": 1, "b": 2}, {"a": 1}),
        (1, True),
    ],
)
def test_different_tensors_have_different_hashes(one: Any, other: Any) -> None:
    assert hash_tensors({"x": one}) != hash_tensors({"x": other})
    assert hash_tensors({"x": one}) == hash_tensors({"x": copy.deepcopy(one)})


@pytest.mark.parametrize("content", [None, {"address": 5, "monotonic_id": 1}, {"x": object()}])
def test_an_image_without_tensors_here_is_uncacheable(content: Any) -> None:
    with pytest.raises(UncacheableError):
        images(feature(content))


def test_tensors_on_another_device_are_uncacheable() -> None:
    with pytest.raises(UncacheableError, match="meta"):
        hash_tensors({"x": torch.zeros(2, device="meta")})


def test_an_identifier_used_for_other_content_is_uncacheable() -> None:
    # vLLM may use its cached encoder output of the identifier.
    inputs = engine()
    assert extra(inputs, mm_features=[feature([1.0], "cat")])
    for values in ([2.0], [1.0], [2.0]):
        with pytest.raises(UncacheableError, match="used for other content"):
            extra(inputs, mm_features=[feature(values, "cat")])
    assert extra(inputs, mm_features=[feature([2.0], "dog")])


def test_adapter_image_and_salt_combine(tmp_path: Path) -> None:
    folder, image = adapter(tmp_path / "a"), feature([1.0])
    found = {
        extra(engine(), epoch, lora_request=one, mm_features=pictures, cache_salt=salt)
        for epoch in ("", "e")
        for one in (None, lora(folder))
        for pictures in (None, [image])
        for salt in (None, "s")
    }
    assert len(found) == 16


def test_prompts_share_only_the_text_before_an_image(tmp_path: Path) -> None:
    folder, tokens = adapter(tmp_path / "a"), list(range(48))

    def chunk_keys(*features: Any, **attributes: Any) -> list[bytes]:
        found = extra(engine(), mm_features=list(features), **attributes)
        return prefix_chain(bytes(32), tokens, chunk_tokens=16, extra=found)

    text, cat, dog = chunk_keys(), chunk_keys(feature([1.0], offset=20)), chunk_keys(feature([2.0], offset=20))
    assert cat[0] == dog[0] == text[0]
    assert len({*cat[1:], *dog[1:], *text[1:]}) == 6
    adapted = chunk_keys(feature([1.0], offset=20), lora_request=lora(folder))
    assert not set(adapted) & set(cat), "an adapter changes every chunk"
    assert adapted[0] == chunk_keys(lora_request=lora(folder))[0]


def test_a_request_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    real = requests.hash_tensors
    monkeypatch.setattr(requests, "hash_tensors", lambda value: (hashed.append(1), real(value))[1])
    later = engine().extra(request(mm_features=[feature([1.0])]), "")
    assert callable(later) and later() == later() and len(hashed) == 1


def test_an_engine_without_adapters_has_no_cache_for_one(tmp_path: Path) -> None:
    with pytest.raises(UncacheableError, match="not configured for adapters"):
        extra(engine(adapters=False), lora_request=lora(adapter(tmp_path / "a")))
