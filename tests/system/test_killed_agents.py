"""A whole run of which an agent, the process that plays agents, and a worker are killed in mid-episode."""

import os
import signal
import sys

import pytest

from tests.system.test_episodes import answers_of

pytestmark = pytest.mark.system

HELD = """
import os

def is_held(kind, policy, choice):
    # Whether this episode is the one that stays where it is: the file can be renamed once. Behind a turn that was cut
    # there are no others, and its end would be the policy's.
    if choice["finish_reason"] != "stop":
        return False
    try:
        os.rename(f"{folder}/hold-{kind}", f"{folder}/held-{kind}-{policy}-{os.getpid()}")
    except FileNotFoundError:
        return False
    return True
"""
FUNCTION = """
import asyncio
from held import is_held

async def spell(client, row):
    talk = [{"role": "user", "content": f"Say a letter: {'abcdefgh'[row['seed'] % 8]}"}]
    answer = await client.chat.completions.create(model="policy", messages=talk)
    if is_held("function", answer.model, answer.choices[0].model_dump()):
        await asyncio.Event().wait()
    return float(len(answer.choices[0].message.content) % 2 == 0)
"""
PROGRAM = """
import json, os, signal, sys, urllib.request
sys.path.insert(0, os.path.dirname(__file__))
from held import is_held

def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.loads(urllib.request.urlopen(request).read())

talk = [{"role": "user", "content": f"Say a word: {'abcdefgh'[json.loads(os.environ['MRL_ROW'])['seed'] % 8]}"}]
choice = post("/chat/completions", {"model": "policy", "messages": talk})["choices"][0]
while is_held("program", os.environ["MRL_MODEL"], choice):
    signal.pause()
reward = float(len(choice["message"]["content"]) % 3 == 0)
post(f"/sessions/{os.environ['MRL_SESSION']}/reward", {"reward": reward})
"""
TASKS = """
[sharing]
regime = "xgrpo"
[gateway]
idle_s = 15
[tasks.spell]
source = "agent"
dataset = "my_agents:spell"
options = {{ size = 400 }}
max_turns = 3
[tasks.word]
source = "agent"
command = ["{python}", "{folder}/my_agent.py"]
agent_processes = 4
options = {{ size = 400 }}
max_turns = 3
"""
STEPS = 20
ARGUMENTS = ["--pool.held_out_prompts=8", "--tasks.trim.weight=0", "--tasks.letter_counting.weight=0"]
ARGUMENTS += [
    f"--policies.{policy}.{key}"
    for policy in ("qwen", "llama")
    for key in ("rollout.group_size=4", "learner.prompts_per_step=4", "make.warm_start_steps=60")
]


def held_episode(run, folder, kind):
    """Policy and process of an episode that has had its turn, and goes on no more."""
    (folder / f"hold-{kind}").touch()
    (found,) = run.until(lambda: list(folder.glob(f"held-{kind}-*")), f"an episode of a {kind} is held")
    found.unlink()
    _, _, policy, pid = found.name.split("-")
    return policy, int(pid)


def gateway_counts(run):
    """Its newest totals."""
    records = run.metrics("gateway")
    return records[-1]["values"] if records else {}


def given_up_by_seats(run):
    """Episodes whose engine was lost, without those whose agents fell silent."""
    counts = gateway_counts(run)
    return counts.get("gateway/ends/given_up", 0.0) - counts["gateway/expired"]


def both_train(run):
    """Until each has done another step than it has now."""
    before = {policy: run.step(policy) for policy in ("qwen", "llama")}
    run.until(lambda: all(run.step(policy) > step for policy, step in before.items()), "both train on")


def test_killed_agents_and_what_hosts_them_cost_their_episodes_alone(make_run, tmp_path):
    """A program, the process that plays functions, and a worker: each loss is counted, and both policies train on."""
    for name, text in {"held": HELD, "my_agents": FUNCTION, "my_agent": PROGRAM}.items():
        (tmp_path / f"{name}.py").write_text(text.replace("{folder}", str(tmp_path)))
    run = make_run(steps=STEPS, more=TASKS.format(python=sys.executable, folder=tmp_path))
    run.start(*ARGUMENTS)
    run.until(lambda: min(run.step("qwen"), run.step("llama")) >= 1, "both train")

    _, program = held_episode(run, tmp_path, "program")
    os.kill(program, signal.SIGKILL)
    run.until(lambda: gateway_counts(run).get("gateway/ends/exited"), "the program's loss is counted")
    both_train(run)

    assert not gateway_counts(run)["gateway/expired"]
    _, host = held_episode(run, tmp_path, "function")
    os.kill(host, signal.SIGKILL)
    run.until(lambda: gateway_counts(run)["gateway/expired"], "the losses of the process are counted")
    both_train(run)

    policy, other_host = held_episode(run, tmp_path, "function")
    assert other_host != host
    given_up = given_up_by_seats(run)
    os.kill(run.titles()[f"worker/{policy}/0"], signal.SIGKILL)
    run.until(lambda: given_up_by_seats(run) > given_up, "the worker's losses are counted")
    assert run.finish(600) == 0, run.tail()

    log = (run.folder / "logs" / "latest" / "gateway.log").read_text()
    assert "was killed by signal 9 and gave no reward" in log
    assert log.count("agent process exited; restarting it") == 1
    assert run.metrics("supervisor")[-1]["values"]["process/restarts"] == 1, "the worker alone"
    assert {one["task"] for one in answers_of(run.folder)} == {"spell", "word"}
    for policy in ("qwen", "llama"):
        assert run.step(policy) == STEPS
        assert run.result(policy, STEPS)["missing"] == 0
    assert not run.left_over()
