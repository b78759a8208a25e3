"""A small prompt pool and small tokenizers in folders, as models have them."""

from pathlib import Path

import pytest

from mrl.alignment.receiver import Receiver, load_receiver
from mrl.config.task_tables import PoolTable, TaskTable
from mrl.models.tokenizers import train_byte_level, train_metaspace
from mrl.tasks.pool import TaskPool, build_pool


@pytest.fixture(scope="module")
def pool() -> TaskPool:
    tasks = {"trim": TaskTable(source="words", dataset="trim")}
    return build_pool(tasks, PoolTable(train_prompts=4, held_out_prompts=2))


@pytest.fixture(scope="module", params=["byte_level", "metaspace"])
def receiver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Receiver:
    """A small tokenizer of each kind, in a folder as a model has one."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    train = {"byte_level": train_byte_level, "metaspace": train_metaspace}[request.param]
    train(["answer yah one two three"] * 3, 400).save_pretrained(folder)
    return load_receiver(folder)
