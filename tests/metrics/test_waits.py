"""Circles of waits: found exactly where there are some, and told once."""

import itertools
import random

from mrl.metrics.waits import FRESH_S, STEADY_S, Wait, WaitWatch, wait_cycle, wait_edges
from mrl.records.telemetry_messages import HeartbeatRecord


def beat(role: str, whom: str = "", *, for_s: float = STEADY_S, time_unix_s: float = 100.0) -> HeartbeatRecord:
    return HeartbeatRecord(
        role=role, policy="", pid=1, time_unix_s=time_unix_s, doing="x", awaiting="groups" if whom else "", whom=whom,
        for_s=for_s, bound_s=60.0,
    )  # fmt: skip


def has_cycle(nodes: list[str], edges: set[tuple[str, str]]) -> bool:
    """The slow, obvious way: try every circle."""
    for length in range(1, len(nodes) + 1):
        for circle in itertools.permutations(nodes, length):
            if all(pair in edges for pair in zip(circle, (*circle[1:], circle[0]), strict=True)):
                return True
    return False


def test_a_thousand_random_graphs() -> None:
    """A circle is named exactly when there is one, and it is one."""
    rng, found = random.Random(5), 0
    for _ in range(1000):
        nodes = [f"n{number}" for number in range(rng.randint(1, 6))]
        pairs = [(a, b) for a in nodes for b in nodes]
        edges = set(rng.sample(pairs, rng.randint(0, min(len(pairs), len(nodes) + 1))))
        cycle = wait_cycle(edges)
        assert bool(cycle) == has_cycle(nodes, edges), edges
        assert all(pair in edges for pair in zip(cycle, cycle[1:] + cycle[:1], strict=True))
        assert len(set(cycle)) == len(cycle)
        shuffled = rng.sample(sorted(edges), len(edges))
        assert wait_cycle(shuffled) == cycle
        found += bool(cycle)
    assert 200 < found < 800


def test_a_long_chain_is_no_problem() -> None:
    names = [f"n{number:05}" for number in range(20_000)]
    assert wait_cycle(itertools.pairwise(names)) == []


def test_many_ways_to_the_same_place_are_looked_at_once() -> None:
    """Each of 40 layers of three waits for all of the next: 3**40 paths."""
    layers = [[f"l{layer:02}-{place}" for place in range(3)] for layer in range(40)]
    edges = [(a, b) for upper, lower in itertools.pairwise(layers) for a in upper for b in lower]
    assert wait_cycle(edges) == []


def wait(whom: str, *, since: float = 100.0 - 2 * STEADY_S, heard: float = 100.0) -> Wait:
    return Wait("groups", whom, since, heard)


def test_who_waits_for_one_of_several_is_held_up_only_by_all_of_them() -> None:
    waits = {"learner/a": wait("worker/a"), "worker/a/0": wait("learner/a"), "worker/a/1": wait("")}
    assert wait_cycle(wait_edges(waits, 100.0)) == []
    waits["worker/a/1"] = wait("learner/a")
    assert wait_cycle(wait_edges(waits, 100.0)) == ["learner/a", "worker/a/0"]


def test_short_waits_old_words_and_other_names_do_not_count() -> None:
    pair = {"learner/a": wait("learner/ab"), "learner/ab": wait("learner/a")}
    assert len(wait_edges(pair, 100.0)) == 2
    assert len(wait_edges(pair, 100.1 + FRESH_S)) == 0
    assert wait_edges(pair | {"learner/a": wait("learner/ab", since=100.1 - STEADY_S)}, 100.0) == []
    assert wait_edges({"learner/a": wait("learner"), "learner/ab": wait("exchange")}, 100.0) == [
        ("learner/a", "learner/a"), ("learner/a", "learner/ab")
    ]  # fmt: skip


def test_a_circle_is_told_once_and_again_after_it_was_gone() -> None:
    watch = WaitWatch()
    assert watch.note(beat("learner/a", "learner/b, learner/c")) == ""
    line = watch.note(beat("learner/b", "learner/a"))
    first, second = "learner/a for groups of learner/b, learner/c", "learner/b for groups of learner/a"
    assert line == f"they wait for each other: {first}, {second}"
    assert watch.note(beat("learner/a", "learner/b, learner/c")) == ""
    assert watch.note(beat("learner/b")) == ""
    assert watch.note(beat("learner/b", "learner/a")) == line


def test_a_wait_in_slices_is_one_wait() -> None:
    """A worker asks again and again; each time it waits for half a second."""
    watch = WaitWatch()
    for second in range(int(STEADY_S)):
        assert watch.note(beat("learner/a", "worker/a", time_unix_s=100.0 + second, for_s=second)) == ""
        assert watch.note(beat("worker/a/0", "learner/a", time_unix_s=100.0 + second, for_s=0.1)) == ""
    assert watch.note(beat("learner/a", "worker/a", time_unix_s=101.0 + STEADY_S)).startswith(
        "they wait for each other: learner/a"
    )
