"""What a wait for groups is held against: whoever gets on, however slowly, is waited for."""

import pytest

from mrl.learner.worker_activity import WaitBounds, WorkerActivity
from mrl.records.rollouts import WorkRequest

BOUNDS = WaitBounds(data_timeout_s=10.0, first_word_s=40.0, loading_s=100.0)


def asks(worker: str = "w", *, progress: int = 0, is_loading: bool = False) -> WorkRequest:
    return WorkRequest(worker=worker, max_groups=0, holding=[], progress=progress, is_loading=is_loading)


def why_after(news: WorkerActivity, now_s: float, began_s: float = 0.0) -> str:
    return BOUNDS.given_up(news, began_s, now_s)


def test_a_worker_that_samples_a_token_in_each_timeout_is_waited_for_for_ever():
    """And given up once none comes, though it is heard every second."""
    news = WorkerActivity.since(0.0)
    for second in range(1000):
        news.asked(asks(progress=second // 9), float(second), serves=True)
        assert not why_after(news, float(second))
    for second in range(1000, 1012):
        news.asked(asks(progress=111), float(second), serves=True)
    assert why_after(news, 1012.0) == "nothing was sampled, judged, published or loaded for 10 s"


def test_one_of_several_workers_is_enough():
    """The others may hang: the supervisor and the ledger see to them."""
    news = WorkerActivity.since(0.0)
    for second in range(100):
        news.asked(asks("slow", progress=second), float(second), serves=True)
        news.asked(asks("hangs", progress=7), float(second), serves=True)
    assert not why_after(news, 100.0)


def test_silence_is_told_from_standing_still():
    news = WorkerActivity.since(0.0)
    news.asked(asks(), 1.0, serves=True)
    assert why_after(news, 11.1) == "no message from any worker for 10 s"


def test_a_process_may_take_longer_to_its_first_word_than_to_any_other():
    """On a slow machine its imports alone take minutes."""
    assert not why_after(WorkerActivity.since(0.0), 39.9)
    assert why_after(WorkerActivity.since(0.0), 40.1) == "no message from any worker for 40 s"


def test_loading_is_waited_for_as_long_as_the_engine_may_take():
    """From when something was last sampled; the first word of a worker counts as that."""
    news = WorkerActivity.since(0.0)
    for second in range(200):
        news.asked(asks(is_loading=True), float(second), serves=False)
        why = why_after(news, float(second))
        assert bool(why) == (second > 100)
    assert why == "workers only started engines or loaded weights for 100 s; no token was sampled"


@pytest.mark.parametrize(
    ("serves", "is_loading", "served"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_weights_count_once_they_are_proved(serves: bool, is_loading: bool, served: bool):
    """Those of an earlier life that nobody may train on, and those that are still looked at, do not."""
    news = WorkerActivity.since(0.0)
    news.asked(asks(is_loading=is_loading), 1.0, serves=serves)
    assert news.has_served == served


def test_workers_without_work_are_waited_for_while_new_weights_get_on():
    """Their version is written for longer than any timeout; once it stands still they are given up."""
    news = WorkerActivity.since(0.0)
    for second in range(50):
        news.asked(asks(progress=3), float(second), serves=True)
        news.publishing(second // 9, float(second))
        assert not why_after(news, float(second))
    for second in range(50, 60):
        news.asked(asks(progress=3), float(second), serves=True)
        news.publishing(49 // 9, float(second))
    assert why_after(news, 60.0) == "nothing was sampled, judged, published or loaded for 10 s"


def test_every_sign_of_life_but_words_is_a_move():
    """What peers that wait for this policy hear of."""
    news = WorkerActivity.since(0.0)
    moves = []
    for act in (
        lambda: news.asked(asks(), 1.0, serves=True),
        lambda: news.asked(asks(), 2.0, serves=True),
        lambda: news.asked(asks(progress=1), 3.0, serves=True),
        lambda: news.asked(asks(progress=1, is_loading=True), 4.0, serves=True),
        lambda: news.delivered(5.0),
        lambda: news.announced(6.0),
        lambda: news.publishing(9, 7.0),
        lambda: news.publishing(9, 8.0),
    ):
        before = news.num_moves
        act()
        moves.append(news.num_moves > before)
    assert moves == [True, False, True, True, True, True, True, False]


def test_nothing_counts_that_was_before_the_wait():
    """While the learner trained its workers had nothing to do."""
    news = WorkerActivity.since(0.0)
    news.asked(asks(), 1.0, serves=True)
    assert not why_after(news, 1005.0, began_s=1000.0)
    assert why_after(news, 1011.0, began_s=1000.0)
