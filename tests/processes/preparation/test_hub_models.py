"""Models of the hub by what stands in a configuration; tests/cli/test_fetch.py asks a hub for them."""

from pathlib import Path

import pytest

from mrl.config.schema import RunConfig
from mrl.hub_names import HubName, download, parse_name
from mrl.processes.preparation.hub_models import pinned
from tests.support.word_runs import word_run

COMMIT = "0123456789" * 4


def config(**policy: str) -> RunConfig:
    return word_run({"one": policy}, task="trim")


@pytest.mark.parametrize(
    ("text", "revision", "name"),
    [
        ("maker/One-2B", "", HubName("maker/One-2B")),
        ("maker/One-2B", "v1", HubName("maker/One-2B", "v1")),
        ("maker/One-2B@v2", "v1", HubName("maker/One-2B", "v2")),
        ("maker/One-2B@", "v1", HubName("maker/One-2B")),
        ("models/here/one", "", None),
        ("./one", "", None),
        ("one", "", None),
    ],
)
def test_what_has_the_form_of_an_id_is_a_name(text: str, revision: str, name: HubName | None) -> None:
    """With the revision beside it before another one; a path of more or fewer parts is none."""
    assert parse_name(text, revision) == name


@pytest.mark.parametrize(
    ("source", "files", "command"),
    [
        ("maker/One-2B", (), "hf download maker/One-2B --local-dir 'my models'"),
        ("maker/One-2B@v1", (), "hf download maker/One-2B --revision v1 --local-dir 'my models'"),
        (
            "maker/One-2B",
            ("a.json", "b"),
            "hf download maker/One-2B --include a.json --include b --local-dir 'my models'",
        ),
        ("", (), "hf download NAME --local-dir 'my models'"),
        ("of a friend", (), "hf download 'of a friend' --local-dir 'my models'"),
    ],
)
def test_the_command_that_gets_a_model_takes_what_a_source_says(
    source: str, files: tuple[str, ...], command: str
) -> None:
    """`hf` knows no ID@REVISION, and fails for a file that is named and not there."""
    assert download(source, Path("my models"), *files) == command


def test_a_pinned_model_keeps_the_revision_that_was_asked_for(tmp_path: Path) -> None:
    """Of a run's configuration, whose folder lies in the cache of another host, or of other days."""
    folder = tmp_path / COMMIT
    folder.mkdir()
    of_run = config(model=str(folder), source=f"maker/One-2B@{COMMIT}", model_revision="main")
    assert pinned(of_run, where="test", on_note=pytest.fail) == of_run
