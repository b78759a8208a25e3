import json
import re

import pytest

from mrl.config.task_tables import PoolTable, TaskTable
from mrl.errors import TaskError
from mrl.tasks.operations import OPERATIONS
from mrl.tasks.pool import build_pool
from mrl.tasks.words import WordSource


def test_pool_has_the_sizes_asked_for_spread_over_tasks(tables, pool_table):
    """31 training and 14 held-out prompts over three tasks: the first tasks get the remainder."""
    pool = build_pool(tables, pool_table)
    train = [pool.prompt_at(position) for position in range(len(pool))]
    assert len(train) == 31
    assert [sum(p.task == task for p in train) for task in tables] == [11, 10, 10]
    assert [sum(p.task == task for p in pool.held_out) for task in tables] == [5, 5, 4]


def test_two_builds_agree_on_every_position(tables, pool_table):
    """Processes that build the pool on their own meet on the same prompt ids in the same order."""
    one, other = build_pool(tables, pool_table), build_pool(tables, pool_table)
    assert [one.prompt_at(i) for i in range(70)] == [other.prompt_at(i) for i in range(70)]
    assert one.held_out == other.held_out


def test_order_resumes_at_any_position(tables, pool_table):
    """A position means the same prompt whether it is reached by walking or by jumping, forwards or backwards."""
    pool = build_pool(tables, pool_table)
    walked = [pool.prompt_at(i) for i in range(100)]
    assert [pool.prompt_at(i) for i in reversed(range(100))] == walked[::-1]


def test_every_epoch_holds_each_prompt_once_in_another_order(tables, pool_table):
    """An epoch is a permutation of the pool, and the next epoch another one."""
    pool = build_pool(tables, pool_table)
    first, second = ([pool.prompt_at(31 * epoch + i) for i in range(31)] for epoch in (0, 1))
    assert len(set(first)) == 31
    assert set(first) == set(second)
    assert first != second


def test_order_seed_changes_the_order_and_not_the_prompts(tables, pool_table):
    """Runs with different order seeds train on the same prompts and are measured on the same held-out split."""
    one, other = build_pool(tables, pool_table, order_seed=1), build_pool(tables, pool_table, order_seed=2)
    orders = [[pool.prompt_at(i) for i in range(31)] for pool in (one, other)]
    assert orders[0] != orders[1]
    assert set(orders[0]) == set(orders[1])
    assert one.held_out == other.held_out


def test_no_word_is_both_trained_and_held_out(tables):
    """The split goes by the word in any case, over all tasks."""
    pool = build_pool(tables, PoolTable(train_prompts=600, held_out_prompts=300))
    train = {pool.prompt_at(i).text.split()[-1].lower() for i in range(len(pool))}
    held_out = {prompt.text.split()[-1].lower() for prompt in pool.held_out}
    assert len(held_out) > 200
    assert not train & held_out


def test_held_out_is_mixed_over_tasks(tables):
    """A prefix of the held-out split holds every task."""
    pool = build_pool(tables, PoolTable(train_prompts=30, held_out_prompts=300))
    assert {prompt.task for prompt in pool.held_out[:30]} == set(tables)


def test_prompt_id_is_task_and_hash_of_the_text(tables, pool_table):
    """Ids are `task:16 hex digits` and distinct."""
    pool = build_pool(tables, pool_table)
    prompts = [*(pool.prompt_at(i) for i in range(31)), *pool.held_out]
    assert all(re.fullmatch(rf"{prompt.task}:[0-9a-f]{{16}}", prompt.prompt_id) for prompt in prompts)
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts)
    assert [pool.prompt(prompt.prompt_id) for prompt in prompts] == prompts


def test_real_prompts_stand_unaltered_in_the_pool(tables, pool_table):
    """A prompt of reasoning-gym is in the pool letter for letter, and its own scorer judges it."""
    pool = build_pool(tables, pool_table)
    prompt = next(p for p in pool.held_out if p.task == "backward")
    found = re.fullmatch(r"Spell this word backward \(example: sun -> nus\): (\w+)", prompt.text)
    assert found
    word = found[1]
    answers = [f"reverse <answer>{word[::-1]}</answer>", word[1:] + word[:1]]
    verdicts = pool.submit([(prompt.prompt_id, answer) for answer in answers]).result()
    assert [one.reward for one in verdicts] == [1.0, 0.0]


def test_tags_stand_before_the_prompt(pool_table):
    """Every prompt carries one of the task's tags, the same one each time."""
    table = TaskTable(source="words", dataset="trim", tags=["A:", "B:"])
    pool = build_pool({"trim": table}, pool_table)
    texts = [pool.prompt_at(i).text for i in range(31)]
    assert {text[:3] for text in texts} == {"A: ", "B: "}
    assert all(text[3:].startswith("Remove the first letter") for text in texts)


def test_long_prompts_are_left_out(pool_table):
    """`max_prompt_chars` bounds the text of the data set."""
    options = {"min_words": 1, "max_words": 1}
    table = TaskTable(source="reasoning_gym", dataset="letter_counting", options=options, max_prompt_chars=64)
    pool = build_pool({"count": table}, pool_table)
    assert max(len(prompt.text) for prompt in pool.held_out) <= 64


def test_too_small_data_set_is_refused(pool_table):
    """One line says how many prompts were found, how many were wanted, and what helps."""
    options = {"min_words": 1, "max_words": 1, "min_rotation": 1, "max_rotation": 1}
    table = TaskTable(source="reasoning_gym", dataset="caesar_cipher", options=options)
    with pytest.raises(
        TaskError, match=r"tasks\.caesar: .*too few distinct prompts.*wanted 31 and 14.*cure: lower pool"
    ):
        build_pool({"caesar": table}, pool_table)


def test_the_cure_names_the_part_that_lacks_prompts_and_the_limit_that_leaves_them_out(tmp_path):
    """Of a file with prompts for training alone, and of one whose prompts are too long."""
    rows = [json.dumps({"prompt": f"add {number} to itself", "reference": "1"}) for number in range(200)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    table = TaskTable(source="jsonl", dataset=str(tmp_path / "sums.jsonl"))
    wanted = PoolTable(train_prompts=20, held_out_prompts=150)
    with pytest.raises(TaskError, match=r"wanted 20 and 150; cure: lower pool\.held_out_prompts \(0 uses all rows\)$"):
        build_pool({"sums": table}, wanted)
    shorter = table.model_copy(update={"max_prompt_chars": 5})
    cure = r"raise tasks\.sums\.max_prompt_chars, which leaves out 200 longer prompts; or lower pool\.train_prompts"
    with pytest.raises(TaskError, match=rf"got '0 for training and 0 held out'; .*cure: {cure}"):
        build_pool({"sums": shorter}, wanted)


def test_unknown_prompt_id_is_refused(tables, pool_table):
    """An id that the pool does not hold is an error of its own, not a KeyError."""
    with pytest.raises(TaskError, match="not in the pool"):
        build_pool(tables, pool_table).prompt("swap:0000000000000000")


def test_no_label_is_read_where_the_collective_votes(tables, pool_table, monkeypatch):
    """Of a training prompt a right and a wrong answer have one verdict, and no scorer is asked; held-out ones are."""
    voted = {name: table.model_copy(update={"verifier": "collective"}) for name, table in tables.items()}
    pool = build_pool(voted, pool_table)
    held_out = next(prompt for prompt in pool.held_out if prompt.task == "swap")
    trained = next(pool.prompt_at(n) for n in range(31) if pool.prompt_at(n).task == "swap")
    try:
        right = {one.prompt_id: OPERATIONS["swap"](one.text.rpartition(": ")[2], "") for one in (held_out, trained)}
        asked = [(held_out.prompt_id, right[held_out.prompt_id]), (held_out.prompt_id, "wrong")]
        assert [(one.reward, one.is_voted) for one in pool.submit(asked).result()] == [(1.0, False), (0.0, False)]
        monkeypatch.setattr(WordSource, "score", lambda *_: pytest.fail("a label was read"))
        answers = [right[trained.prompt_id], " <answer> wrong</answer>", "<answer> </answer>"]
        verdicts = pool.submit([(trained.prompt_id, answer) for answer in answers]).result()
        assert [(one.reward, one.is_voted) for one in verdicts] == [(0.0, True)] * 3
        assert [one.extracted for one in verdicts] == [right[trained.prompt_id], "wrong", ""]
    finally:
        pool.close()
