"""What of a configuration and of an environment is hidden from trackers, and what is not."""

import json
from typing import Any

import pytest

from mrl.metrics.trackers.own_secrets import hidden, without_secrets

VALUE = "abc-0123"


@pytest.mark.parametrize(
    "name",
    ["GH_PAT", "DB_PASS", "PGPASSWORD", "HF_TOKEN", "wandb_api_key", "AWS_SECRET_ACCESS_KEY", "GPG_PASSPHRASE",
     "GOOGLE_CREDENTIALS", "REGISTRY_AUTH", "DB_PWD", "PASS", "SITE_COOKIE", "API_TOKENS", "CLIENT_SECRET"],
)  # fmt: skip
def test_values_of_secret_variables_are_hidden(name: str) -> None:
    """Wherever they stand in a text."""
    assert hidden(f"x{VALUE}y", {name: VALUE}) == "x***y"


@pytest.mark.parametrize(
    ("name", "value"),
    [("PWD", VALUE), ("HOME", VALUE), ("COMPASS", VALUE), ("TOKENIZERS_PARALLELISM", VALUE), ("SPAT", VALUE),
     ("A_KEY", "12345")],
)  # fmt: skip
def test_other_values_are_not(name: str, value: str) -> None:
    """Nor those that are too short to be a secret."""
    assert hidden(f"x{value}y", {name: value}) == f"x{value}y"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--api-key", VALUE, "--port", "1"], ["--api-key", "***", "--port", "1"]),
        (["--api-key", VALUE, "-x", "other", "--port", "1"], ["--api-key", "***", "***", "***", "--port", "1"]),
        ([f"--api-key={VALUE}", "1"], ["--api-key=***", "***"]),
        (["--admin-api-key", VALUE], ["--admin-api-key", "***"]),
        (["--ssl_keyfile_password", VALUE], ["--ssl_keyfile_password", "***"]),
        (["--hf-token", VALUE, 3, VALUE], ["--hf-token", "***", 3, "***"]),
        (["--dtype", "float32", "--tokenizer=own"], ["--dtype", "float32", "--tokenizer=own"]),
        (["--load", '{"api_key": "a", "n": [1]}'], ["--load", '{"api_key": "***", "n": [1]}']),
        (['--load={"api_key": "a"}'], ['--load={"api_key": "***"}']),
        (["{no json", f"{{{VALUE}"], ["{no json", "{***"]),
        (["http://me:pw@host/"], ["http://***@host/"]),
    ],
)
def test_words_of_a_command_are_hidden_behind_the_option_that_names_them(words: list[Any], shown: list[Any]) -> None:
    """All up to the next option; also within an object in JSON."""
    assert without_secrets({"server": {"options": words}}, {"MY_TOKEN": VALUE}) == {"server": {"options": shown}}


def test_what_is_named_like_a_secret_is_hidden_in_tables() -> None:
    """And nothing else, whatever its kind; the tables are copied."""
    tables = {
        "access_key": "a", "hf_token": "a", "passphrase": "a", "DB_Pass": "a", "private_key": "a",
        "token": "", "max_token": 3, "bypass": "a", "prompt_key": "question", "tokenizer": "own",
        "deep": [{"secret": "a"}, ("b", None, 1.5)],
    }  # fmt: skip
    shown = without_secrets(tables, {})
    assert json.loads(json.dumps(shown)) == {
        "access_key": "***", "hf_token": "***", "passphrase": "***", "DB_Pass": "***", "private_key": "***",
        "token": "", "max_token": 3, "bypass": "a", "prompt_key": "question", "tokenizer": "own",
        "deep": [{"secret": "***"}, ["b", None, 1.5]],
    }  # fmt: skip
    assert tables["deep"] == [{"secret": "a"}, ("b", None, 1.5)]
