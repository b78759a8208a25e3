"""A whole run that answers requests outside of episodes while it trains, as OpenAI's API does."""

import gzip
import json
import math
import urllib.error
import urllib.request

import openai
import pytest

pytestmark = pytest.mark.system

SERVING = """
[sharing]
regime = "sgt"
[gateway]
serve = true
"""
MARK = "zebra crossing"


def url_and_key(run):
    """Of a run's gateway."""
    address = json.loads((run.folder / "endpoints" / "gateway.json").read_text())["address"]
    return address.replace("tcp://", "http://"), (run.folder / "keys" / "gateway.key").read_text().strip()


def post(url, key, body):
    """Status and answer."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=120
        ) as found:
            return found.status, json.loads(found.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_run_that_trains_answers_plain_requests_and_trains_on_none_of_them(make_run):
    """By a raw client and the openai package: chat, completions, scores of given text, ids; the run goes on."""
    run = make_run(steps=60, more=SERVING)
    run.start()
    run.until(lambda: min(run.step("qwen"), run.step("llama")) >= 1, "both train")
    url, key = url_and_key(run)
    talk = [{"role": "user", "content": f"Trim the ends: {MARK}"}]

    status, raw = post(f"{url}/v1/chat/completions", key, {"model": "qwen", "messages": talk, "max_tokens": 5})
    assert (status, raw["usage"]["completion_tokens"] <= 5) == (200, True)
    assert raw["system_fingerprint"].startswith("qwen@")

    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["qwen", "llama"]
        for model in ("qwen", "llama"):
            found = client.chat.completions.create(
                model=model, messages=talk, n=3, seed=7, temperature=0.8, logprobs=True
            )
            assert [choice.index for choice in found.choices] == [0, 1, 2]
            assert all(token.logprob <= 0 for token in found.choices[0].logprobs.content)
        text = client.completions.create(model="qwen", prompt=MARK, echo=True, logprobs=1, max_tokens=1, temperature=0)
        scored = text.choices[0].logprobs
        assert "".join(scored.tokens[:-1]) == MARK
        assert scored.token_logprobs[0] is None
        assert all(math.isfinite(one) and one <= 0 for one in scored.token_logprobs[1:])
        assert all(
            max(top.values()) >= own
            for own, top in zip(scored.token_logprobs[1:-1], scored.top_logprobs[1:-1], strict=True)
        )
        with pytest.raises(openai.NotFoundError, match=r"qwen@999999.*there are qwen \(now qwen@\d+\), llama"):
            client.chat.completions.create(model="qwen@999999", messages=talk)
    status, found = post(f"{url}/inference/v1/generate", key, {"model": "llama", "token_ids": [5, 6, 7]})
    assert (status, len(found["choices"][0]["token_ids"]) > 0) == (200, True)
    assert min(run.step("qwen"), run.step("llama")) < 60, "they were answered while it trained"
    assert run.finish(600) == 0, run.tail()

    counted = run.metrics("gateway")[-1]["values"]
    assert counted["gateway/plain/answers"] == 9
    assert counted["gateway/plain/scored_tokens"] == len(scored.tokens) - 2
    kept = list(run.folder.glob("rollouts/step_*/*.jsonl.gz"))
    assert kept
    assert not any(MARK.encode() in gzip.decompress(file.read_bytes()) for file in kept)
    assert not run.left_over()
