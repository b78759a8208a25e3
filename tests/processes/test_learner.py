"""A learner that runs out of memory ends with one line: whose model it was, and the settings that need less."""

import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.config.load import validate
from mrl.config.run_folder import RunFolder
from mrl.config.schema import NO_EVALUATION, RunConfig
from mrl.errors import DeviceError, RunFolderError
from mrl.learner.references import CanaryReferences
from mrl.metrics.telemetry import Telemetry
from mrl.objectives.specs import Imitation
from mrl.processes import learner as learner_role
from mrl.records.version import Version
from mrl.sharing.recorder import SharingRecorder
from mrl.sharing.regime import Component
from mrl.transport.grants import Grant
from mrl.transport.keys import create_keys
from tests.support.word_runs import word_run

TOO_MANY_BYTES = 1 << 50
FIRST_RANK = learner_role._first_rank


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tiny_model: Any, tmp_path: Path) -> RunConfig:
    """That of a learner with a real model in a real trainer, and nobody to speak to."""
    regime = SimpleNamespace(components=(Component("own", Imitation(), 1.0, "rows", "own"),))
    for name, value in {
        "role_runtime.stop_event": threading.Event,
        "role_runtime.connect_telemetry": lambda *_: Telemetry("learner/qwen", "qwen", lambda record: True),
        "own_receiver": lambda _: None,
        "sharing_context": lambda *_: None,
        "build_regime": lambda *_: regime,
        "read_policy": lambda *_: tiny_model(),
        "_first_rank": lambda *_, **__: None,
        "_canary": lambda _config, _policy, trainer, _first: CanaryReferences(trainer, [[3, 5, 9, 2, 7]]),
    }.items():
        monkeypatch.setattr(f"{learner_role.__name__}.{name}", value)
    tables = {
        "run": {"name": "r", "steps": 1},
        "tasks": {"trim": {"source": "words", "dataset": "trim"}},
        "policies": {"qwen": {"model": str(tmp_path / "qwen"), "learner": {"processes": 1, "precision": "bfloat16"}}},
    }
    return validate(tables, where="test")


def learn(config: RunConfig, folder: Path) -> int:
    with ExitStack() as closing:
        return learner_role._learn(config, RunFolder(folder), closing, "qwen", "learner/qwen")


@pytest.mark.parametrize(
    ("planted", "during"),
    [
        ("mrl.learner.trainer.place", "at the start of the learner"),
        ("mrl.learner.training_loop.check_forward", "at the start of the learner"),
        ("mrl.learner.training_loop.Learner._publish", "in a step"),
        ("mrl.learner.training_loop.Learner._step", "in a step"),
    ],
)
def test_memory_that_runs_out_ends_a_learner_with_its_cures(
    monkeypatch: pytest.MonkeyPatch, config: RunConfig, tmp_path: Path, planted: str, during: str
) -> None:
    """Wherever it does; the cures are those of the memory plan that the policy has not taken yet."""
    monkeypatch.setattr(planted, lambda *_, **__: torch.empty(TOO_MANY_BYTES))
    with pytest.raises(DeviceError) as caught:
        learn(config, tmp_path)
    line = str(caught.value)
    assert line.startswith(f"policies.qwen ({tmp_path / 'qwen'}): out of memory {during}; got ")
    assert (
        "cure: set some of learner.microbatch_tokens = 2048, "
        "learner.activation_checkpointing = true, learner.optimizer_dtype" in line
    )
    assert line.endswith("`mrl check CONFIG` shows the memory that each process needs")


@pytest.mark.parametrize(("every", "evaluates"), [(NO_EVALUATION, False), (0, True)])
def test_a_learner_that_never_evaluates_has_neither_books_nor_a_plan(
    monkeypatch: pytest.MonkeyPatch, config: RunConfig, tmp_path: Path, every: int, evaluates: bool
) -> None:
    """Nobody looks at what could be due, in any step."""
    monkeypatch.setattr(f"{learner_role.__name__}._connect_allocator", lambda *_: None)
    monkeypatch.setattr(f"{learner_role.__name__}._canary_prompts", lambda *_: [])
    pool = config.pool.model_copy(update={"train_prompts": 8, "held_out_prompts": 4})
    evaluation = config.evaluation.model_copy(update={"every": every})
    config = config.model_copy(update={"pool": pool, "evaluation": evaluation, "sharing": {"regime": "independent"}})
    folder = RunFolder(tmp_path)
    folder.endpoints.mkdir(parents=True)
    create_keys(folder.keys, [Grant("worker", "qwen")])
    telemetry = Telemetry("learner/qwen", "qwen", lambda record: True)
    with ExitStack() as closing:
        regime, context = SimpleNamespace(), SimpleNamespace(recorder=SharingRecorder(), renderer=None, voted=())
        life = learner_role._Life(config, folder, "qwen", telemetry, closing)
        first = FIRST_RANK(life, regime, context, start=Version(0, 0), checkpoint=None, courier=None)
    assert (first.evaluations is not None, first.intake._held_out is not None) == (evaluates, evaluates)


def test_a_learner_with_memory_enough_ends_as_it_would(config: RunConfig, tmp_path: Path) -> None:
    """Without planted faults the same learner starts, gets no order, and says that it was stopped early."""
    assert learn(config, tmp_path) == learner_role.STOPPED_EARLY


@pytest.fixture
def together(tmp_path: Path) -> RunConfig:
    """Of policies that step together; both have lived."""
    policy = {"learner": {"processes": 1}}
    config = word_run({"a": policy, "b": policy}, run={"steps": 20, "sync": True, "folder": str(tmp_path)})
    folder = RunFolder(tmp_path / "r")
    (tmp_path / "r" / "lives").mkdir(parents=True)
    for name in "ab":
        folder.lives(name).begin()
    return config


def save(folder: RunFolder, policy: str, step: int) -> None:
    """As a learner that saved a checkpoint leaves it."""
    (folder.checkpoints(policy) / f"step_{step}").mkdir()
    folder.lives(policy).saved(step)


WORLD = SimpleNamespace(is_first=True, broadcast_bytes=lambda told: told)


def test_policies_that_step_together_begin_again_where_only_one_has_a_checkpoint(
    together: RunConfig, tmp_path: Path
) -> None:
    """What is rolled back is not taken for lost, also by the life after that."""
    folder = RunFolder(tmp_path / "r")
    save(folder, "a", 10)
    for epoch in (1, 2):
        store = learner_role._store(together, folder, "a")
        assert learner_role._start(together, folder, WORLD, store, "a") == (Version(epoch, 0), None)
        assert store.steps() == []


@pytest.mark.parametrize("policy", "ab")
def test_checkpoints_outlive_the_loss_of_those_of_a_peer(together: RunConfig, tmp_path: Path, policy: str) -> None:
    """The run is refused by whichever learner starts first; no life is counted, and nothing is deleted."""
    folder = RunFolder(tmp_path / "r")
    save(folder, "a", 10)
    folder.lives("b").saved(10)  # and its folder is gone
    store = learner_role._store(together, folder, policy)
    with pytest.raises(RunFolderError) as caught:
        learner_role._start(together, folder, WORLD, store, policy)
    assert str(caught.value) == (
        f"{folder.checkpoints('b')}: all checkpoints of b are missing; the newest one was of step 10; "
        "cure: restore one, or start all policies from scratch, because they step together: "
        "--resume --policy-from-start a --policy-from-start b"
    )
    assert (folder.checkpoints("a") / "step_10").is_dir()
    assert (folder.lives("a").saved_step, folder.lives("a").begin(), folder.lives("b").begin()) == (10, 1, 1)
