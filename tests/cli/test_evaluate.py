"""`mrl eval` from the command to its file: runs at their checkpoints, model folders, several at once."""

import json
import math
from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.config.load import validate
from mrl.config.policy_tables import PromptTable
from mrl.config.run_folder import create_run_folder, read_run_config
from mrl.metrics.pass_at_k import fail_at_k
from mrl.models.probe import save_probe
from mrl.processes.evaluation.subjects import find_subjects
from tests.support.evaluated_run import checkpoint
from tests.support.pages import ROOT, blocks

JUDGE = "def judge(reference, answer):\n    return float(sum(answer.encode()) % 3 == 0)\n"
"""Right about one answer in three, whatever a policy without skill writes."""
SAMPLES = 4
PAGE = ROOT / "docs" / "evaluation.md"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a verifier, a model, and a run of two policies with checkpoints at steps 4 and 8."""
    place = tmp_path_factory.mktemp("place")
    (place / "own_judge.py").write_text(JUDGE)
    tables = {
        "run": {"name": "r", "steps": 9, "folder": str(place / "runs")},
        "tasks": {
            name: {"source": "words", "dataset": name, "verifier": "own_judge:judge", "verifier_processes": 1}
            for name in ("trim", "swap")
        },
        "pool": {"train_prompts": 4, "held_out_prompts": 12},
        "policies": {},
    }
    for seed, name in enumerate(("qwen", "llama")):
        save_probe(place / name, seed=seed)
        tables["policies"][name] = {"model": str(place / name), "rollout": {"max_new_tokens": 6}}
    folder = create_run_folder(validate(tables, where="test"))
    for name in ("qwen", "llama"):
        for step in (4, 8):
            checkpoint(folder, name, place / name, step)
    return place


@pytest.fixture
def evaluate(place, monkeypatch, capsys):
    """Run `mrl eval` there; returns the file that it says it wrote, and its words."""
    monkeypatch.chdir(place)

    def run(*words: str) -> tuple[dict, str]:
        assert main(["eval", *words]) == 0
        said = capsys.readouterr()
        (line,) = [line for line in said.out.splitlines() if line.startswith("wrote ")]
        return json.loads(Path(line.removeprefix("wrote ")).read_text()), said.out + said.err

    return run


def rights(file: dict, policy: str) -> dict[str, int]:
    return {one["prompt_id"]: one["right"] for one in file["policies"][policy]["result"]["prompts"]}


def test_a_run_is_evaluated_at_its_newest_checkpoints_and_the_result_lies_in_it(evaluate, place):
    """Both policies, every prompt four times; what is told is what the counts say."""
    file, said = evaluate("runs/r", "--samples", str(SAMPLES), "--k", "1,2")

    assert list(file["policies"]) == ["qwen@8", "llama@8"]
    assert len(file["prompt_ids"]) == 12
    assert [one.parent for one in (place / "runs/r/evals").iterdir()] == [place / "runs/r/evals"]
    for policy in file["policies"]:
        counts = list(rights(file, policy).values())
        assert 0 < sum(counts) < 12 * SAMPLES, "some answers are right"
        told = file["policies"][policy]["result"]["estimates"]
        assert told["avg@4"]["mean"] == pytest.approx(sum(counts) / 12 / SAMPLES)
        assert told["pass@2"]["mean"] == pytest.approx(float((1 - fail_at_k([SAMPLES] * 12, counts, 2)).mean()))
        assert f"{told['pass@2']['mean']:.3f} [" in said
    pairs = zip(rights(file, "qwen@8").values(), rights(file, "llama@8").values(), strict=True)
    union = 1 - sum(math.prod(1 - right / SAMPLES for right in pair) for pair in pairs) / 12
    assert file["together"]["1"]["union"]["mean"] == pytest.approx(union)
    assert "row solves with 2, column does not" in " ".join(said.split())


def test_the_same_evaluation_gives_the_same_counts(evaluate):
    words = ("runs/r@4", "--policy", "qwen", "--samples", "3", "--prompts", "5", "--out", "again")
    first, second = evaluate(*words)[0], evaluate(*words)[0]
    assert rights(first, "qwen@4") == rights(second, "qwen@4")
    assert first["prompt_ids"] == second["prompt_ids"]
    assert len(first["prompt_ids"]) == 5
    assert evaluate(*words, "--seed", "9")[0]["policies"]["qwen@4"]["result"] != first["policies"]["qwen@4"]["result"]


def test_greedy_answers_to_a_prompt_are_all_the_same_and_that_is_said(evaluate):
    file, said = evaluate("llama", "--config", "runs/r", "--samples", "3", "--temperature", "0", "--out", "g.json")
    assert set(rights(file, "llama").values()) <= {0, 3}
    assert file["policies"]["llama"]["temperature"] == 0.0
    assert "note: temperature 0 gives the same answer 3 times" in said


def test_the_step_is_that_of_the_weights(evaluate):
    """Step 0 is the model that the run began with: greedily the same answers as those of its folder."""
    greedy = ("--temperature", "0", "--tasks", "swap", "--out", "s.json")
    began, _ = evaluate("runs/r@0", "--policy", "qwen", *greedy)
    folder, _ = evaluate("qwen", "--config", "runs/r", *greedy)
    later, _ = evaluate("runs/r@8", "--policy", "qwen", *greedy)

    def answers(file: dict) -> list:
        ((_, policy),) = file["policies"].items()
        assert list(policy["result"]["per_task"]) == ["swap"]
        return policy["result"]["answers"]

    assert answers(began) == answers(folder) != answers(later)


def test_a_model_without_a_run_is_asked_as_the_policies_of_the_configuration(place):
    """Else a model beside its run would be a comparison of prompts. A chat template is that of its model alone."""
    config, model = read_run_config(place / "runs/r"), str(place / "llama")
    prompt = PromptTable(assistant_prefill="<", stop=["zz"], chat_template="{{ messages[0].content }}")

    def asked(trained_from: str) -> PromptTable:
        changes = {"prompt": prompt, "model": trained_from}
        policies = {name: policy.model_copy(update=changes) for name, policy in config.policies.items()}
        base = config.model_copy(update={"policies": policies})
        return find_subjects([model], base, policy="", tell=print)[0].table.prompt

    assert asked(model) == prompt
    assert asked("another") == prompt.model_copy(update={"chat_template": ""})


def test_a_model_folder_is_asked_on_one_day(place, tmp_path):
    """The file of the evaluation says which, as of models of the hub."""
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}")
    for file in (place / "llama").iterdir():
        (tmp_path / file.name).symlink_to(file)
    base = read_run_config(place / "runs/r")
    assert find_subjects([str(tmp_path)], base, policy="", tell=print)[0].table.prompt.today is not None
    assert find_subjects([str(place / "llama")], base, policy="", tell=print)[0].table.prompt.today is None


def test_two_evaluations_are_compared(evaluate, capsys):
    common = ("--policy", "qwen", "--samples", "2")
    evaluate("runs/r@4", *common, "--out", "a.json")
    evaluate("runs/r@8", *common, "--out", "b.json")

    assert main(["eval", "--compare", "a.json", "b.json"]) == 0

    assert "qwen@4 -> qwen@8" in capsys.readouterr().out


def test_a_step_without_a_checkpoint_is_refused_with_those_that_there_are(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    assert main(["eval", "runs/r@7"]) == 2
    assert "no checkpoint for this step; got 7; wanted one of [4, 8]" in capsys.readouterr().err


def test_the_page_s_program_finds_the_same_pass_at_k(evaluate, capsys):
    """That of docs/evaluation.md, on a file as the page says it was made."""
    evaluate("runs/r", "--samples", "4", "--k", "1,2", "--out", "result.json")
    [program] = blocks(PAGE.read_text(encoding="utf-8"), "python")

    exec(compile(program, str(PAGE), "exec"), {})

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["qwen@8", "llama@8"]
    assert all(float(by_hand) == pytest.approx(float(told)) for _, by_hand, told in lines)


def test_what_is_broken_off_leaves_nothing(place, monkeypatch, capsys):
    """The engine of the second policy cannot be had: no file, and no folder of a checkpoint."""
    monkeypatch.chdir(place)
    scratch = place / "scratch"
    scratch.mkdir(exist_ok=True)
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    words = ["eval", "runs/r", "--max-new-tokens", "100000", "--out", "never.json"]

    assert main(words) == 2

    assert "a prompt and its answer do not fit" in capsys.readouterr().err
    assert not (place / "never.json").exists()
    assert [one.name for one in scratch.iterdir()] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--out", "none/x.json"), "--out: no such folder; got 'none'"),
     (("--out", "taken.json"), "--out: a folder stands where the file would be; got 'taken.json'"),
     (("--out", "notes"), "--out: a file, not a folder; got 'notes'; wanted a file NAME.json, or a folder"),
     (("--max-new-tokens", "0"), "--max-new-tokens: invalid value; got 0; wanted >= 1")],
)  # fmt: skip
def test_a_result_that_could_not_be_written_is_refused_before_it_is_measured(words, said, place, monkeypatch, capsys):
    """And no limit of tokens is not the policy's own limit."""
    monkeypatch.chdir(place)
    Path("taken.json").mkdir(exist_ok=True)
    Path("notes").write_text("kept")
    monkeypatch.setattr("mrl.processes.evaluation.measuring.evaluate", lambda *_: pytest.fail("it was measured"))
    assert main(["eval", "runs/r", *words]) == 2
    assert f"mrl: error: mrl eval: {said}" in capsys.readouterr().err
