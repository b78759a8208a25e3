"""Answers that were trained on, in compressed files within a bound."""

import gzip
import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.metrics.rollout_files import Rollout, RolloutFiles, read_rollouts, rollout_files, step_of


def rollout(step: int, completion: str = "yes", *, reward: float = 1.0) -> Rollout:
    return Rollout(
        policy="qwen", step=step, kind="rollout", task="t", prompt_id="p", prompt="?", completion=completion,
        reward=reward, source="qwen", tokens=2, logprob_mean=-0.5, finish_reason="stop",
    )  # fmt: skip


def test_a_file_is_json_lines_that_any_program_reads(tmp_path: Path) -> None:
    """One file a policy and step; gzip and JSON alone open it."""
    RolloutFiles(tmp_path, "qwen", 10_000).write(7, [rollout(7), rollout(7, "nö", reward=float("nan"))])

    lines = gzip.decompress((tmp_path / "step_7" / "qwen.jsonl.gz").read_bytes()).decode().splitlines()
    first, second = map(json.loads, lines)
    assert list(first) == list(Rollout.__struct_fields__)
    assert (first["step"], first["reward"], first["oldest_step"]) == (7, 1.0, None)
    assert (second["completion"], second["reward"]) == ("nö", None)
    assert list(read_rollouts(tmp_path / "step_7" / "qwen.jsonl.gz")) == [first, second]


def test_files_are_found_by_step_then_policy(tmp_path: Path) -> None:
    """In the order of numbers; what else lies there is none of them."""
    for policy, step in (("qwen", 9), ("qwen", 10), ("llama", 10)):
        RolloutFiles(tmp_path, policy, 10_000).write(step, [rollout(step)])
    for stray in ("step_x/qwen.jsonl.gz", "step_9/qwen.jsonl", "step_9/.qwen.jsonl.gz.ab12"):
        (tmp_path / stray).parent.mkdir(exist_ok=True)
        (tmp_path / stray).write_text("")

    found = [(step_of(path), path.name) for path in rollout_files(tmp_path)]
    assert found == [(9, "qwen.jsonl.gz"), (10, "llama.jsonl.gz"), (10, "qwen.jsonl.gz")]
    assert [step_of(path) for path in rollout_files(tmp_path, "qwen")] == [9, 10]


def write_steps(folder: Path, steps: int, most: int, restarts: tuple[int, ...] = ()) -> list[int]:
    """Write so many steps within the room of `most` of them; returns those that are left, after checking the bound."""
    (folder / "one").mkdir()
    RolloutFiles(folder / "one", "qwen", 10**9).write(10, [rollout(10)])
    one = rollout_files(folder / "one")[0].stat().st_size + 2
    for step in range(1, steps + 1):
        if step == 1 or step in restarts:
            files = RolloutFiles(folder, "qwen", most * one)
        files.write(step, [rollout(step)])
        sizes = [path.stat().st_size for path in rollout_files(folder)]
        assert len(sizes) == 1 or sum(sizes) <= most * one
    return [step_of(path) for path in rollout_files(folder)]


@settings(max_examples=30)
@given(steps=st.integers(1, 60), most=st.integers(0, 12))
def test_within_the_bound_the_whole_run_is_covered(tmp_path_factory, steps: int, most: int) -> None:
    """Steps of one stride, a power of two that is no wider than needed, and the newest."""
    kept = write_steps(tmp_path_factory.mktemp("rollouts"), steps, most)

    stride = next(2**power for power in range(8) if steps <= 2**power * max(most, 1))
    assert kept == ([*range(stride, steps, stride), steps] if most else [steps])


@settings(max_examples=30)
@given(steps=st.integers(1, 60), most=st.integers(4, 12), restarts=st.sets(st.integers(2, 60), max_size=3))
def test_a_writer_that_died_leaves_its_files_to_the_next(
    tmp_path_factory, steps: int, most: int, restarts: set[int]
) -> None:
    """The bound holds over all lives, and no gap grows beyond what it asks for."""
    kept = write_steps(tmp_path_factory.mktemp("rollouts"), steps, most, tuple(restarts))

    assert kept[-1] == steps
    assert max(later - earlier for earlier, later in zip([0, *kept], kept, strict=False)) <= max(
        1, 4 * steps / (most - 2)
    )


def test_steps_that_were_thinned_out_leave_no_folders(tmp_path: Path) -> None:
    """After days they would be a hundred thousand; one in which somebody else has something stays."""
    one, other = RolloutFiles(tmp_path, "qwen", 1), RolloutFiles(tmp_path, "llama", 10**9)
    other.write(2, [rollout(2)])
    for step in range(1, 9):
        one.write(step, [rollout(step)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "step_8"]


def test_a_folder_that_another_policy_removes_in_that_moment_is_made_again(tmp_path: Path, monkeypatch) -> None:
    """Policies at one pace write to, and thin out, the same steps."""
    made = Path.mkdir

    def made_and_removed(path: Path, *how: bool, **more: bool) -> None:
        made(path, *how, **more)
        monkeypatch.setattr(Path, "mkdir", made)
        path.rmdir()

    files = RolloutFiles(tmp_path, "qwen", 10_000)
    monkeypatch.setattr(Path, "mkdir", made_and_removed)
    files.write(3, [rollout(3)])
    assert len(rollout_files(tmp_path)) == 1


def test_a_step_that_is_trained_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    """As after a resume from a checkpoint before it."""
    files = RolloutFiles(tmp_path, "qwen", 10_000)
    files.write(3, [rollout(3, "first")])
    files.write(3, [rollout(3, "second")])

    assert [row["completion"] for row in read_rollouts(rollout_files(tmp_path)[0])] == ["second"]


def test_steps_that_a_resume_voided_are_gone_with_the_first_step_behind_it(tmp_path: Path) -> None:
    """Until then they are what there is."""
    files = RolloutFiles(tmp_path, "qwen", 10_000)
    for step in (4, 5, 6):
        files.write(step, [rollout(step)])
    again = RolloutFiles(tmp_path, "qwen", 10_000)
    assert len(rollout_files(tmp_path)) == 3

    again.write(5, [rollout(5)])

    assert [step_of(path) for path in rollout_files(tmp_path)] == [4, 5]


def test_what_is_damaged_costs_what_is_behind_it(tmp_path: Path) -> None:
    """A file that was cut off gives the rows before the cut, one that is no gzip none."""
    rows = [rollout(1, str(number) * 200) for number in range(500)]
    RolloutFiles(tmp_path, "qwen", 10**6).write(1, rows)
    [path] = rollout_files(tmp_path)
    path.write_bytes(path.read_bytes()[:-200])

    assert [row["completion"] for row in read_rollouts(path)] == [row.completion for row in rows][: _num(path)]
    assert 0 < _num(path) < 500
    path.write_bytes(path.read_bytes()[:40] + b"\xff" * 200)
    assert 0 <= _num(path) < 500
    path.write_bytes(b"no gzip")
    assert list(read_rollouts(path)) == []


def _num(path: Path) -> int:
    return len(list(read_rollouts(path)))
