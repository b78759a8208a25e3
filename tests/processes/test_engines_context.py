"""What is looked at before a worker starts its engine."""

import json

import pytest

from mrl.config.load import validate
from mrl.errors import ConfigError
from mrl.processes.engines import check_lengths
from mrl.tasks.pool import build_pool


def check(
    folder,
    *,
    context_tokens: int = 2048,
    max_new_tokens: int = 8,
    positions: int = 512,
    microbatch_tokens: int = 2048,
    **rollout: object,
) -> None:
    """A byte is a token."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": positions}))
    server = {"context_tokens": context_tokens, **rollout.pop("server", {})}
    tables = {
        "run": {"name": "r", "steps": 1},
        "sharing": {"regime": "independent"},
        "pool": {"train_prompts": 64, "held_out_prompts": 4},
        "tasks": {"trim": {"source": "words", "dataset": "trim"}},
        "policies": {
            "qwen": {
                "model": str(folder),
                "learner": {"microbatch_tokens": microbatch_tokens},
                "rollout": {"engine": "vllm", "max_new_tokens": max_new_tokens, **rollout, "server": server},
            }
        },
    }
    config = validate(tables, where="test")
    pool = build_pool(config.tasks, config.pool)
    try:
        check_lengths(config, "qwen", pool, str.encode)
    finally:
        pool.close()


@pytest.fixture(scope="module")
def longest() -> int:
    """Tokens of the longest prompt, found in the slow and obvious way."""
    tables = {
        "run": {"name": "r", "steps": 1},
        "sharing": {"regime": "independent"},
        "pool": {"train_prompts": 64, "held_out_prompts": 4},
        "tasks": {"trim": {"source": "words", "dataset": "trim"}},
        "policies": {"qwen": {"model": "m"}},
    }
    config = validate(tables, where="test")
    pool = build_pool(config.tasks, config.pool)
    found = max(len(pool.prompt_at(position).text.encode()) for position in range(len(pool)))
    pool.close()
    return found


def test_a_prompt_and_its_answer_have_to_fit_into_a_servers_context(tmp_path, longest):
    """To the token; the line says how much is wanted, and for what."""
    check(tmp_path, context_tokens=longest + 8)
    told = rf"policies\.qwen\.rollout\.server\.context_tokens: .* wanted >= {longest + 8}, .* of trim .*cure: raise it"
    with pytest.raises(ConfigError, match=told):
        check(tmp_path, context_tokens=longest + 7)


def test_a_prompt_and_its_answer_have_to_fit_into_a_pass_of_the_learner(tmp_path, longest):
    """Whatever the engine; of the answer's last token nothing is predicted."""
    check(tmp_path, microbatch_tokens=longest + 7, engine="embedded")
    told = rf"policies\.qwen\.learner\.microbatch_tokens: smaller than one row; .*wanted >= {longest + 7}, .* of trim"
    with pytest.raises(ConfigError, match=told):
        check(tmp_path, microbatch_tokens=longest + 6, engine="embedded")


def test_a_model_that_reads_less_than_the_server_may_is_the_limit(tmp_path, longest):
    """Raising the server's context would not help."""
    with pytest.raises(ConfigError, match=r"the context length of the model.*cure: lower tasks\.trim"):
        check(tmp_path, context_tokens=2048, positions=longest + 7)


def test_sglang_reads_a_little_less_than_the_model(tmp_path, longest):
    """What it keeps comes on top of the context that is asked for, as far as the model can read."""
    check(tmp_path, context_tokens=longest + 8, positions=longest + 8 + 7, engine="sglang")
    with pytest.raises(ConfigError, match="the context length of the model"):
        check(tmp_path, context_tokens=longest + 8, positions=longest + 8 + 6, engine="sglang")


@pytest.mark.parametrize("rollout", [{"engine": "embedded"}, {"server": {"url": "http://h:1"}}])
def test_a_context_that_is_not_ours_is_not_judged(tmp_path, rollout):
    """That of somebody else's server is not known here."""
    check(tmp_path, context_tokens=16, **rollout)
