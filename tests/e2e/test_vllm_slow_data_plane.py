"""The symptom was a first prompt that was not stored: two seconds to connect had to be enough."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def test_engine_beside_a_data_plane_that_is_slow_to_answer_stores_its_first_prompt(
    make_engine: Any, data_plane: Any, prompt: Any
) -> None:
    data_plane.script.stall.add("Hello")

    def answer_late() -> None:
        data_plane.wait_for_call("Hello")
        time.sleep(3)
        data_plane.script.unstall.set()

    with ThreadPoolExecutor(1) as others:
        late = others.submit(answer_late)
        engine = make_engine(data_plane.address)
        try:
            engine.outputs([prompt(600)])
            late.result()
            engine.flush()
            assert len(data_plane.records) == 2, engine.counters()
        finally:
            engine.close()
