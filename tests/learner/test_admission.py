"""The admission window grows where the learner starves at a shut gate, and shrinks where it has plenty."""

from mrl.learner.prompts.admission_window import AdmissionWindow


def rich(window: AdmissionWindow, periods: int, *, replicas: int = 2) -> None:
    """Periods with three pulls each from two batches in stock, and no wait."""
    for _ in range(periods):
        for _ in range(3):
            window.pull(64)
        window.adjust(0.0, 0.0, 60.0, num_replicas=replicas)


def test_it_begins_at_the_staleness_bound_and_narrows_to_its_floor() -> None:
    """(eta + 1) batches; a fifth of a batch at a time; 1.25 batches at least, 1.5 with a single replica."""
    window = AdmissionWindow(32, 4)
    assert window.groups == 160
    rich(window, 1)
    assert window.groups == 160 - 0.2 * 32
    rich(window, 100)
    assert window.groups == 40

    lone = AdmissionWindow(32, 4)
    rich(lone, 100, replicas=1)
    assert lone.groups == 48


def test_starving_at_a_shut_gate_widens_it_up_to_the_bound() -> None:
    """Half a batch per period in which more than two percent were lost."""
    window = AdmissionWindow(32, 4)
    rich(window, 100)
    window.adjust(1.3, 1.3, 60.0, num_replicas=2)
    assert window.groups == 56
    for _ in range(20):
        window.adjust(10.0, 10.0, 60.0, num_replicas=2)
    assert window.groups == 160


def test_a_wait_that_the_gate_did_not_cause_does_not_widen_it() -> None:
    """The engines were slow: letting more in would only make it staler."""
    window = AdmissionWindow(32, 4)
    rich(window, 1)
    before = window.groups
    window.adjust(0.0, 30.0, 60.0, num_replicas=2)
    assert window.groups == before


def test_it_stays_between_plenty_and_want() -> None:
    """Two rich pulls, a poor one among them, or a wait that the gate did not cause change nothing."""
    window = AdmissionWindow(32, 4)
    for stock in (64, 64, 33, 64, 64):
        window.pull(stock)
    window.adjust(0.0, 0.0, 60.0, num_replicas=2)
    window.pull(64)
    window.adjust(0.0, 5.0, 60.0, num_replicas=2)
    window.adjust(1.0, 1.0, 60.0, num_replicas=2)
    assert window.groups == 160


def test_with_no_staleness_allowed_the_window_is_one_batch() -> None:
    """The floor never exceeds what the bound allows."""
    window = AdmissionWindow(32, 0)
    rich(window, 10)
    assert window.groups == 32
