"""Files that a policy's `prompt` table names become texts of the configuration, which a resumed run has to share."""

import json
from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.config.policy_tables import ShotTable
from mrl.config.resume import check_same_meaning
from mrl.config.run_folder import create_run_folder, read_run_config
from mrl.errors import ConfigError, RunFolderError

CONFIG = """
[run]
name = "small"
steps = 4
min_free_mib = 1
folder = "{folder}/runs"
[tasks.copy]
source = "words"
dataset = "copy"
[policies.one]
model = "models/one"
[policies.one.prompt]
few_shot = [{{ user = "1 + 1 = ?", assistant = "2" }}]
few_shot_file = "{folder}/shots.jsonl"
chat_template = "{folder}/own.jinja"
[policies.two]
model = "models/two"
"""
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration that names a file of examples and one with a template."""
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    (tmp_path / "shots.jsonl").write_text(json.dumps({"user": "2 + 2 = ?", "assistant": "4"}) + "\n\n")
    path = tmp_path / "small.toml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


def test_files_become_texts(file: Path) -> None:
    """The examples of the file stand behind those of the table, and no name of a file is left."""
    one = load_config(file).policies["one"].prompt
    assert one.chat_template == TEMPLATE
    assert [(shot.user, shot.assistant) for shot in one.few_shot] == [("1 + 1 = ?", "2"), ("2 + 2 = ?", "4")]
    assert one.few_shot_file == ""


def test_a_template_may_stand_in_the_configuration(file: Path) -> None:
    """What has the marks of a template is no name of a file."""
    config = load_config(file, ["--policies.one.prompt.chat_template", "{{ messages[0].content }}"])
    assert config.policies["one"].prompt.chat_template == "{{ messages[0].content }}"


def test_a_run_has_its_texts_when_the_files_are_gone(file: Path, tmp_path: Path) -> None:
    """Processes on other hosts, and later ones, read them from the run's own configuration."""
    config = load_config(file)
    folder = create_run_folder(config)
    (tmp_path / "own.jinja").unlink()
    assert read_run_config(folder.path).policies["one"].prompt == config.policies["one"].prompt


def test_a_run_that_would_go_on_with_other_prompts_is_refused(file: Path, tmp_path: Path) -> None:
    """A changed file is another prompt; what the other policy is asked has not changed."""
    before = load_config(file)
    check_same_meaning(before, load_config(file), where="small.toml")
    (tmp_path / "own.jinja").write_text(TEMPLATE + "Answer:")
    with pytest.raises(
        RunFolderError, match=r"policies\.one\.prompt\.chat_template: differs from the value in the run"
    ):
        check_same_meaning(before, load_config(file), where="small.toml")


def test_a_large_file_is_no_template(file: Path, tmp_path: Path) -> None:
    """It is not read."""
    (tmp_path / "own.jinja").write_text(TEMPLATE + " " * 1024 * 1024)
    with pytest.raises(ConfigError, match=r"chat_template: the file is too large; got '1,048,\d+ bytes'"):
        load_config(file)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"user": "c"}', "; got"),
        ('{"user": "c", "user": "d", "assistant": "e"}', r" \(duplicate key 'user'\); got"),
        ('{"user": "c" "d"}', r" \(Expecting ',' delimiter: .*\); got"),
    ],
)
def test_an_example_has_both_parts_once(file: Path, tmp_path: Path, line: str, why: str) -> None:
    """The line is named."""
    (tmp_path / "shots.jsonl").write_text('{"user": "a", "assistant": "b"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=rf"shots\.jsonl:2: .*\.few_shot_file: invalid few-shot example{why}"):
        load_config(file)
    assert ShotTable(user="a", assistant="b").assistant == "b"
