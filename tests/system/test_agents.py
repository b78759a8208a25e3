"""A whole run whose policies are trained by agents: one that the run starts, and one from outside."""

import gzip
import http.client
import json
import os
import signal
import threading
import urllib.error
import urllib.request

import pytest

pytestmark = pytest.mark.system

AGENT = '''
async def spell(client, row):
    """Whoever says something of even length, and then of odd, wins."""
    talk = [{"role": "user", "content": f"Say a letter: {'abcdefgh'[row['seed'] % 8]}"}]
    lengths = []
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=talk, temperature=0.1)
        said = answer.choices[0].message
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
    """An agent that nobody started: it asks for an episode, asks the policy once, and gives the reward."""

    def __init__(self, folder):
        super().__init__(daemon=True)
        self.folder, self.is_over, self.policies, self.codes = folder, threading.Event(), set(), set()
        self.num_pieces = set()

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
        session = json.loads(self.post(f"{url}/sessions", key, {"task": "quiz", "wait_s": 2}))
        body = {"model": "policy", "messages": [{"role": "user", "content": "Say a letter: q"}], "stream": True}
        try:
            events = self.post(f"{url}/chat/completions", session["api_key"], body).split(b"\n\n")
        except urllib.error.HTTPError:
            return
        chunks = [json.loads(one.removeprefix(b"data: ")) for one in events if one.startswith(b"data: {")]
        pieces = [one["choices"][0]["delta"].get("content") or "" for one in chunks]  # KeyError for a gateway that died
        self.num_pieces.add(len(pieces))
        words = "".join(pieces)
        self.post(f"{url}/sessions/{session['id']}/reward", key, {"reward": float(len(words) % 3 == 0)})
        self.policies.add(session["model"])

    def post(self, url, key, body):
        """The answer."""
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
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
    outsiders = [Outsider(run.folder) for _ in range(4)]
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
    assert log.count("the gateway listens") == 2
    assert log.count("temperature = 0.1") == 2  # once in each life
    assert run.metrics("supervisor")[-1]["values"]["process/restarts"] == 1, "the gateway alone"
    counted = run.metrics("gateway")[-1]["values"]
    assert counted["gateway/turns"] > 0
    assert counted["gateway/ends/done"] > 0
    trained = set()
    for policy in ("qwen", "llama"):
        files = sorted(run.folder.glob(f"rollouts/step_*/{policy}.jsonl.gz"))
        answers = [json.loads(line) for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]
        trained |= {one["task"] for one in answers if one["kind"] == "rollout"}
        assert any("user: Another" in one["completion"] for one in answers if one["task"] == "spell")
        assert run.result(policy, 4)["missing"] == 0
    assert trained == {"spell", "quiz"}
    assert not run.left_over()
