"""Rules that span several keys of a learner's table."""

import pytest

from mrl.config.rules.run_rules import check_rules
from mrl.errors import ConfigError
from tests.support.word_runs import word_run


def config_with(steps=10, device="cpu", **learner):
    """A configuration with this table."""
    policy = {"device": device, "rollout": {"max_new_tokens": 300}, "learner": learner}
    config = word_run({"qwen": policy}, run={"steps": steps})
    check_rules(config, where="test")
    return config


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        (
            {"shard_size": 2, "processes": 2},
            'shard_size: has no effect with sharding = "replicate"; got 2; cure: .*sharding = "shard"',
        ),
        (
            {"shard_size": 3, "processes": 4, "sharding": "shard"},
            "does not divide learner.processes; got 3; .*processes = 4",
        ),
        (
            {"context_parallel": 3, "processes": 4},
            "context_parallel: .* one host; got '3 for 4 .*; wanted a divisor of 4",
        ),
        (
            {"context_parallel": 2, "processes": 2, "compile": True},
            "compile: .*do not support context parallelism; .*set compile = false or context_parallel = 1",
        ),
        ({"microbatch_tokens": 300}, "microbatch_tokens: smaller than one row; got 300; .*max_new_tokens = 300"),
        ({"warmup_steps": 10}, "warmup_steps: the run ends within the warm-up; got 10; wanted < run.steps = 10"),
        (
            {"activation_offload": True},
            "activation_offload: requires activation_checkpointing; .*; cure: .*activation_checkpointing = true",
        ),
        ({"precision": "float16"}, "learner.precision: invalid value"),
        ({"parameter_dtype": "float16"}, "learner.parameter_dtype: invalid value"),
        ({"logprob_kernel": "liger", "precision": "bfloat16"}, "logprob_kernel: .*; got 'cpu, bfloat16'; .*chunked"),
        ({"logprob_kernel": "liger", "device": "cuda"}, "logprob_kernel: the kernel liger .*; got 'cuda, float32'; "),
        ({"attention_kernel": "varlen", "precision": "bfloat16"}, "attention_kernel: .*; got 'cpu, bfloat16'; .*rows"),
        (
            {"max_reuses": 2},
            "max_reuses: has no effect; got 2; wanted policies.qwen.learner.reuse_share > 0; cure: set ",
        ),
        ({"reuse_share": 0.01}, "reuse_share: less than one group of prompts_per_step = 32; got 0.01; wanted >= 0.031"),
        (
            {"reuse_share": 0.6},
            "max_reuses: too few to reuse 19 groups per step with 13 fresh groups; got 1; wanted .* <= 0.5 with",
        ),
        (
            {"reuse_share": 0.6, "max_reuses": 3},
            "max_staleness_versions: .* too stale before it is used 4 times.*; got 2; wanted >= max_reuses = 3",
        ),
        (
            {"reuse_share": 0.5, "router_replay": True},
            "router_replay: not possible with reuse_share.*; got True; wanted false",
        ),
        ({"reuse_share": 1.0}, "learner.reuse_share: invalid value; got 1"),
        ({"router_replay": True, "compile": True}, "router_replay: compiled blocks .*; cure: set one of them to false"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(learner, words):
    """In one line that names the key and the cure."""
    with pytest.raises(ConfigError, match=words):
        config_with(**learner)


@pytest.mark.parametrize(
    "learner",
    [
        {"processes": 4, "sharding": "shard"},
        {"processes": 4, "sharding": "shard", "shard_size": 2},
        {"processes": 4, "context_parallel": 2},
        {"microbatch_tokens": 301},
        {"router_replay": True},
        {"warmup_steps": 9},
        {"reuse_share": 0.5, "max_staleness_versions": 1},
        {"reuse_share": 0.75, "max_reuses": 3, "max_staleness_versions": 3},
        {"logprob_kernel": "liger", "device": "cuda", "precision": "bfloat16"},
        {"attention_kernel": "varlen", "device": "cuda", "precision": "bfloat16"},
        {"optimizer_memory": "host", "optimizer_dtype": "bfloat16"},
        {"parameter_dtype": "bfloat16"},
        {"parameter_dtype": "bfloat16", "precision": "bfloat16", "lora": {"rank": 4}},
        {"activation_checkpointing": True, "activation_offload": True},
    ],
)
def test_keys_that_fit_each_other_pass(learner):
    """At the bounds too."""
    config_with(**learner)


def test_adapters_of_a_made_policy_lie_on_float32():
    """Its recipe writes that; a folder is looked at when it is read."""
    made = {"make": {"architecture": "llama", "tokenizer": "byte_level"}}
    for learner in ({"lora": {"rank": 4}}, {"parameter_dtype": "bfloat16"}):
        check_rules(word_run({"qwen": {**made, "learner": learner}}), where="test")
    both = {"parameter_dtype": "bfloat16", "lora": {"rank": 4}}
    with pytest.raises(ConfigError, match=r"learner.parameter_dtype: .*adapters.*; got .*; cure: .*= .float32"):
        check_rules(word_run({"qwen": {**made, "learner": both}}), where="test")


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"rollout": {"engine": "vllm"}}, "router_replay: vLLM on a CPU .*; wanted .*sglang"),
        (
            {"model": "", "make": {"architecture": "llama", "tokenizer": "byte_level"}},
            "router_replay: the policy has no routers; got 'llama'; .*moe",
        ),
    ],
)
def test_routers_are_replayed_where_there_are_any_and_an_engine_tells(policy, words):
    """As far as the configuration says; and with every other engine."""
    replaying = {"learner": {"router_replay": True}}
    check_rules(word_run({"qwen": replaying}), where="test")
    for engine, device in (("sglang", "cpu"), ("vllm", "cuda")):
        fitting = {"rollout": {"engine": engine}, "device": device}
        check_rules(word_run({"qwen": replaying | fitting}), where="test")

    refused = word_run({"qwen": replaying | policy})
    with pytest.raises(ConfigError, match=words):
        check_rules(refused, where="test")
