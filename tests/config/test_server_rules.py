"""Rules about inference servers as engines."""

import pytest

from mrl.config.rules.run_rules import check_rules
from mrl.errors import ConfigError
from tests.support.word_runs import word_run


def check(rollout, **policy) -> None:
    policies = {"qwen": {}, "llama": {"rollout": rollout, **policy}}
    check_rules(word_run(policies, sharing={"regime": "rlad"}), where="test")


@pytest.mark.parametrize(
    ("rollout", "policy", "words"),
    [
        ({"server": {"dtype": "bfloat16"}}, {}, r"llama\.rollout\.server: the embedded engine has no server.*dtype"),
        (
            {"engine": "vllm", "server": {"url": "http://h:1"}, "workers": 2},
            {},
            r"several workers cannot share one server",
        ),
        (
            {"engine": "vllm", "server": {"url": "http://h:1", "options": ["--enforce-eager"]}},
            {},
            r"llama\.rollout\.server\.options: .*does not start the server.*got \['--enforce-eager'\].*remove url",
        ),
        ({"engine": "sglang", "server": {"url": "http://h:1", "python": "/p"}}, {}, r"server\.python: .*got '/p'"),
        (
            {"engine": "vllm", "server": {"options": ["--port", "80"]}},
            {},
            r"this option is not allowed.*--port.*a free port",
        ),
        (
            {"engine": "vllm", "server": {"options": ["--port=80"]}},
            {},
            r"server\.options: this option is not allowed",
        ),
        ({"engine": "vllm", "max_new_tokens": 64, "server": {"context_tokens": 64}}, {}, r"no room for .* = 64 plus"),
        ({"engine": "vllm", "server": {"url": "h:1"}}, {}, r"server\.url"),
        ({"engine": "vlm"}, {}, r"rollout\.engine"),
        (
            {"engine": "vllm", "weights": "broadcast"},
            {"device": "cuda"},
            r"llama\.rollout\.weights: .*vllm on cuda",
        ),
        ({"engine": "sglang", "weights": "broadcast", "server": {"url": "http://h:1"}}, {}, r"given by url"),
        ({"engine": "sglang", "weights": "broadcast"}, {"device": "cuda"}, r"sglang on cuda"),
        ({"weights": "broadcast", "weights_in": "memory"}, {}, r"llama\.rollout\.weights_in: .*got 'memory'.*\"disk\""),
        ({"weights": "adapters"}, {}, r"llama\.rollout\.weights: .*no adapters.*llama\.learner\.lora"),
        ({"weights_in": "gpu"}, {}, r"llama\.rollout\.weights_in: .*got '\"gpu\" for files, embedded on cpu'"),
        ({"weights_in": "gpu", "engine": "sglang"}, {"device": "cuda"}, r"weights_in: .*for files, sglang on cuda"),
        ({"weights_in": "gpu", "weights": "broadcast"}, {"device": "cuda"}, r"weights_in: .*for broadcast, embedded"),
        (
            {"weights_in": "gpu", "engine": "vllm", "server": {"url": "http://h:1"}},
            {"device": "cuda"},
            r"weights_in: .*for files, vllm on cuda given by url",
        ),
        (
            {"engine": "sglang", "weights": "adapters"},
            {"learner": {"lora": {}}},
            r"llama\.rollout\.weights: .*adapters for sglang.*embedded",
        ),
        (
            {"engine": "vllm", "weights": "adapters", "server": {"url": "http://h:1"}},
            {"learner": {"lora": {}}},
            r"llama\.rollout\.weights: .*adapters for vllm given by url",
        ),
    ],
)
def test_tables_that_contradict_themselves_are_refused(rollout, policy, words):
    """In one line that names the key."""
    with pytest.raises(ConfigError, match=words):
        check(rollout, **policy)


@pytest.mark.parametrize(
    ("engine", "device", "option", "why"),
    [
        ("sglang", "cuda", "--tp", r"rollout\.gpus"),
        ("sglang", "cuda", "--dp", r"rollout\.workers"),
        ("vllm", "cuda", "-dp", r"rollout\.workers"),
        ("vllm", "cuda", "--max_model_len=64", r"context_tokens"),
        ("vllm", "cuda", "--max-logprobs", "peers ask for at most 20"),
        ("vllm", "cuda", "--logprobs-mode=raw_logprobs", "of the distribution that is sampled from"),
        ("sglang", "cuda", "--preferred-sampling-params", "sampled and scored with different distributions"),
        ("sglang", "cuda", "--speculative-accept-threshold-acc=0.9", "sampled and scored with different distributions"),
        ("vllm", "cpu", "--speculative-config.method=ngram", "on a CPU"),
        ("vllm", "cpu", "--spec-method", "on a CPU"),
        ("vllm", "cpu", "-sc", "on a CPU"),
        ("sglang", "cpu", "--speculative-algorithm", "on a CPU"),
    ],
)
def test_options_by_which_an_engine_samples_otherwise_than_it_tells_are_refused(engine, device, option, why):
    """However they are spelled: argparse takes any beginning that is clear, and vLLM underscores and dots."""
    with pytest.raises(ConfigError, match=rf"llama\.rollout\.server\.options: .*{why}"):
        check({"engine": engine, "server": {"options": [option, "8"]}}, device=device)


@pytest.mark.parametrize(
    ("engine", "device", "options"),
    [
        ("vllm", "cuda", ["--speculative-config.method=ngram"]),
        ("sglang", "cuda", ["--speculative-algorithm", "NGRAM"]),
        ("vllm", "cpu", ["--specialize-active-lora", "--generation-config", "auto", "--enable-prefix-caching"]),
        ("sglang", "cpu", ["--sampling-defaults", "model", "--mem-fraction-static", "0.8", "-1", "--"]),
    ],
)
def test_other_options_of_a_server_are_its_own(engine, device, options):
    """They are passed on unchanged."""
    check({"engine": engine, "server": {"options": options}}, device=device)


@pytest.mark.parametrize(
    ("engine", "units", "refused"),
    [
        ("vllm", ["gpu:0"], r"qwen\.rollout\.weights: a sleeping .*residency"),
        ("embedded", ["gpu:0"], None),
        ("vllm", ["cpu:0"], r'= "sleep": no engine of this run can sleep.*wanted .*"stop", for engines on CPUs'),
        ("embedded", [], r'residency = "sleep": no engine of this run can sleep'),
    ],
)
def test_engines_sleep_on_gpu_units_and_with_adapters_only_those_that_keep_their_weights(engine, units, refused):
    """vLLM gives them back to the GPU, and transformers keeps them; on cores, or without units, no engine sleeps."""
    device = "cpu" if units == ["cpu:0"] else "cuda"
    policy = {"device": device, "learner": {"lora": {}}, "rollout": {"engine": engine, "weights": "adapters"}}
    config = word_run({"qwen": policy}, allocation={"units": units, "residency": "sleep"})
    if refused:
        with pytest.raises(ConfigError, match=refused):
            check_rules(config, where="test")
    else:
        check_rules(config, where="test")


@pytest.mark.parametrize(
    ("rollout", "policy"),
    [
        ({"engine": "vllm", "server": {"url": "http://h:1"}}, {}),
        ({"engine": "sglang", "workers": 2}, {}),
        ({"engine": "vllm", "weights": "broadcast"}, {}),
        ({"engine": "sglang", "weights": "broadcast"}, {}),
        ({"weights": "broadcast", "workers": 2}, {}),
        ({"weights": "adapters", "workers": 2}, {"learner": {"lora": {"rank": 2}}}),
        ({"engine": "vllm", "weights": "adapters"}, {"learner": {"lora": {"rank": 2}}}),
        ({"engine": "vllm", "max_new_tokens": 64, "server": {"context_tokens": 65, "options": ["--seed", "1"]}}, {}),
        ({"engine": "vllm", "max_new_tokens": 4096, "server": {"url": "http://h:1"}}, {}),
    ],
)
def test_tables_that_fit_together_pass(rollout, policy):
    """A server of one's own for each worker, somebody's for one worker, whose context is not known here."""
    check(rollout, **policy)
