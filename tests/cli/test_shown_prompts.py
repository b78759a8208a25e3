"""`mrl check --prompts N` shows what each policy is asked."""

import json
from pathlib import Path

import pytest

from mrl.cli.main import main
from tests.support.model_folders import write_model

NAMES = ("one", "two")
CONFIG = """
[run]
name = "small"
steps = 4
min_free_mib = 1
[pool]
train_prompts = 0
held_out_prompts = 0
[tasks.sums]
source = "jsonl"
dataset = "sums.jsonl"
[policies.one]
model = "one"
prompt = { system = "Add.", assistant_prefill = "So", stop = ["!"], chat_template = "own.jinja" }
[policies.two]
model = "two"
[policies.three]
model = "three"
"""


def test_prompts_are_shown_as_each_policy_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Special tokens and line breaks in them, with how many tokens they are; a model that is not there has none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mrl.cli.check.memory_plan", lambda *_: [])
    write_model(tmp_path / "one")
    write_model(tmp_path / "two")
    (tmp_path / "own.jinja").write_text("{% for m in messages %}<|pad|>{{ m.content }}\n{% endfor %}<|endoftext|>")
    rows = ({"prompt": f"{n} + {n}\x1b[2J", "reference": str(2 * n)} for n in range(60))
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "small.toml").write_text(CONFIG)

    assert main(["check", "small.toml", "--prompts", "2"]) == 0

    lines = capsys.readouterr().out.splitlines()
    first, plain = (next(n for n, line in enumerate(lines) if line.startswith(f"prompt 1 of {one}")) for one in NAMES)
    assert lines[first].startswith("prompt 1 of one, of tasks.sums (")
    assert lines[first + 1 : first + 4] == ["  | <|pad|>Add.", lines[first + 2], "  | <|endoftext|>So"]
    asked = lines[first + 2].removeprefix("  | <|pad|>").replace("\\x1b", "\x1b")
    assert not any("\x1b" in line for line in lines), "what a stranger wrote does nothing to a terminal"
    assert lines[first + 4].startswith("prompt 2 of one")
    assert "every answer begins with the end of its prompt, 'So'" in lines
    assert "answers end at '!' or the EOS token" in lines
    assert lines[plain].endswith(f"({len(asked) + 1} tokens):")
    assert lines[plain + 1 : plain + 3] == ["  | " + asked.replace("\x1b", "\\x1b"), "  | "]
    assert "prompts of three: the model is not here yet" in lines
