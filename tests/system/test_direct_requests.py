"""A whole run that answers requests outside of episodes while it trains, as OpenAI's API does."""

import gzip
import itertools
import json
import math
import signal
import urllib.error
import urllib.request

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrl.cli.main import main
from tests.support.calm_steps import calm_steps
from tests.support.pages import ROOT, blocks

pytestmark = pytest.mark.system
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")

SERVING = """
[sharing]
regime = "sgt"
[gateway]
serve = true
kept_versions = 1
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


def test_a_run_that_trains_answers_plain_requests_and_trains_on_none_of_them(make_run, monkeypatch):
    """By a raw client and the openai package: chat, completions, scores of given text, ids, a kept version."""
    run = make_run(steps=100_000, more=SERVING)
    run.start("--policies.qwen.learner.keep_checkpoints=1000", *calm_steps(run.config))
    run.until(lambda: min(run.step("qwen"), run.step("llama")) >= 1, "both train")
    url, key = url_and_key(run)
    talk = [{"role": "user", "content": f"Trim the ends: {MARK}"}]

    status, raw = post(f"{url}/v1/chat/completions", key, {"model": "qwen", "messages": talk, "max_tokens": 5})
    assert (status, raw["usage"]["completion_tokens"] <= 5) == (200, True)
    assert raw["system_fingerprint"].startswith("qwen@")

    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        assert [model.id for model in client.models.list()][:2] == ["qwen", "llama"]
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
        num_streamed = check_streams(client, "qwen")
        check_kept(client, run)
        with pytest.raises(openai.NotFoundError, match=r"available: qwen \(now qwen@\d+\), llama.*checkpoint"):
            client.chat.completions.create(model="qwen@999999", messages=talk)
    status, found = post(f"{url}/inference/v1/generate", key, {"model": "llama", "token_ids": [5, 6, 7]})
    assert (status, len(found["choices"][0]["token_ids"]) > 0) == (200, True)
    monkeypatch.setenv("URL", f"{url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", key)
    exec(blocks(PAGE, "python")[0], {})
    num_answers = 11 + num_streamed
    counted = run.until(
        lambda: (told := run.metrics("gateway")[-1]["values"])["gateway/plain/answers"] >= num_answers and told,
        "the answers are counted",
    )
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 143, run.tail()

    assert counted["gateway/plain/answers"] == num_answers
    assert counted["gateway/plain/kept_versions"] == 1
    assert counted["gateway/plain/scored_tokens"] == len(scored.tokens) - 2 + len(MARK) - 1
    kept = list(run.folder.glob("rollouts/step_*/*.jsonl.gz"))
    assert kept
    assert not any(MARK.encode() in gzip.decompress(file.read_bytes()) for file in kept)
    assert not run.left_over()


def check_kept(client, run):
    """A version that the workers have left says what its exported checkpoint says to transformers."""
    run.until(lambda: run.step("qwen") > 8, "checkpoints are there that the workers have left")
    named = next(model.id for model in client.models.list() if model.id.startswith("qwen@"))
    found = client.completions.create(model=named, prompt=MARK, echo=True, logprobs=1, max_tokens=0)
    assert found.system_fingerprint == named
    exported = run.folder.parent / "exported"
    step = named.removeprefix("qwen@")
    assert main(["export", str(run.folder), "--policy", "qwen", "--step", step, "--to", str(exported)]) == 0
    model, tokenizer = (of.from_pretrained(exported) for of in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer(MARK, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    assert found.choices[0].logprobs.token_logprobs[1:] == pytest.approx(logprobs, abs=1e-4)


def check_streams(client, model):
    """Chat and completions in pieces are, together, what they are in one; returns how many answers came.

    Weights go on meanwhile: what two versions say is compared only where they are one. Of an answer that has ended
    there is one piece, so a second one says that the first was under way while the answer was sampled.
    """
    asked = {"temperature": 0, "max_tokens": 12}
    talk = [{"role": "user", "content": f"Trim the ends: {MARK}"}]
    served = ""
    for count in itertools.count(1):
        assert count < 300, "no answer came in pieces under the weights of the one before"
        before = client.completions.create(model=model, prompt=MARK, logprobs=1, **asked)
        with client.completions.create(model=model, prompt=MARK, logprobs=1, stream=True, **asked) as stream:
            chunks = list(stream)
        choices = [chunk.choices[0] for chunk in chunks]
        # An answer is named by its newest weights: one that begins under these, and ends under them, is of no others.
        is_same = {before.system_fingerprint, *(chunk.system_fingerprint for chunk in chunks)} == {served}
        served = chunks[-1].system_fingerprint
        if is_same and sum(choice.logprobs is not None for choice in choices) > 1:
            break
    whole = before.choices[0]
    assert "".join(choice.text for choice in choices) == whole.text
    parts = [choice.logprobs for choice in choices if choice.logprobs]
    assert [token for part in parts for token in part.tokens] == whole.logprobs.tokens
    logprobs = [one for part in parts for one in part.token_logprobs]
    assert logprobs == pytest.approx(whole.logprobs.token_logprobs, abs=1e-4)  # others in a batch change roundings
    assert [one for part in parts for one in part.text_offset] == whole.logprobs.text_offset
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + [whole.finish_reason]
    options = {"stream_options": {"include_usage": True}}
    with client.chat.completions.create(model=model, messages=talk, stream=True, **options, **asked) as stream:
        *chunks, last = stream
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert (last.choices, 1 <= last.usage.completion_tokens <= 12) == ([], True)
    return 2 * count + 1
