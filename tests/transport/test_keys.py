"""The run's keys on disk: who may read them, what is made when, what is said when they cannot be used."""

import stat
import threading
import traceback

import pytest

from mrl.errors import ConfigError, RunFolderError
from mrl.transport.allow_list import read_entries
from mrl.transport.grants import STANDING_GRANTS, Grant
from mrl.transport.keys import (
    client_file,
    create_keys,
    load_client_keys,
    load_keys,
    make_client_key,
    revoke_client_key,
)

QWEN, LLAMA = Grant("worker", "qwen"), Grant("worker", "llama")


def living(folder):
    """Grants that the allow-list lets in, in order."""
    return [entry.grant for entry in read_entries(folder) if entry.is_living]


def test_loaded_keys_equal_the_created_ones(keys):
    """What was created is what is loaded, on both sides."""
    assert load_keys(keys.folder) == keys
    assert load_client_keys(keys.folder, QWEN).server_public == keys.server_public


def test_every_grant_has_a_pair_of_its_own(keys):
    """The standing roles, and every learner and worker that was asked for."""
    grants = living(keys.folder)
    wanted = {Grant(role, policy) for role in ("learner", "worker") for policy in ("qwen", "llama")}
    assert set(grants) == wanted | set(STANDING_GRANTS)
    pairs = [load_client_keys(keys.folder, grant) for grant in grants]
    assert len({pair.public for pair in pairs} | {pair.secret for pair in pairs}) == 2 * len(grants)
    assert [entry.public for entry in read_entries(keys.folder)] == [pair.public.decode() for pair in pairs]


def test_only_the_owner_can_read_keys(keys):
    """The folder is 0700 and every file 0600, also after a change."""
    revoke_client_key(keys.folder, "worker/qwen")
    make_client_key(keys.folder, QWEN)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in keys.folder.iterdir()}
    assert (stat.S_IMODE(keys.folder.stat().st_mode), modes) == (0o700, {0o600})


@pytest.mark.parametrize("name", ["server.json", "worker.qwen.json", "allowed.json"])
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_can_open_is_refused(keys, name, mode):
    """A secret that others could read is none, a list that others could write keeps nobody out."""
    (keys.folder / name).chmod(mode)
    with pytest.raises(RunFolderError, match=rf"{name}: the file is accessible to other users.*0{mode:o}.*chmod 600"):
        load_keys(keys.folder), load_client_keys(keys.folder, QWEN), read_entries(keys.folder)


def test_secrets_do_not_show(keys):
    """Neither in the printed form, nor in the error about a damaged file, nor in that error's traceback."""
    pair = load_client_keys(keys.folder, QWEN)
    assert keys.server_secret.decode() not in repr(keys)
    assert pair.secret.decode() not in repr(pair)
    path = client_file(keys.folder, QWEN)
    path.write_bytes(path.read_bytes().replace(b'"secret"', b'"s"'))
    with pytest.raises(RunFolderError) as caught:
        load_client_keys(keys.folder, QWEN)
    assert pair.secret.decode() not in "".join(traceback.format_exception(caught.value))


def test_what_is_there_stays_and_what_lacks_is_made(keys):
    """A resumed run keeps its keys; a policy that came later gets its own."""
    before = load_client_keys(keys.folder, QWEN)
    late = Grant("learner", "late")
    assert create_keys(keys.folder, [QWEN, late]) == keys
    assert load_client_keys(keys.folder, QWEN) == before
    assert living(keys.folder).count(late) == 1


@pytest.mark.parametrize("how", ["revoked", "file lost"])
def test_a_resumed_run_replaces_a_key_that_cannot_be_used(keys, how):
    """The new pair is another one, and the old one stays refused."""
    old = load_client_keys(keys.folder, QWEN)
    if how == "revoked":
        revoke_client_key(keys.folder, "worker/qwen")
    else:
        client_file(keys.folder, QWEN).unlink()
    create_keys(keys.folder, [QWEN])
    assert load_client_keys(keys.folder, QWEN).public != old.public
    [entry] = [entry for entry in read_entries(keys.folder) if entry.public == old.public.decode()]
    assert not entry.is_living
    assert living(keys.folder).count(QWEN) == 1


def test_a_lost_server_pair_makes_everything_new(keys):
    """Clients' files name the servers' key, so they are worth nothing without it."""
    (keys.folder / "server.json").unlink()
    renewed = create_keys(keys.folder, [QWEN])
    assert renewed.server_public != keys.server_public
    assert load_client_keys(keys.folder, QWEN).server_public == renewed.server_public


def test_a_key_is_revoked_and_made_again(keys):
    """The list remembers both; the file of the revoked one is gone."""
    revoked = revoke_client_key(keys.folder, "worker/qwen")
    assert not client_file(keys.folder, QWEN).exists()
    made = make_client_key(keys.folder, QWEN)
    entries = [entry for entry in read_entries(keys.folder) if entry.grant == QWEN]
    assert entries == [revoked, made]
    assert load_client_keys(keys.folder, QWEN).public.decode() == made.public


def test_mistakes_with_names_are_one_clear_line(keys):
    """A name that is taken, one that is unknown, one that is revoked already."""
    with pytest.raises(ConfigError, match=r"a key of this name already exists.*'worker/qwen'.*revoke worker/qwen"):
        make_client_key(keys.folder, QWEN)
    with pytest.raises(ConfigError, match=r"no such key.*'worker/wen'.*wanted .*worker/qwen"):
        revoke_client_key(keys.folder, "worker/wen")
    revoke_client_key(keys.folder, "worker/qwen")
    with pytest.raises(ConfigError, match=r"already revoked.*'worker/qwen'"):
        revoke_client_key(keys.folder, "worker/qwen")
    with pytest.raises(RunFolderError, match=r"the key of worker/qwen does not exist or was revoked.*make worker qwen"):
        load_client_keys(keys.folder, QWEN)


def test_a_missing_or_damaged_key_is_one_clear_line(tmp_path, keys):
    """A person without keys is told which file lacks and what makes it."""
    with pytest.raises(RunFolderError, match=r"server\.json.*mrl train"):
        load_keys(tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match=r"worker\.qwen\.json.*mrl train"):
        load_client_keys(tmp_path / "nowhere", QWEN)
    (keys.folder / "server.json").write_bytes(b"short")
    with pytest.raises(RunFolderError, match=r"server\.json: the key file is damaged; got '5 bytes'"):
        load_keys(keys.folder)


def test_keys_of_the_one_pair_form_are_one_clear_line(tmp_path):
    """They are left alone, and the cure is a command."""
    (tmp_path / "client_secret").write_bytes(b"x" * 40)
    for use in (create_keys, load_keys, lambda folder: load_client_keys(folder, QWEN)):
        with pytest.raises(RunFolderError, match=r"one pair for all clients.*rm -r .*--resume"):
            use(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["client_secret"]


def test_changes_at_the_same_time_do_not_lose_each_other(keys):
    """Two people revoke and make keys while the supervisor completes them."""
    revoke_client_key(keys.folder, "worker/llama")
    grants = [Grant("worker", f"p{number}") for number in range(12)]
    threads = [threading.Thread(target=make_client_key, args=(keys.folder, grant)) for grant in grants]
    threads.append(threading.Thread(target=create_keys, args=(keys.folder, [LLAMA])))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(living(keys.folder)) >= {*grants, LLAMA}
    assert len(living(keys.folder)) == len(set(living(keys.folder)))
