"""The rows of data files: JSONL or Parquet, one file, or a folder laid out as data sets of the Hugging Face hub are.

In such a folder a split is a set of files: those that the front matter of its README names for it, or else those that
have its name in theirs ("data/train-00000-of-00001.parquet", "train.jsonl").
"""

import fnmatch
import importlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mrl.config.nearest_key import nearest
from mrl.errors import MissingError, TaskError
from mrl.tasks.jsonl_rows import jsonl_rows, relative_to

Row = tuple[str, Mapping[str, Any]]
"""Place, for messages, and the values by their columns."""
PARQUET, JSONL = ".parquet", (".jsonl", ".json")
README = "README.md"
INSTALL_PARQUET = "pip install 'mrl[parquet]'"
SHARD = re.compile(r"-\d+-of-(\d+)\.")
FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)\r?\n---", re.DOTALL)


class Split(NamedTuple):
    """Which rows of a folder; its configuration is `subset`, "" the only or default one."""

    name: str
    subset: str = ""


def rows_of(path: Path, split: Split, *, where: str, get: str, form: str) -> Iterator[Row]:
    """The rows of a file, or of a split of a folder. Raises MissingError for what is not there, TaskError.

    `form` says in words what a row should hold, `get` is the command that fetches the data.
    """
    if not path.is_dir():
        yield from _rows_of_file(path, where=where, get=get, form=form)
        return
    names = [file.relative_to(path).as_posix() for file in sorted(path.rglob("*")) if file.is_file()]
    readme = path / README
    told = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    for name in split_files(names, told, split, where=f"{where}: {path}"):
        yield from _rows_of_file(path / name, where=where, get=get, form=form)


def kept(rows: Iterator[Row], wanted: Mapping[str, Any], *, where: str) -> Iterator[Row]:
    """The rows whose columns have the wanted values; of a list any. Raises TaskError for a column that is not there,
    and where no row is left.
    """
    num_rows = num_kept = 0
    for place, row in rows:
        num_rows += 1
        for column in wanted.keys() - row.keys():
            near = nearest(column, row)
            cure = f"did you mean {near!r}?" if near else ""
            got = f"columns {sorted(row)[:8]}"
            raise TaskError(f"options.filter: no column {column!r}", where=place, got=got, cure=cure)
        if all(row[column] in (want if isinstance(want, list) else [want]) for column, want in wanted.items()):
            num_kept += 1
            yield place, row
    if wanted and not num_kept:
        got, cure = f"none of {num_rows} rows", "look at the values that its columns have"
        raise TaskError("options.filter: keeps no row", where=where, got=got, wanted=str(dict(wanted)), cure=cure)


def split_files(names: Sequence[str], readme: str, split: Split, *, where: str) -> list[str]:
    """The data files of one split among `names`. Raises TaskError, which lists what there is."""
    files = [name for name in names if name.endswith((PARQUET, *JSONL))]
    configs = _configs(readme)
    if configs:
        known = {str(config.get("config_name", "default")): config for config in configs}
        default = next((name for name, config in known.items() if config.get("default")), next(iter(known)))
        subset = split.subset or ("default" if "default" in known else default)
        if subset not in known:
            raise _no_such("subset", subset, known, where)
        splits = _splits(known[subset])
        if split.name not in splits:
            raise _no_such("split", split.name, splits, where)
        found = [name for name in files if any(fnmatch.fnmatch(name, pattern) for pattern in splits[split.name])]
    else:
        folder = f"{split.subset}/" if split.subset else ""
        of_subset = [name for name in files if not folder or name.startswith(folder) or f"/{folder}" in name]
        found = [name for name in of_subset if re.search(rf"(^|[/_.-]){re.escape(split.name)}([/_.-])", name)]
    if not found:
        raise _no_such("split", split.name, files, where)
    # A split in both forms is the same rows twice.
    found = [name for name in found if name.endswith(PARQUET)] or found
    for name in found:
        whole = SHARD.search(name)
        if whole and sum(other.partition("-of-")[2] == name.partition("-of-")[2] for other in found) < int(whole[1]):
            what = f"files of the split {split.name!r} are missing"
            raise TaskError(what, where=where, got=f"{len(found)}, such as {name}", wanted=f"{int(whole[1])}")
    return found


def _configs(readme: str) -> list[Mapping[str, Any]]:
    """The configurations that the front matter of a README lists; none where there is none, or it is no YAML."""
    matter = FRONT_MATTER.match(readme)
    if matter is None:
        return []
    yaml = importlib.import_module("yaml")  # which huggingface_hub brings
    try:
        told = yaml.safe_load(matter[1])
    except yaml.YAMLError:
        return []
    configs = told.get("configs") if isinstance(told, dict) else None
    listed = [one for one in configs or () if isinstance(one, dict)]
    return [one for one in listed if _splits(one)]


def _splits(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Split -> patterns of its files."""
    found: dict[str, list[str]] = {}
    data_files = config.get("data_files")
    if isinstance(data_files, str):
        return {"train": [data_files]}
    for one in data_files or ():
        if isinstance(one, str):
            found.setdefault("train", []).append(one)
        elif isinstance(one, dict):
            path = one.get("path", ())
            found.setdefault(str(one.get("split", "train")), []).extend([path] if isinstance(path, str) else path)
    return found


def _no_such(kind: str, name: str, known: Collection[str], where: str) -> TaskError:
    near = nearest(name, known)
    return TaskError(
        f"options.{kind}: the data set has no {kind} {name!r}",
        where=where,
        got=f"{', '.join(sorted(known)[:8]) or 'no JSONL or Parquet file'}",
        cure=f"did you mean {near!r}?" if near else "",
    )


def _rows_of_file(path: Path, *, where: str, get: str, form: str) -> Iterator[Row]:
    if path.suffix != PARQUET:
        yield from jsonl_rows(path, where=where, get=get, form=form)
        return
    if not path.is_file():
        what = f"data file {str(path)!r} is not there{relative_to(path)}"
        raise MissingError(what, where=where, wanted=form.replace("JSONL", "Parquet"), cure=get)
    try:
        pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        what = "the package pyarrow is not there, which reads Parquet files"
        raise MissingError(what, where=where, cure=INSTALL_PARQUET) from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", json.loads(json.dumps(row, ensure_ascii=False, default=str))
    except (pyarrow.ArrowException, OSError) as error:
        got = " ".join(str(error).split())[:100]
        raise TaskError("no Parquet file, or a damaged one", where=str(path), got=got, cure=get) from None
    if not number:
        raise TaskError("the file holds no row", where=str(path), wanted=form, cure=get)
