"""No version is used twice, and a policy whose checkpoints are gone is told from one that never had any."""

from pathlib import Path

import pytest

from mrl.config.run_folder import RunFolder, create_run_folder
from mrl.config.schema import RunConfig
from mrl.errors import RunFolderError
from tests.support.word_runs import word_run


def config_in(folder: Path, *, sync: bool = False) -> RunConfig:
    run = {"steps": 9, "folder": str(folder), "min_free_mib": 1, "sync": sync}
    return word_run({"a": {}, "b": {}}, run=run)


def saved(folder: RunFolder, policy: str, step: int) -> None:
    """As a learner that saved a checkpoint leaves it."""
    (folder.checkpoints(policy) / f"step_{step}").mkdir(parents=True)
    folder.lives(policy).saved(step)


def test_every_life_has_a_run_epoch_of_its_own(tmp_path: Path) -> None:
    """Whatever was saved in between."""
    folder = RunFolder(tmp_path)
    assert [folder.lives("a").begin() for _ in range(3)] == [0, 1, 2]
    folder.lives("a").saved(6)
    assert folder.lives("a").begin() == 3
    assert (folder.lives("a").saved_step, folder.lives("b").begin()) == (6, 0)


DAMAGES = [None, b"", b"\0\0", b"\xff", b"x", b"-1", b"9" * 400, b"[" * 100_000, b"null", b'{"run_epoch":"1"}']


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["checkpoints/a/run_epoch", "lives/a.json"])
def test_one_of_the_two_files_is_enough(tmp_path: Path, file: str, damage: bytes | None) -> None:
    """The other may be gone, empty, or hold anything else; the next life writes both."""
    lives = RunFolder(tmp_path).lives("a")
    for _ in range(3):
        lives.begin()
    spoil(tmp_path / file, damage)
    assert lives.begin() == 3
    assert [(tmp_path / "checkpoints/a/run_epoch").read_text(), lives.begin()] == ["3", 4]


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_both_a_person_has_to_say_it(tmp_path: Path, damage: bytes | None) -> None:
    """Where anything tells of an earlier life: epoch 0 would be used twice."""
    folder = RunFolder(tmp_path)
    lives = folder.lives("a")
    lives.begin()
    (folder.checkpoints("a") / "step_3").mkdir()
    for file in ("checkpoints/a/run_epoch", "lives/a.json"):
        spoil(tmp_path / file, damage)
    with pytest.raises(
        RunFolderError, match=r"run_epoch: the run epoch of this policy's learner is missing.*cure: write a num"
    ):
        lives.begin()
    (tmp_path / "checkpoints/a/run_epoch").write_text("7\n")
    assert lives.begin() == 8


def test_published_weights_tell_of_an_earlier_life(tmp_path: Path) -> None:
    """All of `checkpoints` and `lives` is gone: workers hold version 0.0 already."""
    folder = RunFolder(tmp_path)
    (folder.weights("a") / "0.0").mkdir(parents=True)
    (folder.weights("a") / "0.0" / "manifest.json").touch()
    with pytest.raises(RunFolderError, match="the run epoch of this policy's learner"):
        folder.lives("a").begin()


def spoil(path: Path, damage: bytes | None) -> None:
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)


def test_a_policy_whose_checkpoints_are_gone_is_refused_and_may_begin_anew(tmp_path: Path) -> None:
    """Its peer would be at step 6 while it trains from step 1; what is left of it is set aside, and nothing deleted."""
    folder = create_run_folder(config_in(tmp_path))
    for policy in ("a", "b"):
        folder.lives(policy).begin()
        saved(folder, policy, 6)
    (folder.checkpoints("a") / "step_6").rmdir()
    with pytest.raises(RunFolderError) as caught:
        create_run_folder(config_in(tmp_path), resume=True)
    assert str(caught.value) == (
        f"{folder.checkpoints('a')}: all checkpoints of a are missing; the newest one was of step 6; "
        "cure: restore one, or start this policy from scratch: --resume --policy-from-start a"
    )
    create_run_folder(config_in(tmp_path), resume=True, from_start=["a"])
    create_run_folder(config_in(tmp_path), resume=True)
    assert folder.lives("a").begin() == 1
    assert (folder.checkpoints("b") / "step_6").is_dir()


def test_policies_that_step_together_begin_anew_together(tmp_path: Path) -> None:
    """The cure that the refusal names is one that is taken."""
    config = config_in(tmp_path, sync=True)
    folder = create_run_folder(config)
    for policy in ("a", "b"):
        folder.lives(policy).begin()
        saved(folder, policy, 6)
    (folder.checkpoints("a") / "step_6").rmdir()
    with pytest.raises(RunFolderError, match=r"scratch.*: --resume --policy-from-start a --policy-from-start b$"):
        create_run_folder(config, resume=True)
    create_run_folder(config, resume=True, from_start=["a", "b"])
    assert (folder.checkpoints("b") / "set_aside_1" / "step_6").is_dir()


def test_damaged_checkpoints_are_set_aside_by_name(tmp_path: Path) -> None:
    """Twice too."""
    folder = create_run_folder(config_in(tmp_path))
    for step in (3, 6):
        folder.lives("a").begin()
        saved(folder, "a", step)
        create_run_folder(config_in(tmp_path), resume=True, from_start=["a"])
    found = sorted(str(path.relative_to(folder.checkpoints("a"))) for path in folder.checkpoints("a").glob("*/*"))
    assert found == ["set_aside_1/step_3", "set_aside_2/step_6"]
    assert folder.lives("a").saved_step == 0


def test_a_run_that_never_saved_is_resumed_as_ever(tmp_path: Path) -> None:
    """It was killed before its first checkpoint."""
    folder = create_run_folder(config_in(tmp_path))
    folder.lives("a").begin()
    create_run_folder(config_in(tmp_path), resume=True)


@pytest.mark.parametrize(
    ("names", "resume", "sync", "said"),
    [
        (["a"], False, False, "requires --resume; cure: add --resume"),
        (["c"], True, False, "not a policy that learns; got 'c'; wanted one of a, b"),
        (
            ["a"],
            True,
            True,
            r"policies of a synchronous run .run\.sync. can only start over together; cure: name all of them: a, b",
        ),
    ],
)
def test_what_cannot_begin_anew_is_refused(
    tmp_path: Path, names: list[str], resume: bool, sync: bool, said: str
) -> None:
    """By name, with what can."""
    config = config_in(tmp_path, sync=sync)
    if resume:
        create_run_folder(config)
    with pytest.raises(RunFolderError, match=f"--policy-from-start.*{said}"):
        create_run_folder(config, resume=resume, from_start=names)


@pytest.mark.parametrize(
    ("together", "cure"), [(False, "--policy-from-start a"), (True, "delete step_6 of every policy")]
)
def test_checkpoints_that_are_all_damaged_are_one_line(tmp_path: Path, together: bool, cure: str) -> None:
    """A mistake that a person cures: restarts would change nothing."""
    line = str(RunFolder(tmp_path).lives("a").all_damaged([6, 3], together=together))
    assert "every checkpoint from which a could resume is damaged; see its log; got 'step_6, step_3'" in line
    assert cure in line
