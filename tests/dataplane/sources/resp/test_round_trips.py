"""Round trips of a lookup over several storage nodes."""

import pytest
from dataplane_support import keys_of, layout
from machine import WAIT_MAX_S
from scripted_node import fleet

SHAPE = layout()


async def test_records_of_several_sizes_take_a_lookup_of_idle_nodes_no_second_round_trip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Symptom: over four idle nodes the lookup of a long prompt took 1.3 times as long as over one."""
    for limit in ("several._SECOND_S", "server._LOAD_S", "source._AVOID_S"):
        monkeypatch.setattr(f"dpu_dataplane.sources.resp.{limit}", WAIT_MAX_S)
    for module in ("dpu_dataplane.sources.resp.several", "shadowserve.placement"):
        monkeypatch.setattr(f"{module}.WAIT_MARGIN_US", 0)
    async with fleet(2, 40) as (nodes, _, client):
        for seed in range(10):
            chain = keys_of(SHAPE, 40, seed)
            for node in nodes:
                for index, key in enumerate(chain):
                    node.fill(SHAPE, [key], "none" if index % 3 else "kvrans")
            for _ in range(2):  # sizes are known, and then the rate of the link
                assert (await client.lookup(chain)).hits == [40]
                assert (await client.fetch(chain)).chunks == 40
            for node in nodes:
                node.asked.clear()
            assert (await client.lookup(chain)).hits == [40]
            assert max(node.asked["KV.META"] for node in nodes) <= 2, "one as first, one as second choice"
