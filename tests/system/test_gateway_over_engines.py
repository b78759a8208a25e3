"""Whole runs with real servers behind the gateway: agents train a policy, and OpenAI's client asks it beside."""

import gzip
import json
import math
import re
from functools import partial

import openai
import pytest

from tests.system.test_direct_requests import MARK, check_streams, post, url_and_key

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
STEPS = 8
AGENT = '''
async def goes_on(client, first):
    """The same with ids without roles, in one row; no conversation, which has roles."""
    url, ids, lengths = str(client.base_url).replace("/v1/", "/inference/v1/generate"), [5, 6, first], []
    for _ in range(2):
        answer = await client.post(url, body={"model": "policy", "token_ids": ids}, cast_to=dict)
        said = answer["choices"][0]["token_ids"]
        lengths.append(len(said))
        ids = [*ids, *said, 7]
    return float(lengths[0] % 2 == 0) / 2 + float(lengths[1] % 2) / 2


async def spell(client, row):
    """Whoever says something of even length, and then of odd, wins. Half of the conversations are rewritten between."""
    if row["seed"] % 3 == 0:
        return await goes_on(client, 3 + row["seed"] % 8)
    talk = [{"role": "user", "content": f"Say a letter: {'abcdefgh'[row['seed'] % 8]}"}]
    lengths = []
    for _ in range(2):
        stream = await client.chat.completions.create(model="policy", messages=talk, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        print("pieces of a turn:", len(pieces), flush=True)
        said = "".join(pieces)
        lengths.append(len(said))
        talk = [] if row["seed"] % 2 else [*talk, {"role": "assistant", "content": said}]
        talk.append({"role": "user", "content": "Another"})
    return float(lengths[0] % 2 == 0) / 2 + float(lengths[1] % 2) / 2
'''
GATEWAY = """
[sharing]
regime = "sgt"
[gateway]
serve = true
[tasks.spell]
source = "agent"
dataset = "my_agents:spell"
options = { size = 400 }
max_turns = 3
"""


@pytest.mark.parametrize("engine", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
def test_an_agent_trains_a_policy_on_a_server_that_answers_others_beside(make_run, engine):
    """Chat, several answers, log-probabilities, scores and ids while it trains; none of that is trained on."""
    run = make_run(steps=STEPS, more=GATEWAY)
    (run.config.parent / "my_agents.py").write_text(AGENT)
    words = ["--pool.held_out_prompts=16", "--tasks.trim.weight=0", "--tasks.letter_counting.weight=0"]
    words += [f"--policies.qwen.rollout.engine={engine}", "--policies.qwen.make.num_heads=2"]
    run.start(*words, "--allocation.slots=32", "--allocation.floor_slots=8")
    run.until(lambda: run.step("qwen") >= 1, "it trains", 400)
    url, key = url_and_key(run)
    num_answers = asked_for(f"{url}/v1", key)
    status, found = post(f"{url}/inference/v1/generate", key, {"model": "qwen", "token_ids": [5, 6, 7]})
    assert (status, len(found["choices"][0]["token_ids"]) > 0) == (200, True)
    assert run.step("qwen") < STEPS, "it was answered while it trained"
    assert run.finish(600) == 0, run.tail()

    assert run.metrics("gateway")[-1]["values"]["gateway/plain/answers"] == num_answers + 1
    assert run.metrics("gateway")[-1]["values"]["gateway/ends/done"] > 0
    assert run.metrics("gateway")[-1]["values"]["gateway/branches"] > 0
    log = (run.folder / "logs" / "latest" / "gateway.log").read_text()
    assert max(map(int, re.findall(r"pieces of a turn: (\d+)", log))) > 3, "turns are streamed as they grow"
    steps = [record["values"] for record in run.metrics("learner/qwen")]
    assert len(steps) == STEPS
    assert max(one["episodes/rows_mean"] for one in steps) > 1
    assert max(one["mismatch/k3_nats"] for one in steps if not one["staleness/max_versions"]) < 1e-6
    files = list(run.folder.glob("rollouts/step_*/qwen.jsonl.gz"))
    answers = [json.loads(line) for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]
    assert {one["task"] for one in answers if one["kind"] == "rollout"} == {"spell"}
    assert any("user: Another" in one["completion"] for one in answers)
    assert any(0 < one["episodes/bare_share"] < 1 for one in steps)
    given = [turn for one in answers for turn in one.get("turns", ()) if turn.get("is_bare") and not turn["is_sampled"]]
    assert any(turn["tokens"] == 1 for turn in given), "what was added alone is given"
    assert not any(turn.get("begins_row") for turn in given)
    assert not any(MARK in json.dumps(one) for one in answers)
    assert not run.left_over()


def asked_for(base_url, key):
    """Everything that the package openai asks for; returns how many answers came."""
    talk = [{"role": "user", "content": f"Say a letter: {MARK}"}]
    with openai.OpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        chat = partial(client.chat.completions.create, model="qwen", messages=talk)
        said = chat(max_tokens=2)
        assert said.system_fingerprint.startswith("qwen@")
        assert said.usage.completion_tokens <= 2
        several = chat(n=3, seed=7, temperature=0.8, logprobs=True)
        assert [choice.index for choice in several.choices] == [0, 1, 2]
        logprobs = [token.logprob for choice in several.choices for token in choice.logprobs.content]
        assert all(math.isfinite(one) and one <= 0 for one in logprobs)
        scored = client.completions.create(model="qwen", prompt=MARK, echo=True, logprobs=1, max_tokens=1).choices[0]
        assert "".join(scored.logprobs.tokens[:-1]) == MARK
        assert scored.logprobs.token_logprobs[0] is None
        for own, top in list(zip(scored.logprobs.token_logprobs, scored.logprobs.top_logprobs, strict=True))[1:-1]:
            assert max(top.values()) >= own
        with pytest.raises(openai.BadRequestError, match="prompt: "):
            client.completions.create(model="qwen", prompt=f"{MARK} " * 60, max_tokens=1)
        return 5 + check_streams(client, "qwen")
