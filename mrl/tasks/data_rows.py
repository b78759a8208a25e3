"""The rows of data files: JSONL or Parquet, one file, or a folder laid out as data sets of the Hugging Face hub are.

In such a folder a split is a set of files: those that the front matter of its README names for it, or else those that
have the split's name in their own ("data/train-00000-of-00001.parquet", "train.jsonl").
"""

import fnmatch
import importlib
import json
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from mrl.config.nearest_key import nearest
from mrl.errors import MissingError, TaskError
from mrl.tasks.jsonl_rows import jsonl_rows, nothing, relative_to

Row = tuple[str, Mapping[str, Any]]
"""Place of the row, for messages, and its values by column."""
PARQUET, JSONL = ".parquet", (".jsonl", ".json")
README = "README.md"
SAVED, ARROW = "state.json", ".arrow"
"""File name and ending by which a split saved by `save_to_disk` of the package datasets is recognised."""
DEFAULT = "default"
"""Name of a README's configuration that gives none."""
INSTALL_PARQUET = "pip install 'mrl[parquet]'"
SHARD = re.compile(r"-\d+-of-(\d+)\.")
FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)\r?\n---", re.DOTALL)


class Split(NamedTuple):
    """A split of a folder's data set. `subset` is the configuration; "" is the only or default one."""

    name: str
    subset: str = ""


def rows_of(path: Path, split: Split, *, where: str, get: str, form: str) -> Iterator[Row]:
    """Yield the rows of a file, or of a split of a folder.

    Raises MissingError for missing data, TaskError for data that cannot be used. `form` says in words what a row should
    hold, `get` is the command that fetches the data.
    """
    if not path.is_dir():
        yield from _rows_of_file(path, where=where, get=get, form=form)
        return
    names = [file.relative_to(path).as_posix() for file in sorted(path.rglob("*")) if file.is_file()]
    _check_not_saved(path, names, where=where)
    readme = path / README
    told = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    for name in split_files(names, told, split, where=f"{where}: {path}"):
        yield from _rows_of_file(path / name, where=where, get=get, form=form)


def check_of_folder(dataset: str, given: Collection[str], *, where: str) -> None:
    """Check options. Raises TaskError where `given` has `split` or `subset` and the data set is a single file."""
    for option in ("split", "subset"):
        if option in given and Path(dataset).is_file():
            what, wanted = f"options.{option}: a single file has no {option}", "a folder, or a data set of the hub"
            raise TaskError(what, where=where, got=dataset, wanted=wanted, cure=f"remove options.{option}")


def _check_not_saved(folder: Path, names: Sequence[str], *, where: str) -> None:
    """Raises TaskError for a folder that `save_to_disk` of the package datasets wrote: its JSON files hold no rows."""
    if any(posixpath.basename(name) == SAVED for name in names) and any(name.endswith(ARROW) for name in names):
        what, wanted = "Arrow files written by save_to_disk cannot be read", "JSONL or Parquet files"
        cure = f"convert in Python: datasets.load_from_disk({str(folder)!r})['train'].to_parquet('train.parquet')"
        cure += "; omit ['train'] if the data set has no splits"
        raise TaskError(what, where=f"{where}: {folder}", wanted=wanted, cure=cure)


def kept(rows: Iterator[Row], wanted: Mapping[str, Any], *, where: str) -> Iterator[Row]:
    """Yield the rows whose columns have the wanted values, or one value of a wanted list.

    Raises TaskError for a column that is not there, and where no row is left.
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
        got, cure = f"none of {num_rows} rows", "check the values in these columns"
        raise TaskError("options.filter: no row matches", where=where, got=got, wanted=str(dict(wanted)), cure=cure)


def split_files(names: Sequence[str], readme: str, split: Split, *, where: str) -> list[str]:
    """Return the data files of one split among `names`. Raises TaskError, which lists the known ones."""
    files = [name for name in names if is_data(name)]
    configs = _configs(readme)
    if configs:
        splits = _splits(_config_of(configs, split.subset, where))
        if split.name not in splits:
            raise _no_such("split", split.name, splits, where)
        found = [name for name in files if any(_fits(name, pattern) for pattern in splits[split.name])]
    else:
        folder = f"{split.subset}/" if split.subset else ""
        found = _of_split([name for name in files if f"/{folder}" in f"/{name}"], split, where)
    if not found:
        raise _no_such("split", split.name, files, where)
    # Parquet and JSONL files of one split hold the same rows.
    found = [name for name in found if name.endswith(PARQUET)] or found
    for name in found:
        whole = SHARD.search(name)
        if whole and sum(other.partition("-of-")[2] == name.partition("-of-")[2] for other in found) < int(whole[1]):
            what = f"files of the split {split.name!r} are missing"
            got, wanted = f"{len(found)}, such as {name}", f"{int(whole[1])} files"
            raise TaskError(what, where=where, got=got, wanted=wanted)
    return found


def is_data(name: str) -> bool:
    """Whether a file of this name may hold rows."""
    return name.endswith((PARQUET, *JSONL))


def _of_split(names: Sequence[str], split: Split, where: str) -> list[str]:
    """Return the files that have the split in their own names or, where none has, as a folder above them.

    Raises TaskError where these files lie in several folders and no subset is given.
    """
    word = re.compile(rf"(^|[_.-]){re.escape(split.name)}[_.-]")
    subset_of = {name: posixpath.dirname(name) for name in names if word.search(posixpath.basename(name))}
    if not subset_of:
        parts = {name: name.split("/")[:-1] for name in names}
        subset_of = {
            name: "/".join(folders[: folders.index(split.name)])
            for name, folders in parts.items()
            if split.name in folders
        }
    if not split.subset:
        _check_one(set(subset_of.values()), where)
    return list(subset_of)


def _config_of(configs: Sequence[Mapping[str, Any]], subset: str, where: str) -> Mapping[str, Any]:
    """Return the configuration of a README that `subset` names, or the default one. Raises TaskError without one."""
    known = {str(config.get("config_name", DEFAULT)): config for config in configs}
    if not subset:
        marked = [name for name, config in known.items() if config.get("default") is True]
        subset = next((name for name in (DEFAULT, *marked) if name in known), "")
    if not subset:
        subset = _check_one(known, where)
    if subset not in known:
        raise _no_such("subset", subset, known, where)
    return known[subset]


def _fits(name: str, pattern: str) -> bool:
    """Whether a path matches a pattern, in which * and ? match no slash, and ** matches any folders."""
    return _fit(PurePosixPath(name).parts, PurePosixPath(pattern).parts)


def _fit(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_fit(parts[skipped:], patterns[1:] or ("*",)) for skipped in range(len(parts)))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], patterns[0]) and _fit(parts[1:], patterns[1:])


def _configs(readme: str) -> list[Mapping[str, Any]]:
    """Return the configurations in the front matter of a README; none without front matter, or where it is no YAML."""
    matter = FRONT_MATTER.match(readme)
    if matter is None:
        return []
    yaml = importlib.import_module("yaml")  # which huggingface_hub brings
    try:
        told = yaml.safe_load(matter[1])
    except (yaml.YAMLError, ValueError):  # the latter of a date such as 2026-13-01
        return []
    configs = told.get("configs") if isinstance(told, dict) else None
    return [one for one in _listed(configs) if isinstance(one, dict) and _splits(one)]


def _splits(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return split -> patterns of its files; entries of any other form are left out."""
    found: dict[str, list[str]] = {}
    for one in _listed(config.get("data_files")):
        told = one if isinstance(one, dict) else {"path": one}
        patterns = [path for path in _listed(told.get("path")) if isinstance(path, str)]
        if patterns:
            found.setdefault(str(told.get("split", "train")), []).extend(patterns)
    return found


def _listed(told: object) -> list[Any]:
    """Return a list as it is, any other value in a list of one."""
    return told if isinstance(told, list) else [told]


def _check_one(known: Collection[str], where: str) -> str:
    """Return the only subset, or "" where there is none. Raises TaskError for several."""
    if len(known) > 1:
        got = ", ".join(sorted(name or "the outer folder" for name in known)[:8])
        what = "options.subset is not set, and the data set has several subsets"
        cure = "set options.subset to one of them, or set dataset to a single folder or file"
        raise TaskError(what, where=where, got=got, wanted="one of them", cure=cure)
    return next(iter(known), "")


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
        what = f"data file {str(path)!r} does not exist{relative_to(path)}"
        raise MissingError(what, where=where, wanted=_of_parquet(form), cure=get)
    try:
        pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        what = "the package pyarrow, which reads Parquet files, is not installed"
        raise MissingError(what, where=where, cure=INSTALL_PARQUET) from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    written = json.dumps(row, ensure_ascii=False, default=str)
                    yield f"{path}:{number}", json.loads(written, parse_constant=nothing)
    except (pyarrow.ArrowException, OSError) as error:
        got = " ".join(str(error).split())[:100]
        raise TaskError("not a valid Parquet file", where=str(path), got=got, cure=get) from None
    if not number:
        raise TaskError("the file has no rows", where=str(path), wanted=_of_parquet(form), cure=get)


def _of_parquet(form: str) -> str:
    """Return the description of a JSONL file as that of a Parquet file."""
    return form.replace("JSONL", "Parquet").replace("one object per line", "one example per row")
