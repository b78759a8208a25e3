"""Where the module of an environment lies: beside the configuration, where it is there, and said so once for the run.

Processes on other hosts, and a resumed run, have the folder from `config.json`.
"""

from pathlib import Path

from mrl.config.schema import RunConfig, TaskTable


def with_environment_folders(config: RunConfig, *, where: str) -> RunConfig:
    """`config` with the folder of every environment whose module stands beside the file `where`."""
    tasks = {name: _with_folder(table, Path(where).parent) for name, table in config.tasks.items()}
    return config.model_copy(update={"tasks": tasks})


def _with_folder(table: TaskTable, folder: Path) -> TaskTable:
    if table.source != "environment" or table.environment_folder or ":" not in table.dataset:
        return table
    top = table.dataset.partition(":")[0].split(".")[0]
    is_beside = bool(top) and ((folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file())
    return table.model_copy(update={"environment_folder": str(folder.absolute())}) if is_beside else table
