"""`mrl check` on runs whose models, data or GPUs are still to be fetched, and on the configurations of papers."""

import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from mrl.cli.main import main
from mrl.config.load import load_config
from mrl.gateway.agent_network import described_network
from mrl.memory_plan.needs import MIB
from mrl.memory_plan.run_memory import by_device, memory_plan, too_little
from mrl.processes.planning.placement import least_gpus, most_gpus
from mrl.processes.planning.plan import build_plan
from mrl.processes.preparation.completion import complete
from tests.support.model_folders import write_model

ROOT = Path(__file__).parents[2]
PAPERS = sorted((ROOT / "configs" / "paper").glob("*.toml"))
FEW = ["--pool.train_prompts", "16", "--pool.held_out_prompts", "8", "--run.min_free_mib", "1"]

CONFIG = """
[run]
name = "far"
steps = 2
folder = "{folder}/runs"
[pool]
train_prompts = 0
held_out_prompts = 0
[tasks.sums]
source = "math"
dataset = "{folder}/sums.jsonl"
get = "fetch the sums"
[policies.one]
model = "{folder}/one"
source = "maker/One-2B"
device = "cuda"
rollout = {{ workers = 2 }}
[policies.two]
model = "{folder}/two"
source = "maker/Two-1B"
device = "cuda"
learner = {{ processes = 2 }}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two policies on GPUs and a file of sums; nothing of it is there."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = tmp_path / "far.toml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


def fetch(folder: Path) -> None:
    """What the commands that `mrl check` names would fetch, at a glance."""
    rows = [json.dumps({"problem": f"{n} + {n} = ?", "answer": str(2 * n)}) for n in range(40)]
    (folder / "sums.jsonl").write_text("\n".join(rows))
    for name in ("one", "two"):
        write_model(folder / name)


def test_check_lists_what_is_still_to_be_fetched(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Models, data and GPUs, each with what gets it; the plan is shown as if they were there."""
    assert main(["check", str(config)]) == 0
    out = capsys.readouterr().out
    assert out.count(f"    mrl fetch {config}\n") == 2
    assert f"policies.one.model = '{tmp_path / 'one'}': the model maker/One-2B is missing" in out
    assert f"policies.two.model = '{tmp_path / 'two'}': the model maker/Two-1B is missing" in out
    assert f"tasks.sums: data file '{tmp_path / 'sums.jsonl'}' does not exist" in out
    assert "fetch the sums" in out
    assert "GPUs: at least 2, best 6; visible on this host: 0" in out
    assert "cuda 1,2" in out, "the two ranks of a learner"


def test_check_plans_gpu_memory_before_the_weights_are_there(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two billion parameters, as the name says: 16 bytes each to train, 4 to sample (served and next); ranks share."""
    main(["check", str(config)])
    told = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("GPU memory"))
    gib = {part.split()[1]: float(part.split()[2]) for part in told.split(": ")[1].split(", ")}
    assert 2e9 * 16 / 2**30 < gib["0"] < 2e9 * 16 / 2**30 + 80
    assert gib["3"] == gib["5"] > 2e9 * 4 / 2**30
    assert 1e9 * 16 / 2**30 < gib["1"] == gib["2"] < gib["0"]


def test_check_tells_what_was_chosen_for_keys_left_out(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the device and by the size that a name says; what was given is not there, and warned of where it is slow."""
    main(["check", str(config), "--policies.one.learner.precision", "float32"])
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if re.match(r"\s*(policies|allocation|supervision|run)\.", line)]
    told = {row[0]: row[1] for row in rows if len(row) > 1}
    assert told["policies.two.learner.precision"] == "bfloat16"
    assert told["policies.two.learner.attention_kernel"] == "auto"
    assert told["policies.one.rollout.embedded_dtype"] == "bfloat16"
    assert "policies.one.learner.attention_kernel" not in told
    assert told["policies.one.learner.data_timeout_s"] == "380"
    assert told["allocation.hung_s"] == "200"
    assert "policies.one.learner.precision: float32 on a GPU is several times slower than bfloat16" in out
    assert "policies.two.learner.precision: float32" not in out


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"processes": 4, "sharding": "shard", "shard_size": 2}, "2 replicas of 2 shards"),
        ({"processes": 8, "hosts": 2}, "2 replicas of 4 shards"),
        ({"processes": 4, "sharding": "shard"}, ""),
        ({"processes": 4}, ""),
    ],
    ids=["within a host", "over hosts", "one copy", "whole on every rank"],
)
def test_check_tells_when_replicas_of_shards_sum_gradients(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, keys: dict, told: str
) -> None:
    """Once for each update, in one line, of learners with such replicas alone."""
    monkeypatch.setattr("mrl.cli.check.memory_plan", lambda *_: [])
    words = [word for key, value in keys.items() for word in (f"--policies.two.learner.{key}", str(value))]
    assert main(["check", str(config), *words]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "sum their gradients with each other" in line]
    assert [line.partition(" shards")[0] + " shards" for line in lines] == (
        [f"policies.two.learner: {told}"] if told else []
    )


def test_check_names_the_setting_that_would_let_a_run_fit(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU of 24 GiB is too small for what one learner needs; the cure is told with what it would need then."""
    monkeypatch.setattr("mrl.cli.check.sizes_mib", lambda gpus: {"0": 24 * 1024.0, "1": 1e6})
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=2**40))
    main(["check", str(config)])
    lines = capsys.readouterr().out.splitlines()
    assert "will not fit into its 24576 MiB" in next(line for line in lines if line.startswith("cuda 0: "))
    (cure,) = [line for line in lines if line.startswith("  cure: policies.one: ")]
    assert re.search(r"set (learner\.\S+ = \S+, )+which (still )?needs \d+ MiB", cure)
    assert not any(line.startswith("cuda 1: ") for line in lines)


SERVERS = ["--policies.one.rollout.engine", "vllm", "--policies.one.rollout.gpus", "2"]


def test_servers_that_lack_gpus_are_told_with_what_would_fit(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks and two servers of two GPUs are seven; five hold one server. Train refuses in one line."""
    monkeypatch.setattr("mrl.cli.check.memory_plan", lambda *_: [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    assert main(["check", str(config), *SERVERS]) == 0
    out = capsys.readouterr().out
    assert "GPUs: at least 7, best 8; visible on this host: 5\n    set policies.one.rollout.workers = 1\n" in out
    assert "weights     one: verified by the canary alone, as parts on 2 GPUs" in out
    assert main(["train", str(config), *SERVERS]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "policies.one.rollout.workers: no GPU is left for the engine, and a server cannot share its GPU" in line


def test_gpus_that_are_shared_are_named(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embedded engines on one GPU with learners: allowed, and said."""
    monkeypatch.setattr("mrl.cli.check.memory_plan", lambda *_: [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert main(["check", str(config)]) == 0
    told = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("GPU GPU-a is shared by"))
    assert "learner/one, learner/two, " in told


def test_a_model_that_a_server_cannot_share_out_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """By what its folder says, before anything starts."""
    fetch(tmp_path)
    shape = {"model_type": "qwen3", "num_attention_heads": 15, "num_key_value_heads": 5, "intermediate_size": 30}
    (tmp_path / "one" / "config.json").write_text(json.dumps(shape))
    assert main(["check", str(config), *SERVERS]) == 2
    assert "one/config.json: vllm cannot split this model evenly" in (line := capsys.readouterr().err)
    assert "wanted one of 1, 5, 15; " in line


SMALL_PASSES = ["--policies.one.learner.activation_checkpointing", "true"]
SMALL_PASSES += ["--policies.one.learner.microbatch_tokens", "320", "--policies.one.rollout.max_new_tokens", "64"]


@pytest.mark.thorough
def test_check_moves_moments_to_where_there_is_room(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of a GPU of 24 GiB into main memory: eight bytes less for each of two billion parameters; and back again.

    On a host that is short of memory no setting is named that would change what is on the GPU alone.
    """

    def told(memory: str, *, gpu_mib: float = 1e6, host_mib: float = 1e6) -> str:
        monkeypatch.setattr("mrl.cli.check.sizes_mib", lambda _: {"0": gpu_mib})
        monkeypatch.setattr("psutil.virtual_memory", lambda: type("M", (), {"total": host_mib * 2**20})())
        main(["check", str(config), *SMALL_PASSES, "--policies.one.learner.optimizer_memory", memory])
        return capsys.readouterr().out

    assert re.search(
        r'one: set learner.optimizer_memory = "host", which needs (1[89]|2[0-2])\d{3} MiB', told("device", gpu_mib=24e3)
    )
    too_small = told("host", host_mib=1024.0)
    small = 'learner.optimizer_dtype = "bfloat16", learner.parameter_dtype = "bfloat16", which still needs '
    assert re.search(
        f'one: set learner.optimizer_memory = "device", {small}' + r"[12][0-9]\d{3} MiB; use more", too_small
    )
    wanted_mib = float(re.findall(r"memory: (\d+) MiB will not fit", too_small)[0])
    enough_without = told("host", host_mib=wanted_mib - 8000)
    assert re.search(r'one: set learner.optimizer_memory = "device", which needs 3[2-5]\d{3} MiB', enough_without)


@pytest.mark.thorough
def test_nothing_is_listed_once_it_is_there(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same check after the fetching."""
    fetch(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert main(["check", str(config)]) == 0
    out = capsys.readouterr().out
    assert "still needed" not in out
    assert "to be fetched" not in out


def test_a_strict_check_ends_with_2_where_the_run_could_not_start_as_it_is(capsys, tmp_path):
    """Here for want of disk; the first line points to what is told at the end."""
    few = ["check", "quickstart", "--run.folder", str(tmp_path), *FEW]
    assert main([*few, "--strict"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("quickstart.toml is valid")

    few[-1] = str(10**9)
    assert main(few) == 0
    assert main([*few, "--strict"]) == 2
    out = capsys.readouterr().out.splitlines()
    assert out[0].endswith("is valid, but the run cannot start here yet: see the end")
    assert re.search(r"run\.folder: .*not enough free disk space.*cure: free some", out[-1])


def test_train_refuses_with_the_one_command_that_helps(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the GPUs, then the data, then the models, which would be fetched; nothing is written."""

    def refusal(lines: int = 1) -> str:
        assert main(["train", str(config)]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == lines
        assert not (tmp_path / "runs").exists()
        return told

    assert "policies.one.device: no GPU is visible on this host" in refusal()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert "sums.jsonl' does not exist; " in (line := refusal())
    assert "cure: fetch the sums" in line
    fetch(tmp_path)
    shutil.rmtree(tmp_path / "one")
    line = "the model maker/One-2B of the hub is not on this machine; got 'HF_HUB_OFFLINE is set'; cure: mrl fetch"
    assert f"{line} {config} on a host with network access" in refusal()


def test_folders_without_a_source_are_listed_together(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody can say what to fetch, and how to say it is told, of all policies."""
    assert main(["check", str(config), "--policies.one.source=", "--policies.two.source="]) == 0
    out = capsys.readouterr().out
    for name in ("one", "two"):
        assert f"{name}': no such folder\n" in out
        assert f'policies.{name}.source = "ORG/NAME"' in out


def test_what_follows_from_a_size_that_nobody_knows_is_not_guessed(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a learning rate nor a length nor memory; a size that stands in a name is believed, and that is said."""
    given = ["--policies.one.source", "maker/Wise-v3", "--policies.two.source", "maker/Small-135M-Instruct"]
    assert main(["check", str(config), *given]) == 0
    out = capsys.readouterr().out
    assert "note: policies.one: the model is not here yet, and its name does not tell its size" in out
    assert "policies.two: the model is not here yet; assuming 0.135B" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.split()}
    assert rows["learner.lr"] == ["learner.lr", "not", "known", "yet", "*", "1e-06", "*"]
    assert rows["rollout.max_new_tokens"][1:] == ["not", "known", "yet", "*", "1024", "*"]
    (learner,) = [line for line in out.splitlines() if line.strip().startswith("learner/one")]
    assert "not known yet" in learner
    assert "MiB and more" in out
    assert "policies.one.learner.lr = " not in out, "no rate is called unusual for a model that nobody knows"


def test_a_given_value_is_shown_whatever_the_size(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only what would follow from the size is unknown."""
    given = ["--policies.one.source", "maker/Wise-v3", "--policies.one.learner.lr", "2e-6"]
    assert main(["check", str(config), *given]) == 0
    assert " 2e-06 " in next(line for line in capsys.readouterr().out.splitlines() if "learner.lr " in line)


@pytest.mark.thorough
@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_configurations_of_papers_pass(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without their models and data, on a machine without GPUs; and train says what to fetch."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["check", str(path), *FEW]) == 0
    out = capsys.readouterr().out
    assert f"{path} is valid" in out
    config = load_config(path)
    for policy in config.policies.values():
        assert f"the model {policy.source} is missing" in out
    assert f"    mrl fetch {path}\n" in out
    assert most_gpus(config) == least_gpus(config) == 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    assert main(["train", str(path), *FEW]) == 2
    assert re.search(r" is (not there|not on this machine|missing)", capsys.readouterr().err)


def test_check_tells_what_agents_reach(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that the run starts."""
    (tmp_path / "my_agents.py").write_text("async def play(client, row): ...\n")
    monkeypatch.setenv("MRL_MODULES", str(tmp_path))
    with config.open("a") as file:
        file.write('[tasks.talk]\nsource = "agent"\ndataset = "my_agents:play"\n')
    assert main(["check", str(config), *FEW]) == 0
    assert f"agents that the run starts can reach {described_network()}\n" in capsys.readouterr().out


CONFIGURATIONS = sorted((ROOT / "configs").rglob("*.toml"))
GPUS_PROMISED = re.compile(r"(\d+) GPUs of (\d+) GB")
HOST_PROMISED = re.compile(r"(\d+) GiB of memory")


@pytest.mark.thorough
@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_a_configuration_needs_no_more_than_it_promises(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many GPUs of that size, as its head says, or so much memory of a machine without: the plan fits into it."""
    head = path.read_text().split("\n[run]")[0]
    gpus, host = GPUS_PROMISED.search(head), HOST_PROMISED.search(head)
    assert gpus or host or path.stem == "mixed_engines", "it says what it runs on"
    monkeypatch.chdir(ROOT)
    config = complete(load_config(path)).config
    names = [str(number) for number in range(int(gpus[1]) if gpus else 0)]
    plan = build_plan(config, path.parent / "run", gpus=names)
    needs = memory_plan(config, plan)
    if gpus:
        room_mib = int(gpus[2]) * 1e9 / MIB
        assert set(by_device(needs)) == set(names), "every GPU has something to do"
        assert list(too_little(config, needs, float("inf"), dict.fromkeys(names, room_mib))) == []
    elif host:
        assert sum(need.host_mib for need in needs) <= 1024 * int(host[1])


def commands_in(path: Path) -> list[list[str]]:
    """The commands in the comment at the head of a configuration; a backslash at the end of a line continues one."""
    head = path.read_text().split("\n[run]")[0].replace("\n#", "\n")
    told = re.findall(r"^ *(?:.*: )?(mrl (?:train|compare) .*)$", re.sub(r"\\\n *", "", head), re.MULTILINE)
    return [shlex.split(line)[1:] for line in told]


COMMANDS = [words for path in PAPERS for words in commands_in(path)]


@pytest.mark.thorough
@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] == "train"], ids=lambda words: words[3])
def test_every_pair_that_a_configuration_names_is_one_command(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it stands in the file, it passes the check and says what to fetch."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["check", *words[1:], *FEW]) == 0
    out = capsys.readouterr().out
    for key in ("model", "source"):
        assert [word for word in words if word.endswith(f".{key}")]
    for source in sources_of(words):
        assert f"the model {source} is missing" in out


def sources_of(words: list[str]) -> set[str]:
    """Where the policies of a command come from."""
    config = load_config(Path(ROOT / words[1]), words[2:])
    return {policy.source for policy in config.policies.values()}


def test_all_six_pairs_of_hacpo_can_be_started() -> None:
    """Three by a file, three by a command on one of the files; each under the alpha and bounds of the paper."""
    files = [["train", str(path)] for path in PAPERS if path.stem.startswith("hacpo")]
    started = {}
    for words in [*files, *(words for words in COMMANDS if "/hacpo" in words[1])]:
        sharing = load_config(ROOT / words[1], words[2:]).sharing["hacpo"]
        names = sorted(source.partition("/")[2].removesuffix("-Instruct") for source in sources_of(words))
        started[tuple(names)] = (sharing["alpha"], sharing["lower"], sharing["lower_step"])
    assert started == {
        ("Qwen3-4B", "Qwen3-4B-Instruct-2507"): (3.0, 0.8, 0.01),
        ("Qwen3-1.7B-Base", "Qwen3-4B-Base"): (1.0, 0.8, 0.025),
        ("Qwen3-4B-Base", "Qwen3-8B-Base"): (3, 0.8, 0.025),
        ("Llama-3.2-1B", "Llama-3.2-3B"): (1.0, 0.9, 0.01),
        ("Llama-3.2-1B", "Qwen3-1.7B-Base"): (1.0, 0.8, 0.025),
        ("Llama-3.2-3B", "Qwen3-4B-Base"): (1.0, 0.8, 0.025),
    }


def test_all_pairs_of_rlad_can_be_started() -> None:
    """Two by a file, the others by a command: student, teacher, and how long answers may be, for both alike."""
    files = [["train", str(path)] for path in PAPERS if path.stem.startswith("rlad")]
    started = []
    for words in [*files, *(words for words in COMMANDS if words[0] == "train" and "/rlad" in words[1])]:
        policies = load_config(ROOT / words[1], words[2:]).policies
        student, teacher = policies["student"], policies["teacher"]
        tokens = student.rollout.max_new_tokens
        assert teacher.frozen
        assert teacher.rollout.max_new_tokens == tokens < student.learner.microbatch_tokens
        assert student.model == "models/" + student.source.partition("/")[2]
        started.append((student.source.partition("/")[2], teacher.source.partition("/")[2], tokens))
    assert sorted(started) == [
        ("DeepSeek-R1-Distill-Qwen-1.5B", "DeepSeek-R1-Distill-Qwen-7B", 8192),
        ("Qwen3-0.6B", "Qwen3-8B", 2048),
        ("Qwen3-0.6B", "Qwen3-8B", 8192),
        ("Qwen3-1.7B", "Qwen3-8B", 2048),
        ("Qwen3-1.7B", "Qwen3-8B", 8192),
        ("Qwen3-1.7B", "Qwen3-8B", 8192),
        ("Qwen3-1.7B-Base", "Qwen3-8B", 30000),
        ("Qwen3-8B-Base", "Qwen3-32B", 30000),
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] == "compare"], ids=lambda words: words[1])
def test_comparisons_that_configurations_name_lack_nothing_but_models(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teacher that the baseline has no use for is no obstacle."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    assert main([*words, *FEW]) == 2
    assert "the model Qwen/Qwen3-" in capsys.readouterr().err
    assert not (ROOT / "runs" / f"compare-{load_config(ROOT / words[1]).run.name}").exists()


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_configurations_of_papers_open_with_what_they_are(path: Path) -> None:
    """What it shows, on what, how long, what to expect, and what of it is inferred."""
    head = path.read_text().split("\n[run]")[0]
    for word in ("Shows", "On", "Takes", "Expect", "Trust"):
        assert f"\n# {word:<9}" in head
    assert "[inferred]" in head
    assert max(map(len, path.read_text().splitlines())) <= 120


@pytest.mark.thorough
@pytest.mark.parametrize("regime", ["independent", "prp", "xgrpo", "sgt", "hacpo", "graft"])
def test_the_math_comparison_runs_under_every_regime(
    regime: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file, one override."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = ROOT / "configs" / "paper" / "mrl_math.toml"
    assert main(["check", str(path), "--sharing.regime", regime, "--run.name", regime]) == 0
    assert f"sharing     {regime}" in capsys.readouterr().out
