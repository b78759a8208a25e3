"""The report page."""

import json
import math
import re
import tracemalloc
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mrl.config.run_folder import RunFolder
from mrl.errors import RunFolderError
from mrl.metrics.jsonl import MetricsWriter, SampleWriter
from mrl.records.telemetry_messages import MetricsRecord, SampleRecord
from mrl.report.page import write_report
from mrl.report.run_data import read_run

VOID = {"meta", "line", "rect", "circle", "path", "br"}


class Outline(HTMLParser):
    """Checks that elements nest, and collects elements, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def outline(path: Path) -> Outline:
    parser = Outline()
    parser.feed(path.read_text(encoding="utf-8"))
    parser.close()
    assert parser.open == []
    return parser


def test_the_load_of_hosts_and_gpus_is_a_table(make_run: Callable[..., Path]) -> None:
    """Means and extremes over the run, hosts first; without measurements there is no table."""
    folder = make_run(steps=20)
    assert 'class="loads"' not in write_report(folder).read_text(encoding="utf-8")
    writer = MetricsWriter(RunFolder(folder).metrics_jsonl)
    for busy, used in ((0.2, 1000.0), (0.6, 3000.0)):
        values = {"gpu/busy_share/n1:0": busy, "gpu/power_w/n1:0": 300 * busy, "host/cpu_share/n1": busy / 2}
        values |= {"host/memory_mib/n1": used, "host/memory_free_mib/n1": 5000 - used, "host/disk_free_mib/n1": used}
        record = MetricsRecord(role="supervisor", policy="", step=20, time_unix_s=2e9, values=values)
        writer.write(record)
    writer.close()

    table = re.search(r'<table class="loads">(.*?)</table>', write_report(folder).read_text(encoding="utf-8"))
    assert table
    rows = [re.findall(r"<td.*?>(.*?)</td>", row) for row in table[1].split("<tr>")[2:]]
    assert rows == [
        ["host n1", "20%", "30%", "3.1 GB", "2.1 GB", "1.0 GB", "-"],
        ["gpu n1:0", "40%", "60%", "-", "-", "-", "120"],
    ]


def test_page_holds_every_part(make_run: Callable[..., Path]) -> None:
    """A whole run shows summary, curves, diagram, slots and answers, all with titles, and nothing is missing."""
    page = outline(write_report(make_run(steps=80)))
    text = " ".join(page.texts)
    titles = (
        "Held-out accuracy, start and end",
        "Training reward",
        "Rescues per step",
        "All-failed groups that were rescued",
        "Staleness of own answers",
        "Waiting for own groups",
        "Where the time of a step goes",
        "Experience between policies",
        "Rollout slots of every policy",
        "Own answers",
    )
    for title in titles:
        assert title in text
    for label in ("learner step", "mean reward", "staleness (versions)", "minutes since the start", "reverse: yah"):
        assert label in text
    assert "No data was recorded." not in text


def test_units_are_drawn_as_slots_are(make_run: Callable[..., Path]) -> None:
    """A run leases the one or the other; each policy has its area, and the number that it had last."""
    folder = make_run(steps=20)
    metrics = RunFolder(folder).metrics_jsonl
    metrics.write_text(metrics.read_text().replace("allocation/slots", "allocation/held_units"))
    data = read_run(folder)
    drawing = write_report(folder).read_text().partition("Rollout units of every policy")[2].partition("</figure>")[0]
    assert "Units that each policy owns" in drawing
    for place, name in enumerate(data.policies):
        assert drawing.count(f'class="area c{place}"') == 1
        assert f">{name[:9]} {data.capacity[name][-1][1]:g}<" in drawing


def test_the_page_tells_whether_learning_is_sound_and_what_was_configured(make_run: Callable[..., Path]) -> None:
    """Loss and its like where they were measured; a key stands in the table when its value is not the default."""
    run = make_run(steps=20)
    config = json.loads((run / "config.json").read_text())
    config["run"] |= {"seed": 77, "sync": False}
    (run / "config.json").write_text(json.dumps(config))
    page = write_report(run).read_text()
    shown = page.split("<h2>Configuration</h2>")[1].split("<details>")[0]
    assert '<td>run.seed</td><td class="text">77</td><td class="text">1</td>' in shown
    assert "run.sync" not in shown
    assert "<figcaption>Loss</figcaption>" in page.split("Is learning healthy?")[1]


def test_the_time_of_a_step_is_told_part_by_part(make_run: Callable[..., Path]) -> None:
    """Every part that the learner measures has its bar; what is left over is the rest of the step."""
    texts = outline(write_report(make_run(steps=20))).texts
    assert [part for part in ("form 0.03 s", "save 0.00 s", "other 0.05 s") if texts.count(part) != 2] == []


def test_the_end_is_labelled_when_it_is_not_the_last_step(make_run: Callable[..., Path]) -> None:
    """The page of an interrupted run says at which step its newest accuracy was measured."""
    run = make_run(steps=80)
    assert "(step" not in write_report(run).read_text()
    config = json.loads((run / "config.json").read_text())
    config["run"]["steps"] = 120
    (run / "config.json").write_text(json.dumps(config))
    text = write_report(run).read_text()
    assert "(step 80)" in text
    assert "held-out accuracy so far" in text


def test_page_is_self_contained(make_run: Callable[..., Path]) -> None:
    """No script, no address, no file beside it; a content security policy forbids what might slip in."""
    path = write_report(make_run(steps=40))
    page = outline(path)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not [value for name, value in page.attributes if name in {"src", "href", "xlink:href", "action"}]
    assert not re.search(r"https?://|url\(|@import", path.read_text(encoding="utf-8"))
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes


@pytest.mark.parametrize("policies", [1, 3, 8])
@pytest.mark.parametrize("steps", [0, 1, 12])
def test_page_stands_for_any_number_of_policies_and_steps(
    make_run: Callable[..., Path], policies: int, steps: int
) -> None:
    """One to eight policies, no step, one step or some: whole markup, every policy named, no NaN in a coordinate."""
    path = write_report(
        make_run(policies=policies, steps=max(steps, 1)) if steps else _bare(make_run(policies=policies))
    )
    page = outline(path)
    coordinates = [value for name, value in page.attributes if name in {"d", "x", "y", "cx", "cy", "width", "x1", "y1"}]
    assert not [value for value in coordinates if "nan" in value or "inf" in value]
    assert {f"policy c{index}" for index in range(policies)} <= {
        value for name, value in page.attributes if name == "class"
    }


def _bare(run: Path) -> Path:
    (run / "metrics.jsonl").unlink()
    for path in run.rglob("*-*.json"):
        path.unlink()
    return run


def test_hostile_text_stays_text(make_run: Callable[..., Path]) -> None:
    """Prompts, answers, names and tasks that hold markup are shown, not obeyed."""
    run = make_run(steps=2)
    hostile = "</script></style></td><script>alert(1)</script>&<!-- \x00 \udc80"
    writer = SampleWriter(RunFolder(run).rollouts)
    for kind in ("rollout", "rescue"):
        writer.write(
            SampleRecord(
                policy="qwen",
                step=1,
                kind=kind,
                task="<task>",
                prompt=hostile,
                completion=hostile,
                reward=1,
                source="<peer>",
            )
        )
    config = json.loads((run / "config.json").read_text())
    config["run"]["name"] = "<name>&"
    config["sharing"]["regime"] = "<regime>"
    (run / "config.json").write_text(json.dumps(config))
    metrics = MetricsWriter(RunFolder(run).metrics_jsonl)
    values = {"reward/mean": 0.1, "eval/accuracy/<b>": 0.5, "exchange/flow_records/<i>/qwen": 1.0}
    metrics.write(MetricsRecord(role="learner/x", policy="<u>", step=1, time_unix_s=1.0, values=values))
    metrics.write(MetricsRecord(role="exchange", policy="", step=1, time_unix_s=1.0, values=values))
    metrics.close()
    path = write_report(run)
    page = outline(path)
    assert not {"script", "task", "peer", "name", "regime", "u", "i"} & set(page.tags)
    assert path.read_text(encoding="utf-8").count("</style>") == 1
    assert "&lt;/script&gt;" in path.read_text(encoding="utf-8")
    text = "".join(page.texts)
    assert "<script>alert(1)</script>&<!--" in text
    assert "<name>&" in text


def test_damaged_files_are_named_and_the_rest_is_shown(make_run: Callable[..., Path]) -> None:
    """A broken evaluation and a torn metrics file cost only themselves."""
    run = make_run(steps=40)
    (run / "evaluation" / "qwen-20.json").write_text("{")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"torn')
    data = read_run(run)
    assert data.problems == ["qwen-20.json cannot be read (JSONDecodeError)"]
    assert len(data.steps["qwen"]) == 40
    assert "qwen-20.json cannot be read" in " ".join(outline(write_report(run)).texts)


def test_a_damaged_line_of_metrics_leaves_evaluations(make_run: Callable[..., Path]) -> None:
    """Metrics that cannot be read are named; the summary comes from the evaluations."""
    run = make_run(steps=40)
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    (run / "metrics.jsonl").write_bytes(b"\n".join([*lines[:3], b"damaged", *lines[3:], b""]))
    data = read_run(run)
    assert "metrics.jsonl:4" in data.problems[0]
    assert sorted(data.accuracy["qwen"][""]) == [0, 40]


def test_steps_that_a_resume_voided_are_gone(make_run: Callable[..., Path]) -> None:
    """When the step goes back, the later steps of the first attempt do not appear."""
    run = make_run(policies=1, steps=10)
    writer = MetricsWriter(RunFolder(run).metrics_jsonl)
    writer.write(
        MetricsRecord(role="learner/qwen", policy="qwen", step=6, time_unix_s=1.0, values={"reward/mean": 0.77})
    )
    writer.close()
    assert read_run(run).series("qwen", "reward/mean")[-1] == (6.0, 0.77)


def test_what_days_have_written_is_read_line_by_line(make_run: Callable[..., Path]) -> None:
    """The exchange alone writes a row every two seconds, with numbers of each pair of policies."""
    folder = make_run(policies=1, steps=3)
    file, values = RunFolder(folder).metrics_jsonl, {f"exchange/flow_bytes/a{n}/b": n + 0.5 for n in range(100)}
    row = {"time_unix_s": 1.7e9, "role": "exchange", "policy": "", "step": 3, "values": values}
    with file.open("a") as more:
        more.writelines(json.dumps(row) + "\n" for _ in range(3000))
    tracemalloc.start()
    read_run(folder)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < file.stat().st_size / 5


def test_evaluation_files_hold_over_metrics(make_run: Callable[..., Path]) -> None:
    """The file of a result is the truth about an accuracy."""
    run = make_run(policies=1, steps=40)
    path = run / "evaluation" / "qwen-40.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"accuracy": 0.125}))
    assert read_run(run).accuracies("qwen")[-1] == (40.0, 0.125)


def test_an_evaluation_says_what_other_weights_sampled_and_what_it_lacks(make_run: Callable[..., Path]) -> None:
    """The step that was overtaken most; nothing where all is its own."""
    run = make_run(policies=1, steps=40)
    assert "overtook" not in " ".join(outline(write_report(run)).texts)
    for step, told in ((0, {"own_token_share": 0.371}), (40, {"own_token_share": 0.9, "missing": 3})):
        path = run / "evaluation" / f"qwen-{step}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | told))

    text = " ".join(outline(write_report(run)).texts)

    assert "at step 0, the evaluated version sampled 37% of the tokens" in text
    assert "held-out prompts without an answer: 3 at step 40" in text


def filed(run: Path, policy: str, step: int, rights: list[int], **more: object) -> None:
    """An evaluation that says how many of four answers to each prompt were right."""
    path = run / "evaluation" / f"{policy}-{step}.json"
    prompts = [{"prompt_id": f"p{place}", "answered": 4, "right": right} for place, right in enumerate(rights)]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prompts": prompts} | more))


def test_what_policies_solve_together_is_that_of_their_last_common_evaluation(make_run: Callable[..., Path]) -> None:
    """One answer of each: qwen solves one prompt of two for sure, llama the other one half of the time.

    At the start each solved one prompt, and not the same.
    """
    run = make_run(policies=2, steps=40)
    assert "solve together" not in " ".join(outline(write_report(run)).texts), "these say nothing of single prompts"
    filed(run, "qwen", 0, [4, 0])
    filed(run, "llama", 0, [0, 4])
    filed(run, "qwen", 40, [4, 0])
    filed(run, "llama", 40, [0, 2])

    text = " ".join(" ".join(outline(write_report(run)).texts).split())

    assert "What policies solve together" in text
    assert re.search(r"1 answer of each step 0, 95 % interval step 40, 95 % interval ", text)
    assert re.search(r"solved by any 1\.000 \[1\.000, 1\.000\] 0\.750 ", text)
    assert re.search(r"unsolved by qwen, solved by another 0\.500 \[\S+ \S+\] 0\.250 ", text)
    assert re.search(r"likeness of qwen and llama -1\.000 -0\.500 ", text)
    assert re.search(r"row solves, column does not qwen llama qwen \S+ 0\.500 llama 0\.250 ", text)


def test_several_answers_are_shown_with_their_interval(make_run: Callable[..., Path]) -> None:
    """Of the last evaluation that had some; damaged ones are named."""
    run = make_run(policies=1, steps=40)
    estimate = {"mean": 0.5, "low": 0.25, "high": 0.75, "prompts": 9}
    filed(run, "qwen", 40, [2, 2], estimates={"pass@4": estimate})
    filed(run, "qwen", 0, [2, 2], estimates={"pass@4": {"mean": "half"}})

    text = " ".join(" ".join(outline(write_report(run)).texts).split())

    assert re.search(r"qwen 40 pass@4 0\.500 \[0\.250, 0\.750\] 9", text)
    assert "qwen-0.json cannot be read (ValidationError)" in text


def test_missing_values_are_nan_in_a_series_and_a_missing_metric_is_empty(make_run: Callable[..., Path]) -> None:
    """A series keeps its steps; a metric that no step has makes no series."""
    data = read_run(make_run(policies=1, steps=60))
    rewards = data.series("qwen", "reward/mean")
    assert [step for step, value in rewards if math.isnan(value)] == [40.0]
    assert data.series("qwen", "optim/lr") == []


def test_an_answer_that_was_filed_twice_is_shown_once(make_run: Callable[..., Path]) -> None:
    """Evaluated answers come with the evaluation, and as samples; each stands in the report once."""
    run = make_run(policies=1, steps=40)
    answer = {"task": "reverse", "prompt": "p-1", "completion": "c-1", "reward": 1.0}
    path = run / "evaluation" / "qwen-40.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"answers": [answer, answer | {"completion": "c-2"}]}))
    SampleWriter(RunFolder(run).rollouts).write(SampleRecord(policy="qwen", step=40, kind="evaluation", **answer))  # type: ignore[arg-type]
    found = [sample["completion"] for sample in read_run(run).samples if sample["kind"] == "evaluation"]
    assert sorted(found) == ["c-1", "c-2"]
    assert "Held-out answers" in " ".join(outline(write_report(run)).texts)


def test_writing_again_replaces_the_page_and_leaves_nothing_else(make_run: Callable[..., Path]) -> None:
    """The page is exchanged in one step."""
    run = make_run(steps=3)
    before = set(run.iterdir())
    first = write_report(run)
    assert write_report(run) == first == run / "report.html"
    assert set(run.iterdir()) == before | {first}


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    """Without a config.json nothing is written."""
    with pytest.raises(RunFolderError, match=r"config\.json"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_answers_kept_from_peers_are_told(make_run: Callable[..., Path]) -> None:
    """The sum over all steps, with what would share them; a run that kept none says nothing of it."""
    folder = make_run(steps=40)
    assert "finished_only)" not in write_report(folder).read_text()
    writer = MetricsWriter(RunFolder(folder).metrics_jsonl)
    for step in (41, 42):
        values = {"reward/mean": 1.0, "sharing/withheld_answers": 6.0}
        writer.write(MetricsRecord(role="learner/qwen", policy="qwen", step=step, time_unix_s=9e9, values=values))
    writer.close()
    assert "qwen withheld 12 correct answers from its peers" in write_report(folder).read_text()


def test_policies_that_do_not_meet_are_told(make_run: Callable[..., Path]) -> None:
    """Once for each time that a pair lost sight of each other; a run in which all meet says nothing of it."""
    folder = make_run(steps=40)
    assert " met " not in write_report(folder).read_text()
    writer = MetricsWriter(RunFolder(folder).metrics_jsonl)
    for step in range(41, 61):
        values = {"reward/mean": 1.0, "sharing/asked_prompts": 8.0, "sharing/hit_prompts_from/llama": 0.0}
        writer.write(MetricsRecord(role="learner/qwen", policy="qwen", step=step, time_unix_s=9e9, values=values))
    writer.close()
    page = write_report(folder).read_text()
    assert page.count("qwen found records of llama on only 0 of 40 prompts by step 45") == 1
    assert "peer_hold_versions" in page
