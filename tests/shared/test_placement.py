"""Placement of segments on nodes, and the choice between two nodes."""

from collections import Counter

from shadowserve.placement import PARTITIONS, Choice, Placement, Rates, Waits

NAMES = [f"10.0.0.{number}:6380" for number in range(5)]


def test_nodes_have_partitions_by_weight_and_a_change_moves_only_those_of_the_changed_node() -> None:
    weights = {name: 1.0 + (name == NAMES[0]) for name in NAMES}
    before = Placement(weights).firsts()
    shares = Counter(before)
    assert abs(shares[NAMES[0]] / PARTITIONS - 2 / 6) < 0.03
    assert all(abs(shares[name] / PARTITIONS - 1 / 6) < 0.03 for name in NAMES[1:])
    assert Placement(dict(reversed(weights.items()))).firsts() == before, "the order of the nodes must not matter"
    for changed in (weights | {NAMES[1]: 2.0}, {name: weights[name] for name in NAMES if name != NAMES[1]}):
        after = Placement(changed).firsts()
        moved = [pair for pair in zip(before, after, strict=True) if len(set(pair)) == 2]
        assert moved and all(NAMES[1] in pair for pair in moved)
    full, fewer = Placement(weights), Placement({name: weights[name] for name in NAMES[1:]})
    for partition in range(100):
        assert tuple(each for each in full.ranking(partition) if each != NAMES[0]) == fewer.ranking(partition)


def test_the_second_choice_is_taken_only_for_a_clearly_shorter_wait() -> None:
    for first_us, second_us, extra_us, taken in (
        (0, 0, 0, "a"),
        (9_000, 0, 0, "a"),  # within the margin
        (11_000, 0, 0, "b"),
        (100_000, 80_000, 0, "a"),  # within the factor
        (100_000, 50_000, 0, "b"),
        (100_000, 0, 80_000, "a"),  # the bucket would need as long
        (100_000, None, 0, "a"),  # its load is not known
    ):
        loads = {"a": first_us, "b": second_us}
        waits = Waits({node: load_us for node, load_us in loads.items() if load_us is not None})
        assert waits.choose(Choice("a"), Choice("b", extra_us), 1 << 20) == taken, (first_us, second_us, extra_us)
    assert Waits({"a": 10**9}).choose(Choice("a"), None, 1) == "a"


def test_a_fetch_is_balanced_by_what_it_has_planned() -> None:
    """One long prompt whose segments by chance lie on the same node: half of it is read from the other one."""
    size, us_per_byte = 1 << 20, 0.1
    waits = Waits({"a": 0, "b": 0}, us_per_byte)
    taken = Counter(waits.choose(Choice("a"), Choice("b"), size) for _ in range(32))
    assert taken["a"] <= 18
    waits = Waits({"a": 0, "b": 0})
    assert {waits.choose(Choice("a"), Choice("b"), size) for _ in range(32)} == {"a"}, "without a rate, loads decide"


def test_a_slow_node_gets_no_segments_until_it_is_tried_again() -> None:
    """Symptom: a node whose link was slowed tenfold got the next segment whenever its queue was empty."""
    rates, mib = Rates(), 1 << 20
    for number in range(8):
        rates.note({"a": 100.0, "b": 60.0, "c": 30.0}, now_s=number)
    assert rates.slow(8.0) == {}, "nodes that share their links differ as much"
    for number in range(3):
        rates.note({"a": 5.0, "b": 50.0}, now_s=9.0 + number)
        assert rates.slow(9.0 + number) == {}, "it was fast before"
    rates.note({"a": 6.0, "b": 50.0}, now_s=12.0)
    slow = rates.slow(12.0)
    assert slow == {"a": 1 / 6}
    waits = Waits({"a": 0, "b": 0}, rates.us_per_byte, slow)
    assert waits.choose(Choice("a"), Choice("b"), mib) == "b" and waits.choose(Choice("b"), Choice("a"), mib) == "b"
    for now_s in (20.0, 30.0, 40.0):
        rates.note({"b": 50.0, "c": 50.0}, now_s=now_s)
    assert rates.slow(40.0) == {}, "it is tried again"
    rates.note({"a": 10.0}, now_s=41.0)
    assert rates.slow(41.0) == {"a": 0.1}, "one batch is enough"
    rates.note({"a": 50.0}, now_s=42.0)
    assert rates.slow(42.0) == {}
    rates.note({"a": 1.0, "b": 50.0, "c": 50.0}, now_s=80.0)
    assert rates.slow(80.0) == {"a": 1.0}
    rates.keep({"b": 1.0, "c": 1.0})
    assert rates.slow(80.0) == {}
