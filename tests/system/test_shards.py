"""Two daemons as processes, as a run starts them: one is killed, and its part of the prompts alone waits for it."""

import json
import subprocess
import time
from contextlib import ExitStack

import pytest

from mrl.config.load import validate
from mrl.config.run_folder import RunFolder
from mrl.config.schema import RunConfig
from mrl.exchange.client import ExchangeClient
from mrl.exchange.shards import shard_of
from mrl.launch.plan import build_plan
from mrl.records.experience import OutcomeRecord
from mrl.records.finish import FinishReason
from mrl.records.version import Version
from mrl.roles import wiring
from mrl.transport.grants import Grant
from mrl.transport.keys import create_keys

pytestmark = pytest.mark.system

TABLES = {
    "run": {"name": "r", "steps": 1},
    "tasks": {"reverse": {"source": "words", "dataset": "reverse"}},
    "policies": {"qwen": {"model": "/nowhere"}, "llama": {"model": "/nowhere"}},
    "exchange": {"shards": 2},
}
PROMPTS = [f"reverse/{number}" for number in range(200)]
WAIT_S = 20.0


@pytest.fixture
def folder(tmp_path):
    """A run folder with the least that the roles read."""
    config: RunConfig = validate(TABLES, where="test")
    (tmp_path / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    create_keys(tmp_path / "keys", [Grant("worker", "qwen"), Grant("learner", "llama")])
    return RunFolder(tmp_path)


@pytest.fixture
def start(folder):
    """Starts the process of one shard by the command that the plan has for it; returns once it listens."""
    specs = [
        spec for spec in build_plan(validate(TABLES, where="test"), folder.path).processes if spec.role == "exchange"
    ]
    processes = []

    def start_shard(shard):
        process = subprocess.Popen(specs[shard].argv, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        assert any("replayed" in line for line in process.stderr), "the role ended early"
        return process

    yield start_shard
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def connect(folder):
    """Makes a role's end of the exchange."""
    with ExitStack() as closing:
        yield lambda role, policy: wiring.connect_exchange(folder, 2, role, policy, closing)


def success(prompt_id):
    """A record of qwen."""
    version = Version(0, 0)
    return OutcomeRecord(
        record_id=f"r-{prompt_id}", source="qwen", oldest=version, newest=version, fingerprint="f", task="reverse",
        prompt_id=prompt_id, created_unix_s=0.0, completion=b"yah", finish_reason=FinishReason.STOP, verifier="v",
        reward=1.0,
    )  # fmt: skip


def hear(reader, prompts):
    """Take until there is a record on each of these prompts, and return all prompts of what came."""
    end_s, heard = time.monotonic() + WAIT_S, []
    while time.monotonic() < end_s and not set(prompts) <= set(heard):
        heard += [item.record.prompt_id for item in reader.take()]
    return heard


def test_a_killed_shard_costs_its_part_until_it_is_back(start, connect, folder):
    """What it had acknowledged it still has; what was published meanwhile comes when it is there again."""
    of_shard = [[prompt for prompt in PROMPTS if shard_of(prompt, range(2)) == shard] for shard in range(2)]
    processes = [start(0), start(1)]
    writer, reader = connect("worker/qwen/0", "qwen"), connect("learner/llama", "llama")
    writer.publish([success(prompt) for part in of_shard for prompt in part[:10]])
    assert writer.flush(WAIT_S)
    processes[1].kill()
    processes[1].wait()
    ask = {"kinds": ["outcome"], "limit": 4, "max_age_versions": None}
    reader.fetch(PROMPTS, **ask, watch=True)
    writer.publish([success(prompt) for part in of_shard for prompt in part[10:20]])
    assert sorted(hear(reader, of_shard[0][:20])) == sorted(of_shard[0][:20])
    assert not writer.flush(0.0)
    start(1)
    assert writer.flush(WAIT_S)
    assert sorted(hear(reader, of_shard[1][:20])) == sorted(of_shard[1][:20])
    assert (folder.exchange / "shard_1").is_dir()


def test_a_single_daemon_needs_no_shards(folder):
    """Its client is the plain one."""
    with ExitStack() as closing:
        exchange = wiring.connect_exchange(folder, 1, "worker/qwen/0", "qwen", closing)
    assert isinstance(exchange, ExchangeClient)
