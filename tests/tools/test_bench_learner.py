"""The training benchmark: lengths, the policy made of them, what is counted, and what is required."""

import json
import subprocess
import sys
from subprocess import PIPE

import bench_learner
import numpy as np
import pytest
import torch
from bench_training import environment
from bench_training.answers import CLOSING_TOKENS, fixed_stops, long_tailed_stops, mean_tokens
from bench_training.gate import Gap, step_gap
from bench_training.load import LOADS
from bench_training.policy import Follower, fit, make_policy, make_tokenizer
from bench_training.spent import Clock, Spent, between_s, clocks, total_s
from bench_training.trl_run import listen
from bench_training.verdict import is_right
from transformers import AutoModelForCausalLM

from mrl.tasks.extract import tagged_answer

ONE_TRL = Spent(samples=100, tokens=7_100, cpu_s=20.0, train_cpu_s=10.0, rollout_cpu_s=10.0, startup_cpu_s=9.0)


def drawn_lengths(stops, limit, num_answers):
    """Lengths by rolling a die behind every token: the slow twin of `mean_tokens`."""
    rng = np.random.default_rng(1)
    lengths = []
    for _ in range(num_answers):
        place = next((place for place, stop in enumerate(stops) if rng.random() < stop), len(stops))
        lengths.append(min(place + 1 + CLOSING_TOKENS, limit))
    return lengths


def test_a_long_tail_has_the_mean_that_is_asked_for_and_is_long():
    """71 tokens on average, half of the answers shorter than 56, one in eight at least twice the mean."""
    lengths = drawn_lengths(long_tailed_stops(192), 192, 4000)

    assert mean_tokens(long_tailed_stops(192), 192) == pytest.approx(71, abs=0.2)
    assert np.mean(lengths) == pytest.approx(71, abs=3)
    assert np.median(lengths) == pytest.approx(56, abs=3)
    assert np.mean(np.array(lengths) >= 142) == pytest.approx(0.125, abs=0.03)


def test_answers_of_a_fixed_length_have_it():
    """All of them, by their own end and not by the limit."""
    assert set(drawn_lengths(fixed_stops(64), 192, 20)) == {64}
    assert mean_tokens(fixed_stops(64), 192) == 64


def test_a_fitted_head_gives_the_chances_of_what_follows():
    """Each state its own, up to the little that is left for everything else."""
    torch.manual_seed(0)
    followers = [Follower([3], [1.0]), Follower([4, 5], [0.25, 0.75]), Follower([0, 6], [0.0, 1.0])]
    embedding_VD, head_VD = fit([[0], [1, 2], [3]], followers, vocab_size=8, hidden=4)

    found = (embedding_VD @ head_VD.T).softmax(-1)

    assert found[0, 3] == pytest.approx(1.0, abs=1e-5)
    assert found[1].tolist() == pytest.approx(found[2].tolist(), abs=1e-6)
    assert found[1, 4:6].tolist() == pytest.approx([0.25, 0.75], abs=1e-5)
    assert found[3, 6] == pytest.approx(1.0, abs=1e-5)
    assert embedding_VD.square().mean(-1).tolist() == pytest.approx([1.0] * 8, abs=1e-5)


@pytest.mark.thorough
def test_a_made_policy_stops_by_its_chances(tmp_path):
    """Sampled answers of the whole model, blocks included, have the lengths that its chances give."""
    stops = np.array([0.5, 0.0, 1.0])
    prompts = ["How many?", "How often?"]
    tokenizer = make_tokenizer(prompts)
    make_policy(tmp_path, tokenizer, stops, seed=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.tensor([tokenizer(prompts[0] + "\n")["input_ids"]])
    torch.manual_seed(1)
    answers = model.generate(ids.repeat(100, 1), max_new_tokens=8, do_sample=True, top_k=0)[:, ids.shape[1] :]
    lengths = (answers == tokenizer.eos_token_id).int().argmax(-1) + 1

    texts = [tokenizer.decode(row[: length - 1]) for row, length in zip(answers, lengths.tolist(), strict=True)]
    assert {1 + CLOSING_TOKENS, 3 + CLOSING_TOKENS} == set(lengths.tolist())
    assert (lengths == 1 + CLOSING_TOKENS).float().mean() == pytest.approx(0.5, abs=0.15)
    assert {tagged_answer(text) for text in texts} == {"1", "2"}


@pytest.mark.parametrize(
    "completion",
    ["<answer>1</answer>", "x<answer>2</answer> <answer> 1 </answer>", "1", "<answer>1", "1</answer>",
     "<answer>2</answer> 1", "<answer><answer>1</answer>", "</answer><answer>1"],
)  # fmt: skip
def test_trls_reward_function_judges_as_mrl_reads(completion):
    """The same answer is read from a completion by both sides."""
    assert is_right([completion], [tagged_answer(completion)]) == [1.0]
    assert is_right([completion], ["3"]) == [0.0]


def test_processes_that_end_or_begin_between_two_looks_are_counted():
    """What has ended counts with who waited for it, and once; what is new counts from its birth."""
    before = {1: Clock("mrl train", 5.0), 2: Clock("mrl::learner/a", 10.0), 3: Clock("mrl::worker/a/0", 4.0)}
    after = {1: Clock("mrl train", 5.5, 5.0), 2: Clock("mrl::learner/a", 13.0, 0.5), 4: Clock("mrl::worker/a/0", 2.0)}

    assert total_s(after) - total_s(before) == pytest.approx(7.0)
    assert between_s(before, after, "mrl::learner") == pytest.approx(3.0)
    assert between_s(before, after, "mrl::worker", "mrl::learner") == pytest.approx(5.0)


def test_a_tree_is_read_with_all_that_it_has_spent():
    """A child that lives, and a grandchild that has been waited for."""
    burn = "import time\nwhile time.process_time() < 0.2: pass\n"
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=PIPE, stdout=PIPE, text=True) as process:
        process.stdout.readline()
        found = clocks(process.pid)
        process.communicate("\n")

    assert [*found] == [process.pid]
    assert found[process.pid].waited_for_s >= 0.15  # the kernel counts in ticks
    assert total_s(found) == pytest.approx(found[process.pid].cpu_s + found[process.pid].waited_for_s)


def test_a_process_that_nobody_has_waited_for_counts():
    """What it has spent stands with no one else yet."""
    burn = "import time\nwhile time.process_time() < 0.2: pass\n"
    parent = f"import os, subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {burn!r}])\n"
    parent += "os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=PIPE, stdout=PIPE, text=True) as process:
        process.stdout.readline()
        found = clocks(process.pid)
        process.communicate("\n")

    assert len(found) == 2
    assert max(clock.cpu_s for clock in found.values() if not clock.title) >= 0.15


def test_two_runs_side_by_side_add_up():
    """Rates of the sum are those of all samples over all CPU seconds."""
    both = ONE_TRL + Spent(50, 1_000, 5.0, 4.0, 1.0, 3.0)

    assert (both.samples, both.cpu_s, both.startup_cpu_s) == (150, 25.0, 12.0)
    assert both.samples_per_cpu_s == pytest.approx(6.0)
    assert both.trained_tokens_per_cpu_s == pytest.approx(8_100 / 14.0)
    assert both.mean_tokens == pytest.approx(54.0)


@pytest.mark.parametrize(("cpu_s", "is_ok"), [(8.0, True), (8.1, False)])
def test_a_ratio_below_its_bound_is_missed(cpu_s, is_ok):
    """The long tail has to be 2.5 times as fast; the training alone is told and not bounded there."""
    long_tail = next(load for load in LOADS if load.name == "long-tail")
    ours = Spent(100, 7_100, cpu_s, 4.0, 3.0, 30.0)

    end_to_end, training = bench_learner.rows_of(long_tail, {"mrl": [ours], bench_learner.TRL: [ONE_TRL]})

    assert end_to_end.ratio == pytest.approx(20.0 / cpu_s)
    assert (end_to_end.required, end_to_end.ok) == (">=2.5", is_ok)
    assert (training.required, training.ratio) == (None, pytest.approx(2.5))


def test_updates_are_compared_by_their_length():
    """One of the length 5, the other off by 0.5."""
    initial = {"a": torch.zeros(2), "b": torch.ones(1)}
    theirs = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([5.0])}
    ours = {"a": torch.tensor([3.0, 0.3]), "b": torch.tensor([5.4])}

    assert step_gap(initial, ours, theirs) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("gap", "is_open"),
    [
        (Gap(1e-4, 0.0, 1e-3), True),
        (Gap(2e-4, 0.0, 0.0), False),
        (Gap(0.0, 1e-5, 0.0), False),
        (Gap(0, 0, 0.02), False),
    ],
)
def test_one_difference_closes_the_gate(gap, is_open):
    """Log-probabilities, advantages, parameters."""
    assert gap.is_open == is_open


def test_an_environment_is_named_by_all_its_versions(monkeypatch, tmp_path):
    """Another version has another place, so that none is ever updated in place."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted = environment.requirements()

    assert f"torch=={torch.__version__.partition('+')[0]}" in wanted
    assert environment.environment_folder(wanted).parent == tmp_path / "mrl" / "bench"
    assert environment.environment_folder(wanted) == environment.environment_folder(wanted[::-1])
    assert environment.environment_folder(wanted) != environment.environment_folder([*wanted, "x==1"])


@pytest.mark.thorough
def test_an_environment_that_cannot_be_made_is_not_there(monkeypatch, tmp_path):
    """A package that nobody has: an error with pip's words, and nothing half-made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(environment, "TORCH_INDEX", "/dev/null")

    with pytest.raises(RuntimeError, match="mrl-no-such-package"):
        environment.trl_python(["mrl-no-such-package==1"])
    assert [*(tmp_path / "mrl" / "bench").iterdir()] == []


def test_a_trl_process_that_fails_is_an_error_with_its_words(tmp_path):
    """Whatever it said before."""
    job = tmp_path / "job.json"
    job.with_suffix(".log").write_text("out of luck")
    script = f"print({json.dumps(json.dumps({'step': 0}))!s}); raise SystemExit(1)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=PIPE, text=True)

    with pytest.raises(RuntimeError, match="out of luck"):
        listen(process, job)
