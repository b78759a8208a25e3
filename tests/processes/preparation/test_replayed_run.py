"""The run that another one begins with: what is told of it before anything starts."""

import json
import os
import sys
from pathlib import Path

import pytest

from mrl.config.load import validate
from mrl.config.locks import lock_folder, unlock
from mrl.config.run_folder import dump_config
from mrl.errors import ConfigError, RunFolderError
from mrl.exchange.limits import Limits
from mrl.exchange.record_index import Entry
from mrl.exchange.store import Store
from mrl.exchange.transaction import Transaction
from mrl.plugins import MODULES
from mrl.processes.preparation.learning_values import check_learning, warnings
from mrl.processes.preparation.replayed_run import check_replay, with_replay
from mrl.records.codec import encode
from mrl.records.experience import OutcomeRecord, ValueRecord
from mrl.records.finish import FinishReason
from mrl.records.tags import tags_of
from mrl.records.version import Version

PROMPTS = [f"p{n}" for n in range(40)]


def config_of(folder: Path, replay: dict | None = None, *, regime="sgt", name="new", policies=("a",), **task):
    """A run beside the old one."""
    tables = {
        "run": {"name": name, "folder": str(folder), "steps": 3},
        "tasks": {"trim": {"source": "words", "dataset": "trim"} | task},
        "sharing": {"regime": regime} | ({} if replay is None else {"replay": replay}),
        "policies": {policy: {"model": "m"} for policy in policies},
    }
    return validate(tables, where="t")


def record_of(kind, number, source, prompt_id):
    tags = {
        "record_id": f"r{number}", "source": source, "oldest": Version(0, 1), "newest": Version(0, 1),
        "fingerprint": "f", "prompt_id": prompt_id, "task": "trim", "created_unix_s": 0.0,
    }  # fmt: skip
    if kind == "value":
        return ValueRecord(**tags, rewards=[1.0])
    return OutcomeRecord(**tags, completion=b"y", finish_reason=FinishReason.STOP, verifier="trim", reward=1.0)


@pytest.fixture
def old(tmp_path):
    """Makes the folder of a run that ended, with outcomes of qwen on these prompts and values of llama on all."""

    def make(prompt_ids=PROMPTS, **how):
        folder = tmp_path / "old"
        folder.mkdir()
        config = config_of(tmp_path, name="old", policies=("qwen", "llama"), **how)
        (folder / "config.json").write_text(json.dumps(dump_config(config)))
        told = [("outcome", "qwen", one) for one in prompt_ids] + [("value", "llama", one) for one in PROMPTS]
        told += [("outcome", "replay.older", one) for one in PROMPTS]
        store = Store(folder / "exchange", Limits())
        bodies = [encode(record_of(kind, number, source, one)) for number, (kind, source, one) in enumerate(told)]
        store.commit(Transaction(inserts=[Entry(n, tags_of(body), body) for n, body in enumerate(bodies, 1)]))
        store.close()
        return folder

    return make


def notes_of(config, prompt_ids=PROMPTS):
    """What is told of a replay that is not refused."""
    notes: list[str] = []
    check_replay(config, prompt_ids, notes.append, where="t")
    return notes


def test_a_run_that_shares_the_prompts_passes(tmp_path, old):
    """Without a word; also where prompts are not known yet, and for a regime that reads no such records."""
    folder = old()
    assert notes_of(config_of(tmp_path, {"run": str(folder)})) == []
    assert notes_of(config_of(tmp_path, {"run": str(folder)}), []) == []
    assert notes_of(config_of(tmp_path, {"run": "nowhere"}, regime="rlad")) == []
    assert notes_of(config_of(tmp_path)) == []


def test_no_common_prompt_is_refused_and_few_are_told(tmp_path, old):
    """One in forty is told; none at all would train as without it, unsaid."""
    folder = old(["p0", "q"])
    config = config_of(tmp_path, {"run": str(folder)})
    [note] = notes_of(config)
    assert "that run has records of only 1 of 40 prompts" in note
    with pytest.raises(ConfigError) as caught:
        notes_of(config, PROMPTS[1:])
    assert str(caught.value) == (
        f"t: sharing.replay.run: no prompt of that run is in the pool of this run; got {str(folder)!r}; "
        "wanted a run with the same [tasks] and [pool]: prompts are matched by the hash of their text"
    )


def test_a_run_that_shared_other_kinds_is_refused(tmp_path, old):
    """The line names what is there, and the regime that made it."""
    config = config_of(tmp_path, {"run": str(old()), "policies": ["llama"]})
    with pytest.raises(ConfigError) as caught:
        notes_of(config)
    assert str(caught.value) == (
        "t: sharing.replay.run: that run has no records that the regime sgt reads; got 'value'; wanted records of kind "
        "outcome or episode; cure: set --sharing.regime sgt, as in that run"
    )


def test_a_policy_without_records_is_refused(tmp_path, old):
    """With those that have some, and the one that was meant."""
    config = config_of(tmp_path, {"run": str(old()), "policies": ["qwem"]})
    with pytest.raises(
        ConfigError, match=r"got 'qwem'; wanted one or more of llama, qwen, replay\.older; .*mean 'qwen'\?"
    ):
        notes_of(config)


def test_a_run_that_goes_on_and_the_run_itself_are_refused(tmp_path, old):
    """Its store would be another one tomorrow."""
    folder = old()
    own = config_of(tmp_path, {"run": str(tmp_path / "old" / ".." / "old")}, name="old")
    with pytest.raises(ConfigError, match=r"sharing\.replay\.run: this is the run itself"):
        notes_of(own)
    held = lock_folder(folder, "lock")
    try:
        with pytest.raises(ConfigError, match=r"sharing\.replay\.run: that run is still running"):
            notes_of(config_of(tmp_path, {"run": str(folder)}))
    finally:
        unlock(held)


def test_a_task_that_was_defined_otherwise_is_told(tmp_path, old):
    """Its prompts may be the same and its verdicts others."""
    [note] = notes_of(config_of(tmp_path, {"run": str(old())}, operation="trim"))
    assert "[tasks.trim] differs in that run" in note


@pytest.mark.parametrize("text", ["", "[]", "{", '{"tasks": {"trim": 3}, "sharing": {}}'])
def test_a_folder_that_says_nothing_of_a_run_is_refused(tmp_path, old, text):
    """In one line with the cure."""
    folder = old()
    (folder / "config.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"sharing\.replay\.run: not a run folder .*give the folder of a run"):
        notes_of(config_of(tmp_path, {"run": str(folder)}))


def test_a_configuration_of_another_version_is_read_as_far_as_it_is_known(tmp_path, old, monkeypatch):
    """Keys that either side does not know are no difference, and its folder of modules becomes nobody's."""
    folder = old()
    told = json.loads((folder / "config.json").read_text())
    told["run"] |= {"modules": str(folder), "of_old": 1}
    told["tasks"]["trim"] |= {"of_old": 1}
    del told["tasks"]["trim"]["weight"]
    (folder / "config.json").write_text(json.dumps(told))
    monkeypatch.setenv(MODULES, "/own")
    assert notes_of(config_of(tmp_path, {"run": str(folder)})) == []
    assert os.environ[MODULES] == "/own"
    assert str(folder) not in sys.path


def test_what_is_left_out_is_filled_in(tmp_path, old, monkeypatch):
    """The folder is absolute, and the policies are those that shared there themselves, not what they had replayed."""
    old()
    monkeypatch.chdir(tmp_path)
    filled = with_replay(config_of(tmp_path, {"run": "old"})).sharing["replay"]
    assert (filled["run"], filled["policies"]) == (str(tmp_path / "old"), ["llama", "qwen"])
    named = with_replay(config_of(tmp_path, {"run": "old", "policies": ["replay.older"]})).sharing["replay"]
    assert named["policies"] == ["replay.older"]


def test_a_regime_that_reads_none_has_none(tmp_path):
    """The table may stand beside it, as that of another regime may; it is told, and the run takes nothing over."""
    config = config_of(tmp_path, {"run": "nowhere"}, regime="independent")
    assert with_replay(config).sharing == {"regime": "independent"}
    assert [note for note in warnings(config, {}) if "replay" in note] == [
        "sharing.replay: the regime independent does not read records of a finished run, so none are loaded"
    ]
    assert with_replay(config_of(tmp_path)).sharing == {"regime": "sgt"}


def test_one_policy_may_learn_from_a_run_that_ended(tmp_path):
    """It has nobody else; without a replay, and with a regime that reads none, it is refused as before."""
    check_learning(config_of(tmp_path, {"run": "old"}), where="t")
    for config in (config_of(tmp_path), config_of(tmp_path, {"run": "old"}, regime="rlad")):
        with pytest.raises(ConfigError, match="a is the only policy, so there is no peer to share with"):
            check_learning(config, where="t")
