"""Pair cards of a run: which pairs, what is measured once, and the process that measures beside a run."""

import json
import os
import sys
from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.config.run_folder import RunFolder, dump_config, write_json
from mrl.config.schema import RunConfig
from mrl.errors import RunFolderError
from mrl.processes.preparation import pair_cards
from mrl.processes.preparation.pair_cards import measured_beside, pairs_of, write_pair_cards
from tests.support.model_folders import write_byte_level


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Few texts, and this process keeps its priority."""
    monkeypatch.setattr("mrl.alignment.pair_card.FLOOR_TEXTS", 60)
    monkeypatch.setattr(
        "mrl.alignment.pair_card.word_frequencies", lambda: (("sun", "hay", "sunny", "12"), [4, 3, 2, 1])
    )
    monkeypatch.setattr(os, "nice", lambda _: 0)


def tokenizer_folder(folder: Path, size: int) -> Path:
    return write_byte_level(folder, ["sun hay sunny 12 12 sunny sun"] * 9, size)


def config_of(models_by_policy: dict[str, Path], regime: str = "prp", frozen: tuple[str, ...] = ()) -> RunConfig:
    policies = {name: {"model": str(path), "frozen": name in frozen} for name, path in models_by_policy.items()}
    tables = {"run": {"name": "r", "steps": 1}, "tasks": {"t": {"source": "words", "dataset": "copy"}}}
    return RunConfig.model_validate(tables | {"sharing": {"regime": regime}, "policies": policies})


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """A run of two tokenizers, three policies."""
    merging, cutting = tokenizer_folder(tmp_path / "m", 300), tokenizer_folder(tmp_path / "c", 257)
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    write_json(folder.config_json, dump_config(config_of({"a": merging, "b": cutting, "c": merging})))
    return folder


def test_every_pair_gets_its_floor(run, capsys):
    """Two tokenizers have one, in both directions; one tokenizer for two policies has nothing to measure."""
    assert main(["align", "floors", str(run.path)]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in paths] == ["pair_card_a_b.json", "pair_card_a_c.json", "pair_card_b_c.json"]
    cards = [json.loads(path.read_text()) for path in paths]
    assert [[d["peer"] + d["receiver"] for d in card["directions"]] for card in cards] == [
        ["ab", "ba"],
        [],
        ["bc", "cb"],
    ]
    stds = [d["floor"]["span_std_nats"] for d in cards[0]["directions"]]
    assert stds[0] == pytest.approx(stds[1])
    assert stds[0] > 0
    assert cards[1]["fingerprints"][0] == cards[1]["fingerprints"][1]


def test_a_card_is_made_once(run, monkeypatch):
    """A second call measures nothing, unless a tokenizer changed or a file is broken."""
    paths = write_pair_cards(run.path)
    made = []
    monkeypatch.setattr("mrl.alignment.pair_card.pair_floors", lambda names, *_: made.append(names) or (None, None))
    assert write_pair_cards(run.path) == paths
    assert made == []
    paths[0].write_text("{")
    card = json.loads(paths[2].read_text())
    paths[2].write_text(json.dumps(card | {"fingerprints": ["other", card["fingerprints"][1]]}))
    assert write_pair_cards(run.path) == paths
    assert made == [("a", "b"), ("b", "c")]


def test_a_folder_without_a_run_is_refused(tmp_path):
    """The mistake is the user's."""
    with pytest.raises(RunFolderError, match="not a run folder"):
        write_pair_cards(tmp_path)


@pytest.mark.parametrize(
    ("regime", "frozen", "pairs"),
    [
        ("prp", (), ["ab", "ac", "bc"]),
        ("rlad", ("b", "c"), ["ab", "ac"]),
        ("xgrpo", (), []),
        ("independent", (), []),
    ],
)
def test_only_pairs_that_are_aligned(tmp_path, regime, frozen, pairs):
    """Two teachers read nothing of each other, and rewards need no tokenizer."""
    config = config_of(dict.fromkeys("abc", tmp_path), regime, frozen)
    assert ["".join(pair) for pair in pairs_of(config)] == pairs


@pytest.mark.parametrize(("regime", "starts"), [("sgt", True), ("independent", False)])
def test_the_process_beside_a_run_ends_with_it(run, tmp_path, monkeypatch, regime, starts):
    """It is started where tokenizers are aligned, and gone when the block is left, done or not."""
    seen = []
    endless = (sys.executable, "-c", "import time; time.sleep(600)")

    def command(pid, argv):
        seen.append(argv)
        return endless

    monkeypatch.setattr(pair_cards, "command", command)
    config, log = config_of({"a": tmp_path}, regime), tmp_path / "log"
    before = children()
    with measured_beside(config, run, log):
        assert len(children() - before) == starts
    assert children() == before
    assert log.exists() == starts
    assert [argv[-3:] for argv in seen] == ([("align", "floors", str(run.path))] if starts else [])


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
