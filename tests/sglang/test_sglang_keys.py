"""SGLang's keys of media, which lack an image's shape: so the backend refuses models with media."""

import json
import os
import subprocess

from shadowserve_tools.bench.peers.sglang import FOLDER

_KEYS = """
import json, torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

def values(shape, fill):
    grid = {"image_grid_thw": torch.tensor([[1, *shape]])}
    item = MultimodalDataItem(modality=Modality.IMAGE, feature=torch.full((32, 24), fill), model_specific_data=grid)
    item.set_pad_value()
    return item.padding_sequence(8)

print(json.dumps([values((4, 8), 0.5), values((8, 4), 0.5), values((4, 8), 0.25)]))
"""


def test_images_with_the_same_patches_and_another_shape_have_the_same_tokens_in_keys() -> None:
    """Positions depend on the shape, so the KV differs. Should this fail, media may be supported."""
    answer = subprocess.run(
        [os.environ["SGLANG_PYTHON"], "-c", _KEYS],
        env=os.environ | {"PYTHONPATH": str(FOLDER)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    image, turned, other = json.loads(answer.stdout.splitlines()[-1])
    assert image == turned
    assert image != other
