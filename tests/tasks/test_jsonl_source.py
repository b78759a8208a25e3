"""Prompts and references of a file, and the user's own verifier on them."""

import json
from pathlib import Path

import pytest

from mrl.config.task_tables import PoolTable, TaskTable
from mrl.errors import MissingError, TaskError
from mrl.plugins import MODULES
from mrl.tasks.jsonl_source import JsonlSource
from mrl.tasks.pool import build_pool
from mrl.tasks.verify import check_verifier


@pytest.fixture
def write(tmp_path):
    """A function that writes rows and returns the file."""

    def write(rows: list[object], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def open_jsonl(path: Path, **options: object) -> JsonlSource:
    return JsonlSource(str(path), options, seed=1, where="tasks.t")


def test_prompts_and_references_come_as_they_stand_in_the_file(write):
    """Text as it is, anything else as JSON; every prompt is trained on or held out."""
    rows = [{"prompt": f"p{n}", "reference": "r"} for n in range(80)] + [{"prompt": "tests", "reference": {"in": [1]}}]
    items = list(open_jsonl(write(rows)).items(0))
    assert {item.text: item.reference for item in items} == {f"p{n}": "r" for n in range(80)} | {"tests": '{"in": [1]}'}
    assert {item.part for item in items} == {"train", "held_out"}
    assert [item.number for item in items] != sorted(item.number for item in items)


def test_a_second_file_is_held_out(write):
    """All of it, first, under keys of the user's choice."""
    train = write([{"question": "a", "tests": "1"}, {"question": "b", "tests": "2"}])
    held_out = write([{"question": "b", "tests": "2"}], "held.jsonl")
    source = open_jsonl(train, held_out=str(held_out), prompt_key="question", reference_key="tests")
    items = list(source.items(0))
    assert (items[0].text, items[0].part) == ("b", "held_out")
    assert {(item.text, item.part) for item in items[1:]} == {("a", "train"), ("b", "train")}


def test_rows_that_are_left_out_are_told_of(write):
    """Which of two references counts is nobody's choice, and a prompt that is too long is easily missed."""
    rows = [{"prompt": f"p{n}", "reference": "r"} for n in range(80)]
    rows += [rows[0], rows[1], rows[1], {"prompt": "p2", "reference": "other"}, {"prompt": "p" * 9, "reference": "r"}]
    notes: list[str] = []
    everything = PoolTable(train_prompts=0, held_out_prompts=0)
    table = TaskTable(source="jsonl", dataset=str(write(rows)), max_prompt_chars=8)

    pool = build_pool({"t": table}, everything, on_note=notes.append)

    assert len(pool.prompts) == 80
    assert notes == [
        "tasks.t: rows left out: 3; another row has the same prompt",
        "tasks.t: rows left out: 1; another row has the same prompt and a different reference, and is used",
        "tasks.t: rows left out: 1; the prompt is longer than max_prompt_chars = 8",
    ]


def test_without_a_verifier_the_reference_itself_is_right(write):
    """In tags or as the whole completion."""
    source = open_jsonl(write([{"prompt": "p", "reference": "42 "}]))
    item = next(source.items(0))
    for completion, score in [("<answer>42</answer>", 1.0), ("so <answer> 42</answer>.", 1.0), ("42", 1.0), ("4", 0.0)]:
        assert source.score(item, source.extract(completion)) == score


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [({"prompt": "", "reference": "r"}, {}, "rows.jsonl:1: 'prompt' has no usable value; got '\"\"'"),
     ({"prompt": "p", "answer": "r"}, {}, "rows.jsonl:1: the row has no key 'reference'; got .*options.reference_key"),
     ({"prompt": "p", "reference": None}, {}, "'reference' has no usable value; got 'null'"),
     (["p"], {}, "not a JSON object.*wanted .*reference"),
     ({"prompt": "p", "reference": "r"}, {"heldout": "x"}, "options.heldout.*wanted one of held_out, prompt_key")],
)  # fmt: skip
def test_wrong_rows_and_options_are_named(row, options, message, write):
    """Where it is, what it has, what was wanted."""
    with pytest.raises(TaskError, match=message):
        open_jsonl(write([row]), **options)


def test_a_message_in_parts_of_text_is_one_text(write):
    """As data of chat servers has them; with an image among them, or no part, it cannot be asked."""
    parts = [{"type": "text", "text": "1 + 1"}, {"type": "text", "text": " = ?"}]
    source = open_jsonl(write([{"prompt": [{"role": "user", "content": parts}], "reference": "2"}]))
    assert next(source.items(0)).text == "1 + 1 = ?"
    for odd in ([*parts, {"type": "image_url", "image_url": {"url": "a.png"}}], [], [{"type": "text"}]):
        with pytest.raises(
            TaskError, match=r'rows.jsonl:1: prompt: message 1 is not valid.*a list of parts of type "text"'
        ):
            open_jsonl(write([{"prompt": [{"role": "user", "content": odd}], "reference": "2"}]))


@pytest.mark.parametrize(
    ("line", "message"),
    [(rb'{"prompt": "p", "reference": "\ud83d"}', r"rows.jsonl:2: unpaired surrogate \\ud83d;.*cure: write"),
     (rb'{"prompt": "\udc00", "reference": "r"}', r"rows.jsonl:2: unpaired surrogate \\udc00;"),
     (rb'{"prompt": "p", "reference": "r", "by": {"\ud83d": 1}}', r"rows.jsonl:2: unpaired surrogate \\ud83d;"),
     (b'{"prompt": "p", "reference": "\xff"}', r"rows.jsonl:2: the text is not UTF-8; got 'the byte 0xff")],
)  # fmt: skip
def test_a_row_that_is_no_text_is_refused(line, message, tmp_path):
    """With its file and line, before anything starts; a character of two halves is one."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(rb'{"prompt": "p", "reference": "\ud83d\ude00"}' + b"\n" + line)
    with pytest.raises(TaskError, match=message):
        open_jsonl(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [('{"prompt": "p", "reference": "r", "by": {"most": 1e999}}', "Out of range float"),
     ('{"prompt": "p", "reference": "a", "reference": "b"}', "duplicate key 'reference'; got"),
     ('{"prompt": "p", "reference": {"a": 1, "b": 2, "a": 1}}', "duplicate key 'a'; got"),
     ('{"prompt": "' + "p" * 80 + '", "reference": "r",}', r"\w.* at character 113; got")],
)  # fmt: skip
def test_what_other_readers_of_json_read_otherwise_is_refused(line, message, tmp_path):
    """Which of two values counts is nobody's choice; and where a long line goes wrong is told."""
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "p", "reference": "r"}}\n{line}\n')
    with pytest.raises(TaskError, match=f"rows.jsonl:2: not valid JSON: {message}"):
        open_jsonl(path)


def test_what_is_no_number_of_json_is_nothing(tmp_path):
    """Python writes NaN and the infinities, most often in columns that nobody reads: null, as in Parquet files."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "p", "reference": "r", "loss": NaN, "by": [-Infinity, 1]}\n')
    (item,) = open_jsonl(path).items(0)
    assert json.loads(item.row) == {"prompt": "p", "reference": "r", "loss": None, "by": [None, 1]}
    path.write_text('{"prompt": "p", "reference": NaN}\n')
    with pytest.raises(TaskError, match=r"rows.jsonl:1: 'reference' has no usable value; got 'null'"):
        open_jsonl(path)


def test_a_missing_file_is_still_to_be_fetched(tmp_path):
    """Not a mistake of the configuration."""
    with pytest.raises(MissingError, match=r"gone.jsonl.*\"reference\": .*cure: make data"):
        JsonlSource(str(tmp_path / "gone.jsonl"), {}, seed=1, where="tasks.t", get="make data")


def test_the_user_s_verifier_judges_in_place_of_the_source_s(write, verifiers):
    """On a file, and on words: it gets the reference and the answer; what it does badly is a failed answer."""
    rows = [{"prompt": f"p{n}", "reference": "right"} for n in range(40)]
    tables = {
        "own": TaskTable(source="jsonl", dataset=str(write(rows)), verifier="tests.support.hard_verifiers:by_text"),
        "words": TaskTable(source="words", dataset="trim", verifier="tests.support.hard_verifiers:by_text"),
    }
    pool = build_pool(tables, PoolTable(train_prompts=8, held_out_prompts=2))
    try:
        prompts = [pool.prompt_at(position) for position in range(8)]
        own, word = (next(one for one in prompts if one.task == task) for task in ("own", "words"))
        trimmed = word.text.rsplit(": ", 1)[1][1:]
        asked = [(own.prompt_id, ("right", "die")), (word.prompt_id, (trimmed, "loo"))]
        verdicts = [
            verdict for prompt, texts in asked for verdict in pool.submit([(prompt, text) for text in texts]).result()
        ]
        assert [one.reward for one in verdicts] == [1.0, 0.0, 1.0, 0.0]
        assert [one.failure for one in verdicts] == ["", "exited", "", ""]
        assert pool.verifier_values()["verify/answers"] == 4.0
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("verifier", "reason"),
    [("no_such_module:judge", "No module named 'no_such_module'"),
     ("tests.support.hard_verifiers:no_such_function", "has no attribute 'no_such_function'"),
     ("tests.support.hard_verifiers:os", "tests.support.hard_verifiers:os is not callable")],
)  # fmt: skip
def test_a_verifier_that_cannot_start_is_refused_with_the_reason(verifier, reason, verifiers):
    """Before a run begins."""
    with pytest.raises(TaskError, match=rf"^tasks\.t\.verifier: the verifier .* does not start \(.*{reason}"):
        check_verifier("t", TaskTable(source="words", dataset="trim", verifier=verifier))


@pytest.mark.parametrize(
    ("verifier", "cure"),
    [("unended:score", r"see line 2 of \S+/unended\.py$"), ("lacking:score", r"see line 3 of \S+/lacking\.py$"),
     ("unendet:score", r"did you mean unended\?$"), ("judging.py:score", r"did you mean judging\?$"),
     ("tests.support.hard_verifiers:os", r"beside the configuration file$")],
)  # fmt: skip
def test_a_verifier_that_cannot_be_imported_is_told_with_its_line(verifier, cure, verifiers, tmp_path, monkeypatch):
    """As a regime's module is; a misspelled module with the one beside the configuration."""
    (tmp_path / "unended.py").write_text("\ndef score(reference, answer)\n    return 1\n")
    (tmp_path / "judging.py").write_text("def score(reference, answer):\n    return 1.0\n")
    (tmp_path / "lacking.py").write_text("import os\n\nimport no_such_module\n")
    monkeypatch.setenv(MODULES, str(tmp_path))
    with pytest.raises(TaskError, match=cure):
        check_verifier("t", TaskTable(source="words", dataset="trim", verifier=verifier))


def test_a_verifier_that_starts_is_accepted(verifiers):
    """Nothing of it is left."""
    check_verifier("t", TaskTable(source="words", dataset="trim", verifier="tests.support.hard_verifiers:by_text"))


def test_a_key_with_dots_names_a_value_within_another(write):
    judged = {"style": "rule", "ground_truth": "4"}
    row = {"prompt": [{"role": "user", "content": "2 + 2?"}], "reward_model": judged, "extra.split": "train"}
    path = write([row])
    for key, reference in (("reward_model.ground_truth", "4"), ("extra.split", "train")):
        item = next(open_jsonl(path, reference_key=key).items(1))
        assert (item.text, item.reference) == ("2 + 2?", reference)
    for key in ("reward_model.truth", "prompt.content", "reward_model.ground_truth.more"):
        with pytest.raises(TaskError, match=f"the row has no key '{key}'"):
            open_jsonl(path, reference_key=key)
