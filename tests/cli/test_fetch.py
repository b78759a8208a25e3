# ruff: noqa: E501  (the lines of messages are longer than those of code)
"""Models and data by name: from a hub of our own on loopback, by huggingface_hub's real client, into the hub's own cache."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from mrl.config.policy_tables import MakeTable
from mrl.models.make import make_policy
from tests.support.hub_server import TOKEN, Hub, Mood, Repository, serving
from tests.support.pages import ROOT, blocks

ID = "maker/One-2B"
CONFIGURATION = """
run = { name = "named", steps = 1, folder = "runs", min_free_mib = 1 }
sharing = { regime = "independent" }
pool = { train_prompts = 8, held_out_prompts = 2 }
allocation = { slots = 8, floor_slots = 4 }
exchange = { budget_mib = 8 }

[tasks.capital]
source = "words"
dataset = "capital"

[policies.one]
model = "maker/One-2B"
rollout.group_size = 4
rollout.max_new_tokens = 8
learner.prompts_per_step = 2
learner.lr = 1e-3
"""
MARK = "=== ended"
EACH = f"""
import json, sys
from mrl.cli.main import main
# before
for words in json.loads(sys.argv[1]):
    code = main(words)
    for stream in (sys.stdout, sys.stderr):
        print("{MARK}", code, file=stream, flush=True)
"""
ONE = {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
"""What there is to fetch of a policy that the project makes."""


class Pair(NamedTuple):
    """An example."""

    turns: tuple[tuple[str, str], ...]


class Capitals:
    """Examples of nothing much."""

    def draw(self, rng: random.Random, *, practice: bool) -> Pair:
        """One of them."""
        word = "".join(rng.choices("abcde", k=4))
        return Pair(((f"Write {word} in capitals.", word.upper()),))


class Said(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class Desk:
    """A folder with a configuration, a cache of its own, and the hub."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.folder, self.hub, self.cache = folder, hub, folder / "home" / "hub"
        self.config = folder / "named.toml"
        self.config.write_text(CONFIGURATION)

    def mrl(self, *words: str, **more: str) -> Said:
        """Run a command of mrl there, as a user whose hub is ours."""
        return self.each([words], **more)[0]

    def each(self, calls: Sequence[Sequence[str]], *, before: str = "", **more: str) -> list[Said]:
        """Run commands one after another, in one process, for importing takes longer than they do."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        given = {"HF_HOME": str(self.folder / "home"), "HF_ENDPOINT": self.hub.address, "MRL_CACHE": str(self.folder)}
        done = subprocess.run(
            [sys.executable, "-c", EACH.replace("# before", before), json.dumps(calls)],
            cwd=self.folder,
            env=kept | given | more,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        codes = [int(code) for code in re.findall(rf"^{MARK} (\d+)$", done.stdout, re.MULTILINE)]
        outs, errs = (re.split(rf"^{MARK}.*\n", text, flags=re.MULTILINE)[:-1] for text in (done.stdout, done.stderr))
        assert len(codes) == len(calls), done.stderr
        return [Said(*said) for said in zip(codes, outs, errs, strict=True)]

    def snapshot(self, commit: str) -> Path:
        """Where the hub's own tools keep a commit."""
        return self.cache / "models--maker--One-2B" / "snapshots" / commit


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small real policy, made as the project makes them."""
    recipe = MakeTable(
        architecture="qwen3", tokenizer="byte_level", vocab_size=300, hidden_size=16, num_layers=1, num_heads=2,
        warm_start_steps=1, warm_start_batch=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "one"
    make_policy(recipe, Capitals(), folder, on_step=lambda step, loss: None)
    return folder


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


@pytest.fixture
def desk(tmp_path: Path, hub: Hub, model: Path) -> Desk:
    """The hub has the model, and beside it what no policy needs."""
    unwanted = {"pytorch_model.bin": b"PK", "one.gguf": b"GGUF", "modeling_one.py": b"print()", "README.md": b"# One"}
    hub.add(ID, model, more=unwanted)
    return Desk(tmp_path, hub)


def test_only_what_a_policy_needs_is_fetched_and_only_once(desk: Desk, hub: Hub) -> None:
    """Code, other formats and pictures stay where they are; the second call asks and fetches nothing."""
    said = desk.mrl("fetch", "named.toml")
    commit = hub.repositories[ID].refs["main"]
    assert said.code == 0, said.err
    assert f"one: {ID}@{commit}: {desk.snapshot(commit)}" in said.out
    assert re.search(rf"fetching {ID}@{commit}: (\d) of \1 files, [\d.]+ [kM]B, into", said.out)
    assert set(hub.fetched) >= ONE
    assert not {name for name in hub.fetched if name.endswith((".bin", ".gguf", ".py", ".md"))}
    assert len(set(hub.fetched)) == len(hub.fetched) == len(list(desk.snapshot(commit).iterdir()))
    hub.asked.clear()
    assert desk.mrl("fetch", "named.toml").code == 0
    assert hub.fetched == []


def test_the_example_of_the_page_is_what_happens(desk: Desk, hub: Hub, model: Path) -> None:
    """Its policy is fetched from the hub, and its lines are those that are shown."""
    page = (ROOT / "docs" / "models-by-name.md").read_text()
    (policy,), (command, shown) = blocks(page, "toml"), blocks(page, "")
    head = CONFIGURATION.partition("[policies.one]")[0]
    (desk.folder / "mine.toml").write_text(head + policy + "\nrollout.group_size = 4\n")
    hub.add("Qwen/Qwen3-0.6B", model)
    said = desk.mrl(*command.split()[1:])
    assert said.code == 0, said.err
    commit = hub.repositories["Qwen/Qwen3-0.6B"].refs["main"]
    first, file, _, last = shown.splitlines()
    told = said.out.replace(commit, "COMMIT").replace(str(desk.cache), "/home/me/.cache/huggingface/hub").splitlines()
    assert sizeless(told[0]) == sizeless(first)
    assert sizeless(file) in map(sizeless, told)
    assert told[-1] == last


def sizeless(line: str) -> str:
    """Without numbers of files and bytes."""
    return re.sub(r"\b[\d.]+(?= of| files|/| [kMG]B)|[kMG]B|(?<=/)\d+(?= )", "N", line)


@pytest.mark.thorough
def test_check_shows_id_commit_and_folder_and_writes_nothing(desk: Desk, hub: Hub) -> None:
    """Before it is there with the command that gets it, then with the folder; never by writing into the cache."""
    commit = hub.repositories[ID].refs["main"]
    before = desk.mrl("check", "named.toml")
    assert before.code == 0, before.err
    assert f"\nmodel       one: {ID}@{commit} (to be fetched) in {desk.snapshot(commit)}\n" in before.out
    assert "    mrl fetch named.toml" in before.out
    assert not desk.cache.exists()
    assert hub.fetched == []
    desk.mrl("fetch", "named.toml")
    after = desk.mrl("check", "named.toml", "--policies.one.model_revision", "main")
    assert f"\nmodel       one: {ID}@{commit}, main now (fetched) in {desk.snapshot(commit)}\n" in after.out
    assert "still needed" not in after.out


def test_a_revision_is_a_branch_a_tag_or_a_commit(desk: Desk, hub: Hub, model: Path) -> None:
    """Each gets its own commit, which the cache keeps beside the others."""
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    first = hub.repositories[ID].refs["main"]
    second = hub.repositories[ID].commit(files | {"generation_config.json": b"{}"}, "main", "v2")
    asked = {"model_revision=v2": second, f"model_revision={first}": first, "model_revision=": second}
    asked |= {f"model={ID}@{first}": first}
    calls = [["fetch", "named.toml", f"--policies.one.{key}"] for key in asked]
    for commit, said in zip(asked.values(), desk.each(calls), strict=True):
        assert f"one: {ID}@{commit}: " in said.out, said.err


@pytest.mark.slow
@pytest.mark.thorough
def test_without_a_network_the_last_fetch_counts(desk: Desk, hub: Hub) -> None:
    """By a branch as by a commit; and what was never fetched is one line with the command."""
    cold = desk.mrl("train", "named.toml", HF_HUB_OFFLINE="1")
    assert cold.code == 2
    assert cold.err.splitlines() == [
        f"mrl: error: policies.one.model = '{ID}': no such folder here, and the model {ID} of the hub is not on"
        " this machine; got 'HF_HUB_OFFLINE is set'; cure: mrl fetch named.toml on a host with network access and the"
        " same HF_HOME"
    ]
    assert not (desk.folder / "runs").exists()
    desk.mrl("fetch", "named.toml")
    hub.asked.clear()
    commit = hub.repositories[ID].refs["main"]
    warm = desk.mrl("check", "named.toml", HF_HUB_OFFLINE="1")
    assert f"{ID}@{commit} (fetched) in " in warm.out
    assert "the hub is not available (HF_HUB_OFFLINE is set); using what was fetched last, if any" in warm.out
    again = desk.mrl("fetch", "named.toml", HF_HUB_OFFLINE="1")
    assert (again.code, again.err) == (0, "")
    assert (
        f"the hub is not available (HF_HUB_OFFLINE is set); using {ID}@{commit}, which was fetched before" in again.out
    )
    assert f"one: {ID}@{commit}: {desk.snapshot(commit)}" in again.out
    assert hub.asked == []
    (desk.snapshot(commit) / "model.safetensors").unlink()
    lacking = desk.mrl("fetch", "named.toml", HF_HUB_OFFLINE="1")
    assert lacking.code == 2
    assert f"the model {ID}@{commit} of the hub is not on this machine; got 'HF_HUB_OFFLINE is set'" in lacking.err


def test_a_hub_that_nobody_reaches_is_named(desk: Desk) -> None:
    """The network may be away without anybody having said so."""
    with serving() as gone:
        address = gone.address
    said = desk.mrl("fetch", "named.toml", HF_ENDPOINT=address)
    assert said.code == 2
    assert f"is not on this machine; got '{address} cannot be reached (ConnectError)'; cure: mrl fetch" in said.err


REFUSED: dict[Mood, str] = {
    "gated": r"the model maker/One-2B is gated.*cure: request access at http://127.*`hf auth login` or set HF_TOKEN",
    "private": r"no such folder here, and no model maker/One-2B on the hub.*cure: check the name; if it is private",
    "damaged": r"(model\.safetensors|tokenizer\.json) of .* has a wrong checksum after the download; wanted '?[0-9a-f]{64}",
    "short": r"the download of the model maker/One-2B.* is incomplete; got .*cure: mrl fetch named\.toml; it resumes the download",
    "busy": r"the hub failed to deliver the model .*; got 'HTTP 503 from http.*cure: mrl fetch named\.toml later",
}


@pytest.mark.thorough
@pytest.mark.parametrize(("mood", "line"), REFUSED.items(), ids=list(REFUSED))
def test_what_the_hub_refuses_is_one_line(desk: Desk, hub: Hub, mood: Mood, line: str) -> None:
    """Of each the reason and the cure; and when the hub gives in, the fetch goes on to its end."""
    hub.repositories[ID].mood = mood
    said = desk.mrl("fetch", "named.toml")
    assert (said.code, said.err.count("\n")) == (2, 1), said.err
    assert re.search(rf"mrl: error: policies\.one\.model = '{ID}': .*{line}", said.err), said.err
    token = {"HF_TOKEN": TOKEN} if mood in ("gated", "private") else {}
    hub.repositories[ID].mood = mood if token else "open"
    assert desk.mrl("fetch", "named.toml", **token).code == 0


def test_a_repository_without_safetensors_is_refused_before_anything_is_fetched(desk: Desk, hub: Hub) -> None:
    """Weights of torch are code that would be run."""
    repository = hub.repositories[ID]
    files = dict(repository.commits[repository.refs["main"]])
    del files["model.safetensors"]
    repository.commit(files)
    said = desk.mrl("fetch", "named.toml")
    assert said.code == 2
    assert "has no safetensors weights; got 'one.gguf, pytorch_model.bin'; wanted model.safetensors" in said.err
    assert hub.fetched == []


MISTAKEN = {
    "--policies.one.model=maker/Two": "no such folder here, and no model maker/Two on the hub",
    "--policies.one.model_revision=v9": f"the model {ID} has no such revision; got 'v9'; wanted a branch",
    "--policies.one.model=. --policies.one.model_revision=v2": "only a model from the hub has a revision",
    f"--policies.one.model=. --policies.one.source={ID} --policies.one.model_revision=v2": (
        "policies.one.model_revision: only a model from the hub has a revision; got \"'v2', and model = '.', an"
        ' existing folder"; wanted the hub id of a model, or no revision'
    ),
    f"--policies.one.model={ID}@main --policies.one.model_revision=v2": (
        f"policies.one.model_revision: not the revision that stands after the model id; got \"'v2', and '{ID}@main'\";"
        " wanted the revision in only one of the two places"
    ),
    "--policies.one.revision=v2": "did you mean policies.one.model_revision?",
}


def test_mistaken_names_are_one_line(desk: Desk) -> None:
    """A model, a revision and a key that there are not, and a revision where it means nothing."""
    calls = [["fetch", "named.toml", *words.split()] for words in MISTAKEN]
    for line, said in zip(MISTAKEN.values(), desk.each(calls), strict=True):
        assert (said.code, said.err.count("\n")) == (2, 1), said.err
        assert line in said.err
    assert not desk.cache.exists()


def test_shards_are_those_of_the_index(desk: Desk, hub: Hub) -> None:
    """A second copy of the weights beside them, as some repositories have it, is left where it is."""
    repository = hub.repositories[ID]
    files = dict(repository.commits[repository.refs["main"]])
    weights = files.pop("model.safetensors")
    index = b'{"weight_map": {"a": "model-1-of-1.safetensors"}}'
    repository.commit(
        files
        | {"model-1-of-1.safetensors": weights, "model.safetensors.index.json": index, "consolidated.safetensors": b"x"}
    )
    assert desk.mrl("fetch", "named.toml").code == 0
    assert "model-1-of-1.safetensors" in hub.fetched
    assert "consolidated.safetensors" not in hub.fetched
    repository.commit(files | {"model.safetensors.index.json": index.replace(b"model-1", b"../../../evil")})
    said = desk.mrl("fetch", "named.toml")
    assert said.code == 2
    assert "names files that the repository does not have" in said.err


def test_a_disk_without_room_is_refused_before_anything_is_fetched(desk: Desk, hub: Hub) -> None:
    """By what the hub says of the files; a full disk on the way is told likewise."""
    before = "import shutil; shutil.disk_usage = lambda where: shutil._ntuple_diskusage(9, 9, 1000)"
    (said,) = desk.each([["fetch", "named.toml"]], before=before)
    assert said.code == 2
    assert "not enough free disk space in " in said.err
    assert "got '1.0 kB free'" in said.err
    assert hub.fetched == []


@pytest.mark.system
def test_a_run_is_pinned_to_the_commit_and_goes_on_with_it(desk: Desk, hub: Hub, model: Path) -> None:
    """Fetched before any process starts, kept in config.json, and kept by a resumption after the branch moved on."""
    first = hub.repositories[ID].refs["main"]
    said = desk.mrl("train", "named.toml")
    assert said.code == 0, said.out + said.err
    assert said.out.index(f"fetching {ID}@{first}") < said.out.index("run folder ")
    table = json.loads((desk.folder / "runs" / "named" / "config.json").read_text())["policies"]["one"]
    assert (table["model"], table["source"]) == (str(desk.snapshot(first)), f"{ID}@{first}")
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    second = hub.repositories[ID].commit(files | {"generation_config.json": b"{}"})
    said = desk.mrl("train", "named.toml", "--resume", "--run.steps=2")
    assert said.code == 0, said.out + said.err
    assert second not in said.out
    assert not desk.snapshot(second).exists()
    said = desk.mrl("train", "named.toml", "--resume", "--run.steps=3", f"--policies.one.model_revision={second}")
    assert said.code == 2
    assert (
        f"policies.one.model: differs from the value in the run; got '{ID}@{second}'; wanted '{ID}@{first}'" in said.err
    )
    exported = desk.mrl("export", "runs/named", "--policy", "one", HF_HUB_OFFLINE="1")
    assert exported.code == 0, exported.err
    assert f"- trained from: {ID}@{first}" in (Path(exported.out.strip()) / "README.md").read_text()


ROWS = """
run = { name = "rows", steps = 1, folder = "runs", min_free_mib = 1 }
sharing = { regime = "independent" }
pool = { train_prompts = 0, held_out_prompts = 0 }

[tasks.sums]
source = "jsonl"
dataset = "maker/sums"
options = { subset = "main", held_out = "test", prompt_key = "question", reference_key = "answer" }

[policies.one]
model = "maker/One-2B"
"""
CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
---
"""


@pytest.fixture
def data(desk: Desk, hub: Hub) -> Repository:
    """A data set with two splits, and beside it what no task reads."""
    lines = [json.dumps({"question": f"{n} + {n}", "answer": str(2 * n)}).encode() + b"\n" for n in range(60)]
    hub.repositories["maker/sums"] = repository = Repository()
    files = {"README.md": CARD.encode(), "main/train-0.jsonl": b"".join(lines[:40]), "load.py": b"print()"}
    repository.commit(files | {"main/test-0.jsonl": b"".join(lines[40:]), "other/train-0.jsonl": lines[0]})
    (desk.folder / "rows.toml").write_text(ROWS)
    return repository


@pytest.mark.thorough
def test_a_data_set_by_name_is_pinned_and_the_splits_that_are_read_are_fetched(
    desk: Desk, hub: Hub, data: Repository
) -> None:
    """Its README says which files that are; other files stay where they are, and a branch that moves on is asked of."""
    commit = data.refs["main"]
    before = desk.mrl("check", "rows.toml")
    assert before.code == 0, before.err
    assert (
        f"\ndata        sums: maker/sums@{commit} (to be fetched) in {desk.cache}/datasets--maker--sums" in before.out
    )
    assert "tasks.sums: the data set maker/sums@" in before.out
    assert hub.fetched == []

    said = desk.mrl("fetch", "rows.toml")
    assert said.code == 0, said.err
    assert f"sums: maker/sums@{commit} (fetched) in {desk.cache}/datasets--maker--sums/snapshots/{commit}" in said.out
    assert [name for name in hub.fetched if name.endswith((".jsonl", ".md", "load.py"))] == [
        "README.md", "train-0.jsonl", "test-0.jsonl",
    ]  # fmt: skip

    hub.asked.clear()
    data.commit({"README.md": CARD.encode(), "main/train-0.jsonl": b"{}\n", "main/test-0.jsonl": b"{}\n"}, "main")
    offline, pinned = desk.each([["check", "rows.toml"]], HF_HUB_OFFLINE="1"), ["--tasks.sums.revision", commit]
    assert f"maker/sums@{commit} (fetched)" in offline[0].out, offline[0].err
    assert "prompts     40 to train on, 20 held out" in offline[0].out
    again = desk.mrl("check", "rows.toml", *pinned)
    assert f"maker/sums@{commit} (fetched)" in again.out, again.err
    assert hub.fetched == []


@pytest.mark.thorough
def test_mistaken_names_of_data_are_one_line(desk: Desk, data: Repository) -> None:
    """A data set, a revision, a split, a subset that do not exist; a revision of a file."""
    mistakes = {
        ("check", "--tasks.sums.dataset", "maker/smus"): "tasks.sums.dataset = 'maker/smus': no such folder here, and no data set maker/smus",
        ("check", "--tasks.sums.revision", "v9"): "the data set maker/sums has no such revision; got 'v9'",
        ("fetch", "--tasks.sums.options.held_out", "tset"): "tasks.sums: options.split: the data set has no split 'tset'; got 'test, train'",
        ("fetch", "--tasks.sums.options.subset", "mian"): "tasks.sums: options.subset: the data set has no subset 'mian'; got 'main'",
        ("check", "--tasks.sums.dataset", "a.jsonl", "--tasks.sums.revision", "v1"): "tasks.sums.revision: only a data set from the hub has a revision",
    }  # fmt: skip
    calls = [[command, "rows.toml", *more] for command, *more in mistakes]
    for line, said in zip(mistakes.values(), desk.each(calls), strict=True):
        assert said.code == 2, said.out
        assert line in said.err
        assert said.err.count("\n") == 1


@pytest.mark.thorough
def test_a_data_file_that_breaks_off_is_fetched_anew(desk: Desk, hub: Hub, data: Repository) -> None:
    """What has not come is missing, whatever else of the data set is here."""
    desk.mrl("fetch", "rows.toml")
    file = desk.cache / "datasets--maker--sums" / "snapshots" / data.refs["main"] / "main" / "test-0.jsonl"
    file.unlink()
    hub.asked.clear()
    assert "(to be fetched)" in desk.mrl("check", "rows.toml").out
    assert "(fetched)" in desk.mrl("fetch", "rows.toml").out
    assert file.is_file()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_fetches_its_data_set_before_it_starts(desk: Desk, hub: Hub, data: Repository) -> None:
    """Into an empty cache, with its model; the run's configuration has the commit of both."""
    before = "import mrl.cli.train as train; train._supervise = lambda *_: 0"
    (said,) = desk.each([["train", "rows.toml"]], before=before)
    assert said.code == 0, said.out + said.err
    assert {"train-0.jsonl", "test-0.jsonl"} <= set(hub.fetched)
    kept = json.loads((desk.folder / "runs" / "rows" / "config.json").read_text())
    assert kept["tasks"]["sums"]["commit"] == data.refs["main"]


@pytest.mark.thorough
def test_an_evaluation_fetches_the_data_set_of_its_configuration(desk: Desk, data: Repository) -> None:
    """As it fetches a model by name; the result tells the commit."""
    words = ["eval", ID, "--config", "rows.toml", "--prompts", "2", "--max-new-tokens", "2", "--out", "told.json"]
    said = desk.mrl(*words)
    assert said.code == 0, said.err
    assert f"fetching maker/sums@{data.refs['main']}" in said.err
    assert data.refs["main"] in (desk.folder / "told.json").read_text()


DISK_FULL = """
from mrl.processes.preparation import hub
get = hub._download
def until_full(name, file, *given, **more):
    if file == "main/train-1.jsonl":
        raise OSError(28, "No space left on device")
    return get(name, file, *given, **more)
hub._download = until_full
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_a_fetch_that_broke_off_between_two_files_of_a_split_goes_on(desk: Desk, hub: Hub, data: Repository) -> None:
    """Whose names do not say how many there are; of what others put there, what is there counts."""
    files = data.commits[data.refs["main"]]
    commit = data.commit(files | {"main/train-1.jsonl": b'{"question": "1", "answer": "2"}\n'})
    order = ["README.md", "main/test-0.jsonl", "main/train-0.jsonl", "main/train-1.jsonl"]
    data.commits[commit] = {name: data.commits[commit][name] for name in order}
    (said,) = desk.each([["fetch", "rows.toml", "--tasks.sums.options.held_out="]], before=DISK_FULL)
    assert said.code == 2, said.out
    assert "train-0.jsonl" in hub.fetched
    keys = ["rows.toml", "--tasks.sums.options.held_out="]
    assert "(to be fetched)" in desk.mrl("check", *keys, HF_HUB_OFFLINE="1", HF_ENDPOINT=hub.address).out
    hub.asked.clear()
    fetched, found = desk.each([["fetch", *keys], ["check", *keys]])
    assert fetched.code == 0, fetched.err
    assert hub.fetched == ["train-1.jsonl"]
    assert "(fetched)" in found.out
    shutil.rmtree(desk.cache / "datasets--maker--sums" / "mrl")
    assert "(fetched)" in desk.mrl("check", *keys).out
