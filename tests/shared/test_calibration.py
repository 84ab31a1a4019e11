"""The artefact of a calibration: what a file holds, and the reasons that refuse one."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from shadowserve import native
from shadowserve.calibration import FILE_BYTES_MAX, PRESETS, Calibration, read
from shadowserve.errors import ConfigurationError, NotInstalledError, ShadowServeError

LAYERS, HEADS, SIZE, PAIRS = 3, 4, 16, 6
SHAPE = (LAYERS, 2, HEADS, SIZE)


@pytest.fixture
def made() -> Calibration:
    chance = np.random.default_rng(1)
    steps = {preset: chance.uniform(0.1, 2.0, SHAPE).astype(np.float32) for preset in PRESETS}
    centres = chance.normal(size=SHAPE).astype(np.float32)
    about = ("a model", "LlamaForCausalLM", '{"rope_theta": 1e4}')
    return Calibration(*about, steps, centres, chance.uniform(0, 1, PAIRS))


@pytest.fixture
def file(made: Calibration, tmp_path: Path) -> Path:
    made.write(tmp_path / "model.calibration")
    return tmp_path / "model.calibration"


def changed(file: Path, tensors: dict[str, Any] | None = None, **described: Any) -> None:
    """Write the file again with other tensors (None: without) and another description."""
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    text = json.loads(header["__metadata__"]["shadowserve"]) | described
    every = {name: array for name, array in (load(data) | (tensors or {})).items() if array is not None}
    file.write_bytes(save(every, {"shadowserve": json.dumps(text)}))


def refusal(file: Path) -> str:
    with pytest.raises(ConfigurationError) as refused:
        read(file)
    message = str(refused.value)
    assert str(file) in message and "\n" not in message and len(message) < 1500
    return message


def test_a_calibration_comes_back_with_all_numbers(made: Calibration, file: Path) -> None:
    back = read(file)
    assert (back.model, back.architecture, back.rope) == ("a model", "LlamaForCausalLM", '{"rope_theta": 1e4}')
    assert (back.layers, back.kinds, back.heads, back.head_size) == (LAYERS, 2, HEADS, SIZE)
    assert PRESETS == ("near_lossless", "small", "tiny")
    for preset in PRESETS:
        np.testing.assert_array_equal(back.steps[preset], made.steps[preset])
    np.testing.assert_array_equal(back.centres, made.centres)
    np.testing.assert_array_equal(back.frequencies, made.frequencies)
    assert back.digest == made.digest and len(back.digest) == 32
    assert os.listdir(file.parent) == [file.name]


def test_a_model_without_rope_has_no_frequencies(made: Calibration, file: Path) -> None:
    replace(made, frequencies=np.empty(0)).write(file)
    assert len(read(file).frequencies) == 0


@pytest.mark.parametrize("name", [*PRESETS, "centres", "frequencies"])
def test_the_digest_changes_with_any_number(made: Calibration, name: str) -> None:
    steps = {preset: array.copy() for preset, array in made.steps.items()}
    other = replace(made, steps=steps, centres=made.centres.copy(), frequencies=made.frequencies.copy())
    assert other.digest == made.digest
    array = {**steps, "centres": other.centres, "frequencies": other.frequencies}[name]
    array.flat[-1] = np.nextafter(array.flat[-1], array.dtype.type(2))
    assert replace(other).digest != made.digest


def test_the_digest_of_the_same_numbers_in_other_places_differs(made: Calibration) -> None:
    steps = made.steps | {"small": made.steps["tiny"], "tiny": made.steps["small"]}
    assert replace(made, steps=steps).digest != made.digest
    shaped = {preset: array.reshape(LAYERS, 2, 2 * HEADS, SIZE // 2) for preset, array in made.steps.items()}
    without = replace(made, frequencies=np.empty(0))
    other = replace(without, steps=shaped, centres=made.centres.reshape(LAYERS, 2, 2 * HEADS, SIZE // 2))
    assert other.digest != without.digest


def test_a_shard_has_the_numbers_of_its_layers_and_heads(made: Calibration) -> None:
    shard = made.preset("small").shard((1, 3), (2, 3))
    np.testing.assert_array_equal(shard.steps, made.steps["small"][1:3, :, 2:3])
    np.testing.assert_array_equal(shard.centres, made.centres[1:3, :, 2:3])
    np.testing.assert_array_equal(shard.frequencies, made.frequencies)


@pytest.mark.parametrize("wanted", [{"layers": (0, 4)}, {"heads": (3, 3)}, {"heads": (-1, 2)}, {"layers": (2, 1)}])
def test_a_shard_outside_of_the_model_is_refused(made: Calibration, wanted: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"there are no {next(iter(wanted))} .* the calibration has"):
        made.preset("tiny").shard(**{"layers": (0, 1), "heads": (0, 1)} | wanted)


def test_channels_have_a_row_for_each_layer_and_kind(made: Calibration) -> None:
    channels = made.preset("small").shard((0, 2), (1, 3)).channels(tokens=8)
    assert isinstance(channels, native.Channels)
    assert (channels.rows, channels.vector_length) == (4, 2 * SIZE)


def test_a_file_that_is_cut_off_or_flipped_is_refused_or_differs(made: Calibration, file: Path) -> None:
    data = file.read_bytes()
    for length in (0, 7, 8, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        assert "is no valid calibration" in refusal(file)
    for place in range(0, len(data), 61):
        file.write_bytes(data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :])
        try:
            back = read(file)
        except ConfigurationError:
            continue
        same_text = (back.model, back.architecture) == (made.model, made.architecture)
        assert back.digest != made.digest or not same_text, place


@pytest.mark.parametrize(
    ("name", "value"),
    [("steps/small", np.nan), ("steps/small", 0.0), ("steps/tiny", -1.0), ("steps/tiny", np.inf)]
    + [("steps/near_lossless", 2.0**101), ("centres", np.nan), ("centres", -np.inf), ("frequencies", np.nan)],
)
def test_a_number_out_of_range_is_refused(file: Path, name: str, value: float) -> None:
    array = load(file.read_bytes())[name].copy()
    array.flat[5] = value
    changed(file, {name: array})
    assert re.search("not finite, or too large|not positive", refusal(file))


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"steps/small": np.ones((LAYERS, 2, HEADS, SIZE + 1), np.float32)}, "steps/small has the shape"),
        ({"steps/small": np.ones(SHAPE)}, "steps/small has the type float64"),
        ({"frequencies": np.ones(PAIRS, np.float32)}, "frequencies has the type float32"),
        ({"frequencies": np.ones(SIZE)}, "more than half of a head"),
        ({"frequencies": np.ones((2, 2))}, "2 dimensions"),
        ({"centres": np.ones(8, np.float32)}, "centres have the shape"),
        ({"steps/tiny": None}, "its tensors are not"),
        ({"steps/large\n\n": np.ones(SHAPE, np.float32)}, "its tensors are not"),
    ],
)
def test_tensors_that_are_missing_or_of_another_shape_or_type_are_refused(
    file: Path, tensors: dict[str, Any], reason: str
) -> None:
    changed(file, tensors)
    assert reason in refusal(file)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [((1, 3, 1, 8), "centres have the shape"), ((1, 2, 0, 8), "centres have the shape"), ((1, 2, 1, 1025), "1024")],
)
def test_sizes_that_no_model_has_are_refused(file: Path, shape: tuple[int, ...], reason: str) -> None:
    every = {name: np.ones(shape, np.float32) for name in ("centres", *(f"steps/{preset}" for preset in PRESETS))}
    changed(file, every | {"frequencies": np.ones(4)})
    assert reason in refusal(file)


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        ({"version": 2}, "it has the version 2, this build reads 1"),
        ({"version": None}, "it has the version None"),
        ({"layers": LAYERS + 1}, "does not fit its tensors"),
        ({"more": 1}, "does not fit its tensors"),
        ({"model": "two\nlines"}, "printable text"),
        ({"model": 5}, "printable text"),
    ],
)
def test_another_version_or_description_is_refused(file: Path, described: dict[str, Any], reason: str) -> None:
    changed(file, **described)
    assert reason in refusal(file)


def test_a_file_of_another_program_is_refused(file: Path) -> None:
    file.write_bytes(save({"weight": np.ones(4, np.float32)}))
    assert "another program wrote it" in refusal(file)
    file.write_bytes(save({"weight": np.ones(4, np.float32)}, {"shadowserve": "[" * 50000}))
    assert "is no valid calibration" in refusal(file)
    file.write_bytes(b"PK\x03\x04" * 100)
    assert "another program wrote it" in refusal(file)


def test_a_missing_file_a_folder_a_pipe_and_a_huge_file_are_refused(file: Path, tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none")
    refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refusal(tmp_path / "pipe")
    os.truncate(file, FILE_BYTES_MAX + 1)
    assert "more than 268,435,456" in refusal(file)


def test_a_file_that_cannot_be_written_leaves_nothing_behind(made: Calibration, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(ShadowServeError, match=f"cannot write {target}"):
        made.write(target)
    assert os.listdir(tmp_path) == ["target"]


def test_the_missing_package_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(NotInstalledError, match="safetensors, which is not installed; pip install safetensors"):
        read(file)
