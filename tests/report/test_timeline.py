"""Who waited for whom: shares, the part that is shown, and the drawing."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mrl.config.run_folder import RunFolder
from mrl.metrics.timeline import TimelineWriter
from mrl.records.telemetry_messages import Span, SpansRecord
from mrl.report.page import write_report
from mrl.report.run_data import read_run
from mrl.report.timeline_data import BINS, Share, Timeline, run_timeline
from mrl.report.timeline_picture import MAX_ROLES, timeline_html

T0 = 1_760_000_000.0
ROOM = "Who waited for whom"


def span(began_s: float, duration_s: float, kind: str, whom: str = "", **more: bool) -> Span:
    return Span(kind=kind, whom=whom, began_unix_s=T0 + began_s, duration_s=duration_s, **more)


def life(role: str, until_s: float) -> Iterator[SpansRecord]:
    """Ten seconds of starting, then 0.75 s of training and 0.25 s of waiting, again and again."""
    yield SpansRecord(role=role, policy="qwen", spans=[span(0, 10, "starting")])
    for second in range(10, int(until_s)):
        train = span(second, 0.75, "training")
        wait = span(second + 0.75, 0.25, "awaiting groups", "workers of qwen", is_wait=True)
        publish = span(second + 0.25, 0.1, "verifying", is_beside=True)
        yield SpansRecord(role=role, policy="qwen", spans=[train, wait, publish])


def filed(path: Path, *records: SpansRecord, max_bytes: int = 1 << 30) -> Path:
    writer = TimelineWriter(path, max_bytes=max_bytes)
    for record in records:
        writer.write(record)
    return path


def steps(first_s: float, last_s: float, every_s: float = 1.0) -> list[tuple[float, float]]:
    """A learner that ends a step every so often."""
    return [(T0 + first_s + n * every_s, n + 1.0) for n in range(int((last_s - first_s) / every_s) + 1)]


def test_shares_are_of_the_time_in_which_the_policy_learned(tmp_path: Path) -> None:
    """Starting counts nothing; a span on the border counts with the part that lies within."""
    path = filed(tmp_path / "t.jsonl", *life("learner/qwen", 100))
    timeline = run_timeline(path, {"qwen": steps(20.5, 80.5), "llama": steps(5, 95)})
    found = {what: round(seconds, 3) for what, seconds in timeline.seconds["learner/qwen"].items()}
    assert timeline.learning_of("learner/qwen").duration_s == 60.0
    assert timeline.learning_of("allocator").duration_s == 90.0
    assert found == {
        Share("starting", "", False, False): 0.0,
        Share("training", "", False, False): 45.0,
        Share("awaiting groups", "workers of qwen", True, False): 15.0,
        Share("verifying", "", False, True): 6.0,
    }


def test_the_window_lies_in_the_middle_and_holds_what_happened_there(tmp_path: Path) -> None:
    """25 s of quick steps; the lanes are cut to it, own and beside."""
    path = filed(tmp_path / "t.jsonl", *life("learner/qwen", 210))
    timeline = run_timeline(path, {"qwen": steps(10, 210)})
    begin_s, end_s = timeline.window
    assert (begin_s, end_s) == (T0 + 97.5, T0 + 122.5)
    own, beside = timeline.lanes["learner/qwen", ""].ended, timeline.lanes["learner/qwen", "verifying"].ended
    assert (own[0].began_s, own[-1].ended_s) == (begin_s, end_s)
    assert sum(one.duration_s for one in own if one.activity.kind == "training") == pytest.approx(18.75, abs=0.01)
    assert len(beside) == 25


def test_the_window_lies_where_all_policies_learn(tmp_path: Path) -> None:
    """A policy that was done early is not an empty row; where they never learned together, the middle of all counts."""
    path = filed(tmp_path / "t.jsonl", *life("learner/qwen", 400))
    both = run_timeline(path, {"qwen": steps(100, 400), "llama": steps(20, 160)})
    apart = run_timeline(path, {"qwen": steps(300, 400), "llama": steps(20, 120)})
    assert tuple(both.window) == (T0 + 117.5, T0 + 142.5)
    assert tuple(apart.window) == (T0 + 287.5, T0 + 312.5)


def test_the_window_holds_several_steps_where_they_are_slow(tmp_path: Path) -> None:
    """And no more than the time of learning."""
    path = filed(tmp_path / "t.jsonl", *life("learner/qwen", 1000))
    slow = run_timeline(path, {"qwen": steps(100, 900, 50.0)})
    short = run_timeline(path, {"qwen": steps(500, 510)})
    assert slow.window.duration_s == 200.0
    assert tuple(short.window) == (T0 + 500, T0 + 510)


def test_the_window_of_a_thinned_file_lies_where_there_is_something(tmp_path: Path) -> None:
    """Whichever minutes are kept."""
    path = filed(tmp_path / "t.jsonl", *life("learner/qwen", 3600), max_bytes=100_000)
    timeline = run_timeline(path, {"qwen": steps(10, 3600)})
    assert timeline.every_minutes >= 8
    assert sum(one.duration_s for one in timeline.lanes["learner/qwen", ""].ended) > 12
    assert f"only every {timeline.every_minutes}th minute" in timeline_html(timeline, ["qwen"])


def test_bins_hold_all_the_time_of_the_run(tmp_path: Path) -> None:
    """Every second of the role's own lane once, waits apart; what is beside is not in them."""
    path = filed(tmp_path / "t.jsonl", *life("learner/qwen", 100))
    bins = run_timeline(path, {}).bins["learner/qwen"]
    assert len(bins) == BINS
    assert sum(sum(found.values()) for found in bins) == pytest.approx(100.0)
    assert sum(found.get("", 0.0) for found in bins) == pytest.approx(22.5)
    assert max(sum(found.values()) for found in bins) == pytest.approx(100.0 / BINS)


def test_short_spans_are_drawn_together_with_their_sums_right(tmp_path: Path) -> None:
    """Of a long window nobody sees 10 ms: there are few shapes, half of one colour and half of the other."""
    kinds = ("sampling", "delivering")
    busy = [span(n / 100, 0.01, kinds[n % 2]) for n in range(20_000)]
    parts = (SpansRecord(role="worker/qwen/0", policy="qwen", spans=busy[n : n + 500]) for n in range(0, 20_000, 500))
    path = filed(tmp_path / "t.jsonl", *parts)
    timeline = run_timeline(path, {"qwen": steps(0, 200, 50.0)})
    lane = timeline.lanes["worker/qwen/0", ""].ended
    assert timeline.window.duration_s == 200.0
    assert len(lane) < 2100
    assert sum(one.duration_s for one in lane if one.activity.kind == "sampling") == pytest.approx(100.0, abs=0.5)


def test_roles_stand_by_policy_and_those_of_one_kind_are_left_out(tmp_path: Path) -> None:
    """Learners before their workers, those of no policy last, no row for what only ever serves."""
    told = {
        "worker/llama/0": ("sampling", "delivering"),
        "allocator": ("idle", "moving units"),
        "exchange": ("starting", "serving"),
        "learner/qwen": ("training", "publishing"),
        "worker/qwen/1": ("sampling", "delivering"),
        "worker/qwen/0": ("sampling", "delivering"),
        "learner/llama": ("training", "publishing"),
    }
    records = [
        SpansRecord(role=role, policy="", spans=[span(n, 1.0, kind) for n, kind in enumerate(kinds)])
        for role, kinds in told.items()
    ]
    timeline = run_timeline(filed(tmp_path / "t.jsonl", *records), {})
    assert timeline.roles(["qwen", "llama"]) == [
        "learner/qwen",
        "worker/qwen/0",
        "worker/qwen/1",
        "learner/llama",
        "worker/llama/0",
        "allocator",
    ]


def test_the_page_shows_rows_waits_steps_and_shares(make_run: Callable[..., Path]) -> None:
    """In the synthetic run a step ends every 1.2 s."""
    run = make_run(policies=1, steps=80)
    filed(RunFolder(run).timeline_jsonl, *life("learner/qwen", 120))
    page = write_report(run).read_text()
    section = page[page.index(ROOM) :]
    section = section[: section.index("</section>")]
    words = re.sub(r"<[^>]+>", "|", section)
    for expected in ("learner/qwen", "75% training", "25% groups (workers of qwen)", "10% verifying"):
        assert expected in words
    data = read_run(run)
    shown = [f"{step:g}" for time_s, step in data.step_ends["qwen"] if 56 < time_s - T0 < 80]
    assert len(shown) > 10
    assert all(f"|{step}|" in words for step in shown)
    assert section.count('class="waited"') > 25
    assert section.count('class="did t0"') > 25


def test_a_run_without_a_timeline_has_no_such_section(make_run: Callable[..., Path]) -> None:
    """As runs of before; one whose roles never did anything has none either."""
    run = make_run(steps=20)
    assert ROOM not in write_report(run).read_text()
    filed(RunFolder(run).timeline_jsonl, SpansRecord(role="exchange", policy="", spans=[span(0, 5, "serving")]))
    assert ROOM not in write_report(run).read_text()
    assert timeline_html(Timeline(), ["qwen"]) == ""


def test_a_damaged_line_of_the_timeline_is_named_and_the_rest_is_shown(make_run: Callable[..., Path]) -> None:
    """It costs only itself."""
    run = make_run(policies=1, steps=20)
    path = filed(RunFolder(run).timeline_jsonl, *life("learner/qwen", 60))
    path.write_bytes(path.read_bytes() + b"{broken\n")
    text = write_report(run).read_text()
    assert "timeline.jsonl:152: skipped a damaged line" in text
    assert "Training reward" in text


def test_hostile_names_stay_text(make_run: Callable[..., Path]) -> None:
    """Roles, kinds and whom are shown, not obeyed, in drawing and table."""
    run = make_run(policies=1, steps=20)
    evil = "<script>alert(1)</script>"
    spans = [span(20, 8, evil), span(28, 8, "training"), span(36, 8, f"awaiting {evil}", evil, is_wait=True)]
    spans.append(span(20, 8, evil, is_beside=True))
    filed(RunFolder(run).timeline_jsonl, SpansRecord(role=f"worker/qwen/{evil}", policy="qwen", spans=spans))
    text = write_report(run).read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;") > 5


def test_many_roles_are_cut_and_counted(tmp_path: Path) -> None:
    """The drawing stays readable and says what it leaves out."""
    records = [
        SpansRecord(role=f"worker/qwen/{n}", policy="qwen", spans=[span(0, 30, "sampling"), span(30, 30, "delivering")])
        for n in range(MAX_ROLES + 5)
    ]
    html = timeline_html(run_timeline(filed(tmp_path / "t.jsonl", *records), {}), ["qwen"])
    assert "5 more roles are not shown" in html
    assert html.count('class="policy c0"') == MAX_ROLES
