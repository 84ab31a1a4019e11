"""Images as vLLM's own renderer and processor hand them to the engine: what they are called, and what they are."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from identity_support import ASSET, engine_config

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

IMAGE = 262


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model that sees: the project's own one behind two layers of CLIP, without weights."""
    return seeing(tmp_path_factory.mktemp("seeing") / "model")


def seeing(folder: Path, **processor: Any) -> Path:
    folder.mkdir()
    text = json.loads((ASSET / "config.json").read_text())
    tokenizer = json.loads((ASSET / "tokenizer.json").read_text())
    added = {"content": "<image>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"].append({"id": IMAGE, **added, "special": True})
    clip = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "projection_dim": 32}  # fmt: skip
    described = {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text,
        "vision_config": clip, "image_token_index": IMAGE, "vision_feature_layer": -1, "image_seq_length": 4,
        "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu", "torch_dtype": "float32",
    }  # fmt: skip
    images = {
        "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28}, "do_center_crop": True,
        "crop_size": {"height": 28, "width": 28}, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        **processor,
    }  # fmt: skip
    combined = {"processor_class": "LlavaProcessor", "patch_size": 14, "num_additional_image_tokens": 1,
                "vision_feature_select_strategy": "default", "image_token": "<image>"}  # fmt: skip
    for name, value in (
        ("config.json", described), ("tokenizer.json", tokenizer), ("preprocessor_config.json", images),
        ("processor_config.json", combined), ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):  # fmt: skip
        (folder / name).write_text(json.dumps(value))
    return folder


class Frontend:
    """What of vLLM turns a user's prompt into an engine's request."""

    def __init__(self, model: Path, **arguments: Any) -> None:
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.input_processor import InputProcessor

        settings = {
            "skip_tokenizer_init": False,
            "load_format": "dummy",
            "limit_mm_per_prompt": {"image": 1},
            **arguments,
        }
        config = engine_config(model, **settings)
        self._renderer = renderer_from_config(config)
        self._inputs = InputProcessor(config, self._renderer)
        self._count = 0

    def request(self, image: Any, **more: Any) -> Any:
        from vllm import SamplingParams

        prompt = {"prompt_token_ids": [65, IMAGE, 66], "multi_modal_data": {"image": image}, **more}
        (rendered,) = self._renderer.render_cmpl([prompt])
        self._count += 1
        made = self._inputs.process_inputs(str(self._count), rendered, SamplingParams(), ("generate",))
        return SimpleNamespace(cache_salt=made.cache_salt, lora_request=None, mm_features=made.mm_features)


def name(request: Any) -> bytes:
    """Return how another engine, which has just started, calls a request's inputs."""
    from host_control.vllm.identity.requests import RequestInputs

    found = RequestInputs().extra(request, "")
    assert callable(found)
    return found()


def picture(shade: int) -> Any:
    from PIL import Image

    image = Image.new("RGB", (40, 30), (shade, 0, 0))
    image.putpixel((20, 15), (255, 255, 255))
    return image


def test_images_that_vllm_only_counts_are_told_apart(model: Path) -> None:
    without = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
    one = Frontend(model, **without).request(picture(1))
    other = Frontend(model, **without).request(picture(200))
    assert one.mm_features[0].identifier == other.mm_features[0].identifier, "the first image of each engine"
    assert name(one) != name(other)
    assert name(Frontend(model, **without).request(picture(1))) == name(one)


def test_a_user_s_word_for_an_image_is_not_believed(model: Path) -> None:
    said = {"multi_modal_uuids": {"image": ["cat"]}}
    one, other = (Frontend(model).request(picture(shade), **said) for shade in (1, 200))
    assert one.mm_features[0].identifier == other.mm_features[0].identifier == "cat"
    assert name(one) != name(other)
    assert name(Frontend(model).request(picture(1))) == name(one)


def test_what_an_engine_tells_its_processor_is_told_apart(model: Path) -> None:
    plain = Frontend(model).request(picture(1))
    told = Frontend(model, mm_processor_kwargs={"do_normalize": False}).request(picture(1))
    assert name(told) != name(plain)


def test_another_configuration_of_the_processor_is_told_apart(model: Path, tmp_path: Path) -> None:
    plain = Frontend(model).request(picture(1))
    changed = Frontend(seeing(tmp_path / "other", image_mean=[0.1, 0.1, 0.1])).request(picture(1))
    assert name(changed) != name(plain)


def test_images_whose_tensors_stay_with_the_workers_are_served_without_the_cache(model: Path) -> None:
    from host_control.vllm.support import UncacheableError

    frontend = Frontend(model)
    frontend.request(picture(1))
    again = frontend.request(picture(1))
    if again.mm_features[0].data is None:  # the engine's own cache of inputs puts it back; a worker's does not
        with pytest.raises(UncacheableError, match="worker's memory"):
            name(again)
