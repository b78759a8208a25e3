import random
from collections import Counter

import pytest

from mrl.config.task_tables import PoolTable, TaskTable
from mrl.errors import TaskError
from mrl.tasks.pool import build_pool
from mrl.tasks.warm_start_examples import collect_examples, operation_shares

OPERATIONS = ["reverse", "swap", "rotate", "trim"]


def test_shares_on_an_own_and_on_a_foreign_task():
    """Rare operations keep their share everywhere; the right one of the skilled ones leads on its own task only."""
    own = operation_shares(OPERATIONS, ["reverse", "swap"], 0.02, right="swap")
    foreign = operation_shares(OPERATIONS, ["reverse", "swap"], 0.02, right="trim")
    assert own == pytest.approx({"reverse": 0.24, "swap": 0.72, "rotate": 0.02, "trim": 0.02})
    assert foreign == pytest.approx({"reverse": 0.48, "swap": 0.48, "rotate": 0.02, "trim": 0.02})


@pytest.mark.parametrize("skilled_in", [[], OPERATIONS, ["trim"]])
def test_shares_sum_to_one(skilled_in):
    """Also without skills, with all, and with a single one."""
    for right in OPERATIONS:
        assert sum(operation_shares(OPERATIONS, skilled_in, 0.05, right=right).values()) == pytest.approx(1.0)


def test_shares_that_leave_nothing_are_refused():
    """Rare operations cannot take everything."""
    with pytest.raises(TaskError, match="rare_share leaves no probability"):
        operation_shares(OPERATIONS, ["trim"], 0.4, right="trim")


def test_examples_are_executed_correctly_and_drawn_by_the_prior(tables, pool_table):
    """Every completion names an operation and gives its result; a foreign task gets its own one rarely."""
    examples = collect_examples(tables, pool_table, skilled_in=["swap"], rare_share=0.1)
    rng = random.Random(0)
    named = Counter()
    for _ in range(2000):
        ((prompt, completion),) = examples.draw(rng, practice=False).turns
        word = prompt.split()[-1]
        results = {"reverse": word[::-1], "swap": word[1] + word[0] + word[2:], "rotate": word[1:] + word[0]}
        operation = completion.split()[0]
        assert completion == f"{operation} <answer>{results[operation]}</answer>"
        named[("backward" in prompt, operation)] += 1
    foreign = {operation: named[(True, operation)] for operation in results}
    assert foreign["reverse"] / sum(foreign.values()) == pytest.approx(0.1, abs=0.03)
    assert foreign["swap"] / sum(foreign.values()) == pytest.approx(0.8, abs=0.05)


def test_practice_shows_all_operations_equally(tables, pool_table):
    """Under the neutral prompt the skewed prior plays no role."""
    examples = collect_examples(tables, pool_table, skilled_in=["swap"], rare_share=0.01)
    rng = random.Random(0)
    drawn = [turn for _ in range(1500) for turn in examples.draw(rng, practice=True).turns]
    assert all(prompt.startswith("Practice: ") for prompt, _ in drawn)
    counts = Counter(completion.split()[0] for _, completion in drawn)
    assert all(count == pytest.approx(500, rel=0.2) for count in counts.values())
    assert len(counts) == 3


def test_warm_start_and_pool_share_no_word(tables):
    """No subject of an example occurs in a training or held-out prompt of any task."""
    pool_table = PoolTable(train_prompts=300, held_out_prompts=150)
    pool = build_pool(tables, pool_table)
    used = {pool.prompt_at(i).text.split()[-1].lower() for i in range(300)}
    used |= {prompt.text.split()[-1].lower() for prompt in pool.held_out}
    examples = collect_examples(tables, pool_table, skilled_in=[], rare_share=0.0)
    rng = random.Random(0)
    shown = {examples.draw(rng, practice=i % 2 == 0).turns[0][0].split()[-1].lower() for i in range(3000)}
    assert not used & shown


def test_unknown_operation_and_skill_are_refused(tables, pool_table):
    """Names that no task knows are refused with the ones that exist."""
    wrong = {"swap": TaskTable(source="words", dataset="swap", operation="swapp")}
    with pytest.raises(TaskError, match=r"tasks\.swap: operation does not exist; got 'swapp'; .*did you mean 'swap'"):
        collect_examples(wrong, pool_table, skilled_in=[], rare_share=0.0)
    with pytest.raises(TaskError, match="skilled_in names an operation or game that no task has; got 'trim'"):
        collect_examples(tables, pool_table, skilled_in=["trim"], rare_share=0.0)


def test_data_set_without_subject_cannot_be_practised(pool_table):
    """A data set that is not about one word has no warm start; the message says what to do."""
    sums = {"sums": TaskTable(source="reasoning_gym", dataset="chain_sum", operation="reverse")}
    with pytest.raises(
        TaskError, match=r"tasks\.sums: the warm start does not support this data set.*remove `operation`"
    ):
        collect_examples(sums, pool_table, skilled_in=[], rare_share=0.0)
