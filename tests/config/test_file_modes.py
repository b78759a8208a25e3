"""Who may read and write what a run leaves on the disk."""

import os
import stat
from pathlib import Path

import pytest

from mrl.config.file_modes import check_writers, limit_modes
from mrl.config.run_folder import create_run_folder, start_attempt
from mrl.config.schema import RunConfig
from mrl.errors import RunFolderError
from mrl.files import replace_file
from tests.support.word_runs import word_run


def config_of(folder: Path, **run: object) -> RunConfig:
    return word_run({"a": {}}, run={"folder": str(folder), **run})


@pytest.fixture(params=[0o000, 0o002, 0o022])
def mask(request):
    """The mask of a careless user, of one in a group, and the usual one."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize(("shared", "folders", "files"), [(False, 0o700, 0o600), (True, 0o750, 0o640)])
def test_whatever_the_mask_a_run_s_files_are_for_its_user_or_its_group(tmp_path, mask, shared, folders, files):
    """The folder, what is replaced, and what any code below makes; keys stay their owner's."""
    config = config_of(tmp_path, shared_with_group=shared)
    before = limit_modes(config)
    try:
        folder = create_run_folder(config)
        attempt = start_attempt(folder)
        replace_file(folder.endpoints / "a.json", b"{}")
        folder.metrics_jsonl.write_text("")
    finally:
        assert os.umask(before) == 0o777 & ~folders
    assert before == mask
    for path in (folder.path, attempt, folder.crash):
        assert stat.S_IMODE(path.stat().st_mode) == folders
    for path in (folder.config_json, folder.metrics_jsonl, attempt / "config.json", folder.endpoints / "a.json"):
        assert stat.S_IMODE(path.stat().st_mode) == files
    assert stat.S_IMODE(folder.keys.stat().st_mode) == 0o700


def test_a_resume_closes_a_folder_that_was_open_to_readers(tmp_path):
    """As runs of an earlier release are."""
    config = config_of(tmp_path, steps=3)
    folder = create_run_folder(config)
    folder.path.chmod(0o755)

    create_run_folder(config, resume=True)

    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


@pytest.mark.parametrize(("what", "mode"), [("", 0o770), ("", 0o707), ("config.json", 0o660), ("config.json", 0o606)])
def test_a_configuration_that_others_may_write_is_refused(tmp_path, what, mode):
    """By whoever would run what it says: roles, other hosts, a resume."""
    config = config_of(tmp_path, steps=3)
    folder = create_run_folder(config)
    check_writers(folder.path)
    (folder.path / what).chmod(mode)

    with pytest.raises(RunFolderError, match=rf"other users can write to it, .*got '0{mode:o}'.*cure: .*chmod go-w"):
        check_writers(folder.path)
    with pytest.raises(RunFolderError, match="other users can write to it"):
        create_run_folder(config, resume=True)
