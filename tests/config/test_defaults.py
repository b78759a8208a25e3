"""What stands for keys that were left out: by the device, by the size of a model; what was given always wins."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from mrl.config.defaults import GPU_CHUNK_LOGITS, OF_POLICY, OF_RUN, Resolved, by_device, by_groups, by_size
from mrl.config.load import load_resolved, resolve, validate
from mrl.config.run_folder import dump_config
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError
from tests.support.word_runs import word_run

RUN = """
[run]
name = "r"
steps = 3
[tasks.copy]
source = "words"
dataset = "copy"
[policies.a]
model = "m"
"""


def config_of(**policies: dict[str, Any]) -> RunConfig:
    return word_run(policies)


def chosen(resolved: Resolved) -> dict[str, Any]:
    return {choice.key: choice.value for choice in resolved.choices}


def loaded(folder: Path, more: str) -> Resolved:
    path = folder / "run.toml"
    path.write_text(RUN + more)
    return load_resolved(path)


def test_on_a_cpu_nothing_is_chosen():
    config = config_of(a={}, b={"rollout": {"engine": "vllm"}})
    assert by_device(config) == Resolved(config, ())
    assert by_size(config, {"a": 4_000_000, "b": 0}) == Resolved(config, ())


def test_on_a_gpu_learner_and_engine_compute_in_bfloat16():
    """The embedded engine, a server, and a teacher without a learner; a policy on cores beside them stays as it is."""
    config = config_of(
        a={"device": "cuda"},
        b={"device": "cuda", "rollout": {"engine": "sglang"}},
        teacher={"device": "cuda", "frozen": True},
        cores={},
    )
    resolved = by_device(config)
    a, b, teacher = (resolved.config.policies[name] for name in ("a", "b", "teacher"))
    for learner in (a.learner, b.learner):
        assert (learner.precision, learner.attention_kernel) == ("bfloat16", "auto")
        assert learner.chunk_logits == GPU_CHUNK_LOGITS
    assert [one.rollout.engine_dtype for one in (a, b, teacher)] == ["bfloat16"] * 3
    assert teacher.learner == config.policies["teacher"].learner
    assert resolved.config.policies["cores"] == config.policies["cores"]
    assert len(resolved.choices) == 4 + 4 + 1
    assert all(choice.why for choice in resolved.choices)


@pytest.mark.parametrize("key", ["precision", "attention_kernel", "chunk_logits", "embedded_dtype", "dtype"])
def test_what_was_given_wins_though_it_is_what_a_cpu_would_have(key: str):
    config = config_of(
        a={
            "device": "cuda",
            "learner": {"precision": "float32", "attention_kernel": "rows", "chunk_logits": 1 << 25},
            "rollout": {"embedded_dtype": "float32"},
        },
        b={"device": "cuda", "rollout": {"engine": "vllm", "server": {"dtype": "float32"}}},
    )
    resolved = by_device(config)
    assert resolved.config.policies["a"] == config.policies["a"]
    assert resolved.config.policies["b"].rollout == config.policies["b"].rollout
    assert not any(choice.key.endswith(f".{key}") and ".a." in choice.key for choice in resolved.choices)


def test_rows_stay_where_float32_was_chosen():
    """The other kernel is for bfloat16 alone."""
    resolved = by_device(config_of(a={"device": "cuda", "learner": {"precision": "float32"}}))
    assert "policies.a.learner.attention_kernel" not in chosen(resolved)


@pytest.mark.parametrize(
    ("keys", "sharding", "num_shards"),
    [
        ({"processes": 4, "hosts": 2}, "shard", 2),
        ({"processes": 2, "hosts": 2}, "replicate", 1),
        ({"processes": 2, "hosts": 2, "shard_size": 2}, "shard", 2),
        ({"processes": 4, "hosts": 2, "shard_size": 4}, "shard", 4),
        ({"processes": 4, "hosts": 2, "sharding": "replicate"}, "replicate", 1),
        ({"processes": 4}, "replicate", 1),
    ],
)
def test_ranks_of_a_host_share_a_copy_where_there_are_several_hosts(tmp_path: Path, keys, sharding: str, num_shards):
    """Unless somebody says otherwise, or each has a host to itself; within one host nothing is chosen."""
    resolved = loaded(tmp_path, f"learner = {{{', '.join(f'{key} = {json.dumps(keys[key])}' for key in keys)}}}\n")
    learner = resolved.config.policies["a"].learner
    assert (learner.sharding, learner.num_shards) == (sharding, num_shards)
    assert ("policies.a.learner.sharding" in chosen(resolved)) == (sharding == "shard")


def test_engines_that_apply_adapters_on_a_gpu_get_those_alone():
    """Of a learner that trains some; whoever wants them merged says so."""
    lora = {"device": "cuda", "learner": {"lora": {}}}
    resolved = by_device(
        config_of(
            a=lora,
            b={"device": "cuda"},
            teacher=lora | {"rollout": {"weights": "files"}},
            cores={"learner": {"lora": {}}},
            server=lora | {"rollout": {"engine": "vllm"}},
            other=lora | {"rollout": {"engine": "sglang"}},
            elsewhere=lora | {"rollout": {"engine": "vllm", "server": {"url": "http://h:1"}}},
        )
    )
    policies = resolved.config.policies
    assert [name for name in policies if policies[name].rollout.weights == "adapters"] == ["a", "server"]
    assert "policies.a.rollout.weights" in chosen(resolved)


@pytest.mark.parametrize(
    ("policy", "allocation", "weights"),
    [
        ({"turns": True, "rollout": {"engine": "vllm"}}, {}, "files"),
        ({"turns": True}, {}, "adapters"),
        ({"rollout": {"engine": "vllm"}}, {"units": ["gpu:0"], "residency": "sleep"}, "files"),
        ({"rollout": {"engine": "vllm"}}, {"units": ["gpu:0"]}, "adapters"),
    ],
)
def test_a_server_that_sleeps_gets_merged_weights(policy, allocation, weights):
    """Asleep vLLM has none for adapters to lie on; whoever left the key out is not refused for a value of mrl's own."""
    tables = {
        "run": {"name": "r", "steps": 3},
        "tasks": {"copy": {"source": "words", "dataset": "copy"}},
        "policies": {"a": {"model": "m", "device": "cuda", "learner": {"lora": {"rank": 4}}, **policy}},
        "allocation": allocation,
    }
    config = resolve(tables, [], where="test").config
    assert config.policies["a"].rollout.weights == weights


def test_rules_are_held_against_what_was_chosen(tmp_path: Path):
    """A kernel for bfloat16 needs no word on it; a choice is none that anybody can be blamed for."""
    more = 'device = "cuda"\nlearner = { attention_kernel = "varlen" }'
    learner = loaded(tmp_path, more).config.policies["a"].learner
    assert (learner.precision, learner.attention_kernel) == ("bfloat16", "varlen")
    with pytest.raises(ConfigError, match="the kernel varlen requires a GPU and bfloat16"):
        loaded(tmp_path, 'learner = { attention_kernel = "varlen" }')


def test_a_number_format_of_the_wrong_engine_is_a_mistake(tmp_path: Path):
    with pytest.raises(ConfigError, match="embedded_dtype: has no effect, because the engine is a server"):
        loaded(tmp_path, 'rollout = { engine = "vllm", embedded_dtype = "bfloat16" }')


def test_limits_grow_with_the_model():
    """Of a policy with its own weights, of the run with the largest; the reason names the arithmetic."""
    server = {"rollout": {"engine": "vllm"}}
    sizes_bytes = {"small": 1_000_000_000, "large": 16_000_000_000}
    resolved = by_size(config_of(small=server, large=server), sizes_bytes)
    config = resolved.config
    assert config.policies["large"].learner.data_timeout_s == 300 + 16 * 20
    assert config.policies["small"].learner.data_timeout_s == 320
    assert config.policies["large"].rollout.server.start_s == 600 + 16 * 30
    assert config.allocation.hung_s == 120 + 16 * 20
    assert (config.allocation.grace_s, config.supervision.silence_s) == (5 + 16, 60 + 16 * 5)
    assert config.supervision.stop_s == 5 + 16 * 10, "a checkpoint of all moments has six times the bytes"
    assert len(resolved.choices) == 2 * len(OF_POLICY) + len(OF_RUN)
    by_key = {choice.key: choice.why for choice in resolved.choices}
    assert by_key["allocation.hung_s"] == "120 s plus 20 s per GB, for 16.0 GB of weights"


def test_an_embedded_engine_gets_no_limits_of_servers():
    """Which its table may not have: what is chosen can be written down and read again."""
    resolved = by_size(config_of(a={}), {"a": 16_000_000_000})
    assert "policies.a.learner.data_timeout_s" in chosen(resolved)
    assert not [key for key in chosen(resolved) if ".server." in key]


def test_limits_that_were_given_stay():
    config = config_of(a={"learner": {"data_timeout_s": 7.0}})
    resolved = by_size(config, {"a": 16_000_000_000})
    assert resolved.config.policies["a"].learner.data_timeout_s == 7.0
    assert "policies.a.learner.data_timeout_s" not in chosen(resolved)


def test_what_was_chosen_is_kept_with_the_run_and_not_chosen_again():
    """A run reads its config.json: another size, as of a folder that grew since, changes nothing."""
    config = by_size(by_device(config_of(a={"device": "cuda"})).config, {"a": 16_000_000_000}).config
    again = RunConfig.model_validate_json(json.dumps(dump_config(config)))
    assert again == config
    assert by_size(by_device(again).config, {"a": 99_000_000_000}) == Resolved(again, ())


def test_the_pages_say_what_is_computed():
    """Every limit that grows with a model stands in its table with its two numbers, and every choice of a device."""
    pages = [
        (Path(__file__).parents[2] / "docs" / name).read_text() for name in ("time-limits.md", "device-defaults.md")
    ]
    rows = dict(re.findall(r"\| `([\w.]+)` \| (\d+ \| \d+) \|", pages[0].replace("policies.X.", "")))
    config = config_of(a={"device": "cuda"}, b={"device": "cuda", "rollout": {"engine": "vllm"}})
    empty = config_of(a={})
    wanted = {".".join(key): (empty.policies["a"], key, per_gb) for key, per_gb in OF_POLICY.items()}
    wanted |= {".".join(key): (empty, key, per_gb) for key, per_gb in OF_RUN.items()}
    for name, (table, key, per_gb) in wanted.items():
        value = table.model_dump()
        for word in key:
            value = value[word]
        assert rows.pop(name) == f"{value:g} | {per_gb:g}"
    assert rows == {"rollout.server.load_s": "60 | 20"}
    for choice in by_device(config).choices:
        key = choice.key.split(".", 2)[2]
        assert f"| `{key}` |" in pages[1]


def test_the_exchange_holds_two_steps_of_long_groups():
    """Of all policies that learn, where that is more than usual; nothing is shared by `independent`."""
    long = {"learner": {"prompts_per_step": 64}, "rollout": {"group_size": 8, "max_new_tokens": 8000}}
    tables = config_of(a=long, b=long, teacher={**long, "frozen": True}, c={}).model_dump(exclude_unset=True)
    tables["policies"]["teacher"].pop("learner")

    def found(regime: str, copd: Any = None, **exchange: int) -> dict[str, Any]:
        parameters = {} if copd is None else {"copd": copd}
        more = {"sharing": {"regime": regime, **parameters}, "exchange": exchange}
        return chosen(by_groups(validate({**tables, **more}, where="test")))

    usual = config_of(c={}).policies["c"]
    of_c = usual.learner.prompts_per_step * usual.rollout.group_size * usual.rollout.max_new_tokens
    bytes_wanted = 17 * 2 * (2 * 64 * 8 * 8000 + of_c)
    (mib,) = found("prp").values()
    assert (mib - 1) * 2**20 < bytes_wanted <= mib * 2**20
    assert list(found("prp")) == ["exchange.budget_mib"]
    assert found("independent") == found("prp", budget_mib=64) == {}
    of_units = math.ceil(bytes_wanted / 17 * (17 + 8 * 8) / 2**20)
    assert list(found("copd", {"top_units": 8}).values()) == list(found("copd").values()) == [of_units]
    for refused_later in (3, {"top_units": "8"}, {"top_units": [8]}):
        assert list(found("copd", refused_later).values()) == [mib]
    assert list(found("copd", {"top_units": 0}).values()) == [mib]
    config = validate({**tables, "sharing": {"regime": "prp"}}, where="test")
    assert by_groups(config).config.exchange.budget_mib == mib
    assert by_groups(config_of(a={}, b={})) == Resolved(config_of(a={}, b={}), ())
