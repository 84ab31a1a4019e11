"""What is learnt of the time that an engine computes with a layer."""

import pytest

from host_control.layer_window import LayerWindow


def run(window: LayerWindow, tokens: int, layers: int, computes_s: float, waits_s: float) -> float:
    expected, now_s = window.step(tokens), 100.0
    for _ in range(layers):
        window.waited(now_s, now_s + waits_s)
        now_s += waits_s + computes_s
    window.end()
    return expected


def test_nothing_is_expected_before_anything_was_seen_and_steps_without_layers_say_nothing() -> None:
    window = LayerWindow()
    assert run(window, 100, 0, 0.0, 0.0) == 0
    assert run(window, 100, 1, 0.3, 0.1) == 0  # of one layer nothing is known: the next has no beginning
    assert window.step(100) == 0


@pytest.mark.parametrize("waits_s", [0.0, 5.0])
def test_a_layer_takes_what_it_took_for_each_token_however_long_was_waited(waits_s: float) -> None:
    window = LayerWindow()
    run(window, 100, 24, 0.2, waits_s)
    assert window.step(100) == pytest.approx(0.2)
    assert window.step(50) == pytest.approx(0.1)


def test_what_changes_is_followed() -> None:
    window = LayerWindow()
    run(window, 100, 24, 0.2, 0.0)
    run(window, 100, 24, 0.4, 0.0)
    assert window.step(100) == pytest.approx(0.3)
    for _ in range(20):
        run(window, 100, 24, 0.4, 0.0)
    assert window.step(100) == pytest.approx(0.4)
