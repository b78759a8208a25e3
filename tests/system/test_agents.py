"""A whole run whose policies are trained by agents: one that the run starts, and one from outside."""

import gzip
import http.client
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict

import pytest

from mrl.metrics.jsonl import each_metrics
from tests.support.talking_policy import talking_policy
from tests.system.test_episodes import OF_TWO_KINDS, answers_of, mrl

pytestmark = pytest.mark.system

AGENT = '''
async def spell(client, row):
    """Whoever says something of even length, and then of odd, wins."""
    talk = [{"role": "user", "content": f"Say a letter: {'abcdefgh'[row['seed'] % 8]}"}]
    lengths = []
    for _ in range(2):
        how = {"model": "policy", "messages": talk, "temperature": 0.1, "logprobs": True}
        choice = (await client.chat.completions.create(**how)).choices[0]
        said = choice.message
        tokens = choice.logprobs.content
        spelled = b"".join(bytes(token.bytes) for token in tokens).decode(errors="ignore")
        assert all(token.logprob <= 0 for token in tokens)
        assert said.content in spelled or chr(0xFFFD) in said.content, (said.content, spelled)
        lengths.append(len(said.content))
        talk += [said.model_dump(exclude_none=True), {"role": "user", "content": "Another"}]
    return float(lengths[0] % 2 == 0) / 2 + float(lengths[1] % 2) / 2
'''
TASKS = """
[sharing]
regime = "sgt"
[gateway]
idle_s = 30
[tasks.spell]
source = "agent"
dataset = "my_agents:spell"
options = { size = 400 }
max_turns = 3
[tasks.quiz]
source = "agent"
dataset = "outside"
options = { size = 400 }
"""


class Outsider(threading.Thread):
    """An agent that nobody started: it asks for an episode, asks the policy once, and gives the reward.

    One with a name calls its sessions by it, and has no other key than the run's.
    """

    def __init__(self, folder, name=""):
        super().__init__(daemon=True)
        self.folder, self.is_over, self.policies, self.codes = folder, threading.Event(), set(), set()
        self.num_pieces, self.called, self.played = set(), name, []
        """`played`: of each session its name, policy and start state, and what the policy said."""

    def run(self):
        """Until it is over; a gateway that is away is asked again."""
        while not self.is_over.wait(0.01):
            try:
                self.play()
            except (OSError, ValueError, KeyError, http.client.HTTPException):
                continue

    def play(self):
        """One episode."""
        address = json.loads((self.folder / "endpoints" / "gateway.json").read_text())["address"]
        url = address.replace("tcp://", "http://") + "/v1"
        key = (self.folder / "keys" / "gateway.key").read_text().strip()
        self.session = f"{self.called}-{time.monotonic_ns()}" if self.called else ""
        session = json.loads(self.post(f"{url}/sessions", key, {"task": "quiz", "wait_s": 2}))
        assert self.session in ("", session["id"])
        body = {"model": "policy", "messages": [{"role": "user", "content": "Say a letter: q"}], "stream": True}
        try:
            of_session = key if self.called else session["api_key"]
            events = self.post(f"{url}/chat/completions", of_session, body).split(b"\n\n")
        except urllib.error.HTTPError:
            return
        chunks = [json.loads(one.removeprefix(b"data: ")) for one in events if one.startswith(b"data: {")]
        pieces = [one["choices"][0]["delta"].get("content") or "" for one in chunks]  # KeyError for a gateway that died
        self.num_pieces.add(len(pieces))
        words = "".join(pieces)
        self.played.append((session["id"], session["model"], session["row"]["seed"], words))
        self.post(f"{url}/sessions/{session['id']}/reward", key, {"reward": float(len(words) % 3 == 0)})
        self.policies.add(session["model"])

    def post(self, url, key, body):
        """The answer."""
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        headers |= {"MRL-Session": self.session} if self.session else {}
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60
        ) as found:
            self.codes.add(found.status)
            return found.read()


def test_agents_train_both_policies_and_a_gateway_that_dies_ends_no_run(make_run):
    """Both agents train both policies; after the death of the gateway they go on, and so do their keys."""
    run = make_run(steps=4, more=TASKS)
    (run.config.parent / "my_agents.py").write_text(AGENT)
    run.start("--pool.held_out_prompts=16", "--tasks.trim.weight=0", "--tasks.letter_counting.weight=0")
    outsiders = [Outsider(run.folder, name) for name in ("", "", "me", "you")]
    for outsider in outsiders:
        outsider.start()
    try:
        run.until(lambda: min(run.step("qwen"), run.step("llama")) >= 1, "both train")
        key = run.folder / "keys" / "gateway.key"
        before, mode = key.read_text(), key.stat().st_mode & 0o777
        os.kill(run.pid("gateway"), signal.SIGKILL)
        assert run.finish(600) == 0, run.tail()
    finally:
        for outsider in outsiders:
            outsider.is_over.set()
            outsider.join()

    assert (key.read_text(), mode) == (before, 0o600)
    assert max(set().union(*(outsider.num_pieces for outsider in outsiders))) > 3, "turns are streamed as they grow"
    assert set().union(*(outsider.policies for outsider in outsiders)) == {"qwen", "llama"}
    log = (run.folder / "logs" / "latest" / "gateway.log").read_text()
    assert log.count("gateway listening") == 2
    assert log.count("temperature = 0.1") == 2  # once in each life
    assert run.metrics("supervisor")[-1]["values"]["process/restarts"] == 1, "the gateway alone"
    counted = run.metrics("gateway")[-1]["values"]
    assert counted["gateway/turns"] > 0
    assert counted["gateway/ends/done"] > 0
    assert "gateway/ends/raised" not in counted, "every turn came with its log-probabilities"
    trained, groups = set(), set()
    for policy in ("qwen", "llama"):
        files = sorted(run.folder.glob(f"rollouts/step_*/{policy}.jsonl.gz"))
        answers = [json.loads(line) for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]
        trained |= {one["task"] for one in answers if one["kind"] == "rollout"}
        assert any("user: Another" in one["completion"] for one in answers if one["task"] == "spell")
        assert run.result(policy, 4)["missing"] == 0
        found = [one for one in answers if one["task"] == "quiz" and one["kind"] == "rollout"]
        groups |= set(started_alike(found, policy, [one for outsider in outsiders for one in outsider.played]))
    assert trained == {"spell", "quiz"}
    assert {name.partition("-")[0] for name in groups} >= {"me", "you"}, (
        "sessions with names of their own were trained on"
    )
    assert not run.left_over()


def readable(words):
    """A text that both sides read alike: what is no character may be another one while a turn grows."""
    return words if words.isascii() else "?"


def started_alike(answers, policy, played):
    """Names of the sessions whose start states made the groups that were trained on; each group is of one of them."""
    groups, said, names = defaultdict(Counter), defaultdict(Counter), defaultdict(set)
    for one in answers:
        words = next(turn["messages"][0]["content"] for turn in one["turns"] if turn["is_sampled"])
        groups[one["step"], one["prompt_id"]][readable(words)] += 1
    for name, player, seed, words in played:
        if player == policy:
            said[seed][readable(words)] += 1
            names[seed].add(name)
    for group in groups.values():
        seeds = [seed for seed, of_seed in said.items() if group <= of_seed]
        assert seeds, f"no sessions of one start state said {group}"
        yield from names[seeds[0]] if len(seeds) == 1 else ()


COMPACTING = '''
import hashlib

LOOKUP = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}


async def compacts(client, row):
    """Asks, has an expert with a tool asked what came of it, and goes back to its first conversation."""
    question = {"role": "user", "content": f"Look up this word: {'abcdefgh'[row['seed'] % 8]}"}

    async def ask(talk, **how):
        answer = await client.chat.completions.create(model="policy", messages=talk, **how)
        return answer.choices[0].message.model_dump(exclude_none=True)

    said = await ask([question])
    expert = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": f"So far: {str(said)[:40]}"}]
    expert += [await ask(expert, tools=[LOOKUP]), {"role": "user", "content": "And?"}]
    found = await ask(expert, tools=[LOOKUP])
    last = await ask([question, said, {"role": "user", "content": f"It is {str(found.get('content'))[:20]}"}])
    return float(hashlib.blake2b(str((said, found, last)).encode()).digest()[0] % 3 == 0)
'''
COMPACTS = '[tasks.compacts]\nsource = "agent"\ndataset = "my_agents:compacts"\noptions = { size = 400 }'


def test_an_agent_that_rewrites_its_conversation_trains_both_policies(tmp_path):
    """Each turn in the row in which it was sampled; peers get the episodes of one row alone, and the count says so."""
    talking_policy(tmp_path / "talking", steps=120, reasons=True)
    (tmp_path / "my_agents.py").write_text(COMPACTING)
    (tmp_path / "r.toml").write_text(OF_TWO_KINDS.format(task=COMPACTS))
    mrl(tmp_path, "train", "r.toml", "--policies.qwen.prompt.history", "sampled")
    folder = tmp_path / "runs" / "r"

    records = list(each_metrics(folder / "metrics.jsonl"))
    steps = [one["values"] for one in records if "loss/total" in one.get("values", {})]
    assert len(steps) == 4
    for values in steps:
        assert values["episodes/rows_mean"] > 1.2
        assert values["mismatch/k3_nats"] < 1e-6
        assert 0 < values["episodes/rewritten_share"] < 1
        assert values["sharing/peer_rows"] > 0
    gateway = [one["values"] for one in records if "gateway/branches" in one.get("values", {})][-1]
    assert 0 < gateway["gateway/branches"] < gateway["gateway/turns"]
    begun = [turn for one in answers_of(folder) for turn in one["turns"] if turn.get("is_rewritten")]
    assert all(turn["begins_row"] and not turn["is_sampled"] for turn in begun)
    assert {turn["messages"][0]["content"] for turn in begun} > {"Be brief"}
    told = mrl(tmp_path, "samples", "runs/r", "--task", "compacts", "--limit", "50")
    assert "(a new row begins here, rewritten by the agent)" in " ".join(told.split())
