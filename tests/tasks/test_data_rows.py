"""Rows of JSONL and Parquet files, of splits in a folder, with filters; and tasks mixed by weight."""

import json
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest

from mrl.config.task_tables import PoolTable, TaskTable
from mrl.errors import MissingError, TaskError
from mrl.tasks.data_rows import Split, rows_of, split_files
from mrl.tasks.jsonl_source import JsonlSource
from mrl.tasks.math_source import MathSource
from mrl.tasks.pool import build_pool

README = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test.jsonl]
- config_name: socratic
  data_files: other.jsonl
---
# Data
"""

KEYS = {"prompt_key": "question", "reference_key": "answer"}


def write(path: Path, rows: list[dict]) -> Path:
    """A JSONL or a Parquet file, as its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(first: int, last: int, **more: object) -> list[dict]:
    return [{"question": f"{n} + {n}", "answer": str(2 * n), **more} for n in range(first, last)]


def texts(path: Path, **options: object) -> dict[str, str]:
    """Prompt -> reference."""
    source = JsonlSource(str(path), KEYS | options, seed=1, where="tasks.t")
    return {item.text: item.reference for item in source.items(0)}


def test_a_number_that_is_none_in_a_parquet_file_is_nothing(tmp_path):
    """Tables have NaN where a value is missing: as a reference it is refused, elsewhere it is null."""
    path = write(tmp_path / "t.parquet", [{"question": "a", "answer": 1.0, "cost": float("nan")}])
    assert json.loads(next(JsonlSource(str(path), KEYS, seed=1, where="tasks.t").items(0)).row)["cost"] is None

    write(path, [{"question": "a", "answer": float("nan")}])
    with pytest.raises(TaskError, match=r"t\.parquet:1: 'answer' has no usable value; got 'null'"):
        JsonlSource(str(path), KEYS, seed=1, where="tasks.t")


def test_a_parquet_file_is_read_as_a_jsonl_file_is(tmp_path):
    """Numbers and lists as JSON has them, what JSON lacks as text."""
    rows = [
        {"question": "a", "answer": {"tests": [1, 2]}, "cost": Decimal("1.5")},
        {"question": "b", "answer": {"tests": [3]}, "cost": None},
    ]
    file = write(tmp_path / "rows.parquet", rows)
    assert texts(file) == {"a": '{"tests": [1, 2]}', "b": '{"tests": [3]}'}
    (place, first), _ = rows_of(file, Split(""), where="tasks.t", get="", form="rows")
    assert (place, first["cost"]) == (f"{file}:1", "1.5")


def test_mathematics_comes_from_parquet_as_well(tmp_path):
    """By the columns that such data have."""
    source = MathSource(str(write(tmp_path / "m.parquet", sums(0, 9))), {}, seed=1, where="tasks.t")
    assert {item.reference for item in source.items(0)} == {str(2 * n) for n in range(9)}


def test_a_damaged_parquet_file_is_named(tmp_path):
    """One that is cut off, and one that is none."""
    whole = write(tmp_path / "rows.parquet", sums(0, 9)).read_bytes()
    for content in (whole[:-9], b"PK" * 90):
        (tmp_path / "rows.parquet").write_bytes(content)
        with pytest.raises(TaskError, match=r"rows\.parquet: not a valid Parquet file; got '"):
            texts(tmp_path / "rows.parquet")


def test_parquet_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    """The file itself is looked for first."""
    with pytest.raises(
        MissingError, match=r"data file '.*rows\.parquet' does not exist; wanted a Parquet file, one example per row: {"
    ):
        texts(tmp_path / "rows.parquet")
    write(tmp_path / "rows.parquet", sums(0, 9))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(
        MissingError, match=r"pyarrow, which reads Parquet files, is not installed; cure: pip install 'mrl\[parquet\]'"
    ):
        texts(tmp_path / "rows.parquet")


def test_a_folder_has_splits(tmp_path):
    """Those that its README names, in all of their files."""
    (tmp_path / "README.md").write_text(README)
    write(tmp_path / "main/train-0.parquet", sums(0, 5))
    write(tmp_path / "main/train-1.parquet", sums(5, 8))
    write(tmp_path / "main/test.jsonl", sums(7, 9))
    write(tmp_path / "other.jsonl", sums(20, 22))
    keys = {"prompt_key": "question", "reference_key": "answer", "subset": "main", "held_out": "test"}
    source = JsonlSource(str(tmp_path), keys, seed=1, where="tasks.t")
    parts = Counter(item.part for item in source.items(0))
    assert parts == {"train": 8, "held_out": 2}
    assert texts(tmp_path, subset="socratic").keys() == {"20 + 20", "21 + 21"}


@pytest.mark.parametrize(
    ("names", "split", "files"),
    [
        (["train.jsonl", "test.jsonl"], Split("test"), ["test.jsonl"]),
        (["data/train-0.parquet", "data/test-0.parquet"], Split("train"), ["data/train-0.parquet"]),
        (["a/train-0.parquet", "b/train-0.parquet"], Split("train", "b"), ["b/train-0.parquet"]),
        (["test/0.jsonl", "latest.jsonl"], Split("test"), ["test/0.jsonl"]),
        (["test.jsonl", "test.parquet", "README.md"], Split("test"), ["test.parquet"]),
        (["math-train/test-0.parquet", "math-train/train-0.parquet"], Split("train"), ["math-train/train-0.parquet"]),
        (["math-train/0.jsonl", "x/train/a/1.jsonl", "x/train/b/2.jsonl"], Split("train"),
         ["x/train/a/1.jsonl", "x/train/b/2.jsonl"]),
    ],
)  # fmt: skip
def test_without_a_readme_the_names_of_files_say_their_split(names, split, files):
    """As a word of their own, else the folders above them; rows that are there in two forms come once."""
    assert split_files(names, "", split, where="x") == files


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (Split("tset", "main"), r"options\.split: .* no split 'tset'; got 'test, train'; cure: did you mean 'test'"),
        (Split("train", "mian"), r"no subset 'mian'; got 'main, socratic'; cure: did you mean 'main'"),
    ],
)  # fmt: skip
def test_a_split_that_does_not_exist_is_told_with_those_that_do(split, message):
    """And the nearest of them."""
    with pytest.raises(TaskError, match=message):
        split_files(["main/test.jsonl"], README, split, where="tasks.t")


@pytest.mark.parametrize(
    ("names", "readme", "got"),
    [
        (["a/train-0.parquet", "b/train-0.parquet", "b/test-0.parquet"], "", "a, b"),
        (["train.jsonl", "b/train.jsonl"], "", "b, the outer folder"),
        (["a/train/0.jsonl", "b/train/0.jsonl"], "", "a, b"),
        (["main/train-0.parquet", "other.jsonl"], README, "main, socratic"),
    ],
)
def test_one_of_several_subsets_has_to_be_chosen(names, readme, got):
    """Together they would be another data set, and one split of it might hold another."""
    message = rf"x: options\.subset is not set, and .* several subsets; got '{got}'; wanted one of them; cure: set"
    with pytest.raises(TaskError, match=message):
        split_files(names, readme, Split("train"), where="x")


@pytest.mark.parametrize("mark", ["default: true", "config_name: default"])
def test_a_default_subset_is_that_of_the_readme(mark):
    """Marked, or called so."""
    readme = README.replace("- config_name: socratic", f"- {mark}")
    assert split_files(["main/train-0.jsonl", "other.jsonl"], readme, Split("train"), where="x") == ["other.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "files"),
    [
        ("*.jsonl", {"a.jsonl"}),
        ("x/*", {"x/a.jsonl"}),
        ("x/**", {"x/a.jsonl", "x/y/a.jsonl"}),
        ("**/a.jsonl", {"a.jsonl", "x/a.jsonl", "x/y/a.jsonl"}),
        ("./x/?/[a-c].jsonl", {"x/y/a.jsonl"}),
        ("x?a.jsonl", set()),
    ],
)
def test_a_pattern_of_a_readme_stays_in_its_folder(pattern, files):
    """Unless it says **, as elsewhere on the hub."""
    readme = README.replace("main/train-*", f"'{pattern}'")
    names = ["a.jsonl", "x/a.jsonl", "x/y/a.jsonl"]
    if files:
        assert set(split_files(names, readme, Split("train", "main"), where="x")) == files
    else:
        with pytest.raises(TaskError, match="no split 'train'"):
            split_files(names, readme, Split("train", "main"), where="x")


@pytest.mark.parametrize(
    "told",
    ["data_files: 3", "data_files: [3, null]", "data_files: {train: x}", "data_files: [{path: null}]",
     "data_files: [{path: [1]}]", "data_files: [{path: {a: b}}]", "data_files: x.jsonl\ndate: 2026-13-01"],
)  # fmt: skip
def test_what_a_readme_says_in_another_form_is_left_out(told):
    """The names of files say the splits then."""
    readme = f"---\nconfigs:\n- config_name: main\n  {told}\n---\n"
    for text in (readme, "---\nconfigs: 3\n---\n"):
        assert split_files(["train.jsonl", "test.jsonl"], text, Split("train"), where="x") == ["train.jsonl"]


def test_a_shard_that_did_not_come_is_missed():
    """Its name says how many there are."""
    names = ["train-00000-of-00002.parquet", "test-00000-of-00001.parquet"]
    assert split_files(names, "", Split("test"), where="x") == names[1:]
    with pytest.raises(TaskError, match=r"files of the split 'train' are missing; got '1, such as .*'; wanted 2 files"):
        split_files(names, "", Split("train"), where="x")


def test_a_filter_keeps_rows_by_their_columns(tmp_path):
    """One value, or any of a list; all columns of it have to fit."""
    rows = sums(0, 4, level=1, kind="a") + sums(4, 8, level=2, kind="a") + sums(8, 12, level=3, kind="b")
    file = write(tmp_path / "rows.jsonl", rows)
    assert len(texts(file, filter={"level": [1, 3]})) == 8
    assert len(texts(file, filter={"level": [1, 3], "kind": "b"})) == 4


def test_a_filter_that_keeps_no_row_is_refused(tmp_path):
    """Text is no number."""
    with pytest.raises(TaskError, match=r"tasks\.t: options\.filter: no row matches; got 'none of 4 rows'"):
        texts(write(tmp_path / "rows.jsonl", sums(0, 4, level=1)), filter={"level": "1"})


def test_a_column_of_another_name_is_asked_for(tmp_path):
    """With the nearest there is."""
    file = write(tmp_path / "rows.parquet", [{"prompts": "a", "reference": "b"}])
    with pytest.raises(
        TaskError, match=r"rows\.parquet:1: the row has no key 'prompt'; .*cure: set options\.prompt_key = 'prompts'"
    ):
        JsonlSource(str(file), {}, seed=1, where="tasks.t")


def mixture(tmp_path: Path, train: int, *weights: float) -> Counter[str]:
    """Task -> prompts to train on."""
    tables = {}
    for number, weight in enumerate(weights):
        train_file = write(tmp_path / f"{number}.jsonl", sums(100 * number, 100 * number + 40 + 20 * number))
        held_out = write(tmp_path / f"{number}h.jsonl", sums(1000 + 100 * number, 1000 + 100 * number + 4))
        options = {"prompt_key": "question", "reference_key": "answer", "held_out": str(held_out)}
        tables[f"t{number}"] = TaskTable(source="jsonl", dataset=str(train_file), options=options, weight=weight)
    pool = build_pool(tables, PoolTable(train_prompts=train, held_out_prompts=0))
    assert Counter(prompt.task for prompt in pool.held_out) == dict.fromkeys(tables, 4)
    return Counter(pool.prompt_at(place).task for place in range(len(pool)))


@pytest.mark.parametrize(
    ("train", "weights", "expected"),
    [
        (40, (1, 3), {"t0": 10, "t1": 30}),
        (10, (1, 1, 1), {"t0": 4, "t1": 3, "t2": 3}),
        (10, (1, 2), {"t0": 3, "t1": 7}),
        (10, (0.5, 0, 0.25), {"t0": 7, "t2": 3}),
        (0, (1, 1), {"t0": 40, "t1": 60}),
        (0, (1, 3), {"t0": 20, "t1": 60}),
        (0, (1, 0), {"t0": 40}),
    ],
)
def test_tasks_are_mixed_by_weight(tmp_path, train, weights, expected):
    """By largest remainders; of all rows the scarcest task decides; without weight a task is held out alone."""
    assert mixture(tmp_path, train, *weights) == expected


def test_a_data_set_of_save_to_disk_is_named_with_what_to_do(tmp_path):
    (tmp_path / "train").mkdir()
    for name in ("train/data-00000-of-00001.arrow", "train/state.json", "train/dataset_info.json", "dataset_dict.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(TaskError, match=r"save_to_disk.*load_from_disk\(.*\)\['train'\].to_parquet"):
        JsonlSource(str(tmp_path), {}, seed=0, where="tasks.saved")
