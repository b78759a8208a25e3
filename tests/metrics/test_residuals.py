"""Files of residuals: what is written, what is left of them when they grow, how they are read from the end."""

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.errors import RecordError
from mrl.metrics import residuals as module
from mrl.metrics.residuals import ResidualWriter, every_steps, residual_files, standing_lines
from mrl.records.telemetry_messages import ResidualsRecord, RowResidual


def residuals(step: int, *record_ids: str, policy: str = "qwen") -> ResidualsRecord:
    rows = [
        RowResidual(
            source="llama", prompt_id="p", record_id=name, answer=0, trained=True, gap_nats=-1.5, flags=["NORM"]
        )
        for name in record_ids
    ]
    return ResidualsRecord(role=f"learner/{policy}", policy=policy, step=step, rows=rows)


def told(path: Path) -> list[tuple[int, str]]:
    """(step, record id) of the lines that stand, in the order of writing."""
    return [(line["step"], line["record_id"]) for line in standing_lines(path)][::-1]


def test_residuals_are_filed_by_receiver_a_line_per_answer(tmp_path: Path) -> None:
    """Every line says its step, and numbers that are not known are null."""
    writer = ResidualWriter(tmp_path / "residuals")
    for record in (residuals(1, "a", "b"), residuals(2, "c"), residuals(1, "d", policy="llama")):
        path = writer.write(record)
    assert path == tmp_path / "residuals" / "llama.jsonl"
    files = residual_files(tmp_path / "residuals")
    assert {name: told(path) for name, path in files.items()} == {
        "llama": [(1, "d")],
        "qwen": [(1, "a"), (1, "b"), (2, "c")],
    }
    *_, first = standing_lines(files["qwen"])
    assert (first["gap_nats"], first["flags"], first["ess_weight"], first["trained"]) == (-1.5, ["NORM"], None, True)
    with pytest.raises(RecordError, match="no plain name"):
        writer.write(residuals(1, "a", policy="../qwen"))


def test_steps_that_a_resume_took_back_are_left_out(tmp_path: Path) -> None:
    """A step that is made again stands once, with what came of it the second time; so do all that followed it."""
    writer = ResidualWriter(tmp_path)
    for step, name in ((1, "a"), (2, "b"), (3, "c"), (4, "d"), (2, "e"), (4, "f"), (4, "g")):
        path = writer.write(residuals(step, name))
    assert told(path) == [(1, "a"), (2, "e"), (4, "f"), (4, "g")]


@given(steps=st.lists(st.integers(1, 6), max_size=30), chunk_bytes=st.integers(1, 400), is_torn=st.booleans())
def test_reading_from_the_end_equals_a_slow_twin(tmp_path_factory, steps, chunk_bytes, is_torn) -> None:
    """Read forward, a step takes back all that are not below it; wherever the chunks are cut."""
    path = tmp_path_factory.mktemp("r") / "qwen.jsonl"
    path.write_bytes(b"")
    writer, slow = ResidualWriter(path.parent), []
    for number, step in enumerate(steps):
        if slow and slow[-1][0] != step:
            slow = [one for one in slow if one[0] < step]
        slow.append((step, str(number)))
        writer.write(residuals(step, str(number)))
    if is_torn:
        path.write_bytes(path.read_bytes() + b'{"step":7,"rec')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", chunk_bytes)
        assert told(path) == slow


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_damaged_line_is_named_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """With its number from the start of the file, torn as its end may be."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 7)
    rows = [b'{"step":1}', b'{"step":2}', b'{"step":3}']
    rows[number - 1] = b"{broken"
    path = tmp_path / "qwen.jsonl"
    path.write_bytes(b"\n".join([*rows, b'{"torn']))
    damage: list[str] = []
    assert len(list(standing_lines(path, damage.append))) == 2
    assert damage == [f"{path}:{number}: 1 damaged line is left out, this one"]


def test_a_file_stays_within_its_bound_and_spread_over_the_run(tmp_path: Path) -> None:
    """Whole steps, evenly spaced, from the first to the last; the file says which, and no other line is in it."""
    writer = ResidualWriter(tmp_path, max_bytes=20_000)
    for step in range(1, 301):
        for part in ("a", "b"):  # a step of several records
            path = writer.write(residuals(step, part, part))
            assert path.stat().st_size <= 20_000 + 2_000
    every = every_steps(path)
    assert every > 1
    assert every & (every - 1) == 0
    assert told(path) == [(step, part) for step in range(every, 301, every) for part in "aabb"]
    assert path.stat().st_size > 5_000, "no more is thrown away than has to be"


def test_what_was_left_out_is_left_out_after_a_restart(tmp_path: Path) -> None:
    """Another writer goes on in the same steps; steps made again take the old ones back."""
    first, path, step = ResidualWriter(tmp_path, max_bytes=4_000), tmp_path / "qwen.jsonl", 0
    while every_steps(path) == 1:
        step += 1
        first.write(residuals(step, "old"))
    second = ResidualWriter(tmp_path)
    for again in range(3, step + 4):
        second.write(residuals(again, "new"))
    assert every_steps(path) == 2
    assert told(path) == [(2, "old"), *((again, "new") for again in range(4, step + 4, 2))]


def test_a_file_that_is_not_there_leaves_nothing_out(tmp_path: Path) -> None:
    """Nor does one without lines, or one that was never thinned."""
    assert every_steps(tmp_path / "qwen.jsonl") == 1
    (tmp_path / "qwen.jsonl").touch()
    assert every_steps(tmp_path / "qwen.jsonl") == 1
    assert list(standing_lines(tmp_path / "qwen.jsonl")) == []
    assert residual_files(tmp_path / "missing") == {}


def test_reading_takes_no_memory_that_grows_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight times the lines, the same peak."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 16_384)
    peaks = []
    for size in (1, 8):
        writer = ResidualWriter(tmp_path / str(size))
        for step in range(200 * size):
            path = writer.write(residuals(step, "a"))
        tracemalloc.start()
        try:
            assert sum(1 for _ in standing_lines(path)) == 200 * size
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]
