import time

import pytest

from mrl.tasks.extract import boxed_answer, stated_answer, tagged_answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [("<answer>4</answer>", "4"), ("<answer>3</answer> no, <answer> 4\n</answer> yes", "4"), (" 4\n", "4"),
     ("<answer>4", "<answer>4"), ("a <answer></answer>", ""), ("", ""), ("4</answer>", "4</answer>"),
     ("<answer>1</answer> x </answer>", "1")],
)  # fmt: skip
def test_the_last_answer_tag_counts(completion, answer):
    """The last closed tag wins; without one the whole text is the answer."""
    assert tagged_answer(completion) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [(r"\boxed{5}", "5"), (r"\boxed{3} then \boxed{ 4 }", "4"), (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
     (r"\fbox{7}", "7"), (r"$\boxed 8$", "8"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed{\boxed{6}}", "6"),
     (r"\boxed{\left\{x\right.}", r"\left\{x\right."), (r"\boxed{5} or \boxed{6", ""), (r"\boxedness{5}", ""),
     ("five", ""), (r"\boxed{}", ""), (r"\boxed{" + "1" * 1100 + "}", ""), ("\\boxed{a\nb}", "a\nb")],
)  # fmt: skip
def test_the_last_box_counts(text, answer):
    """Braces are matched; an unfinished last box, as in an answer that was cut, is no answer."""
    assert boxed_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [("The answer is 5.", "5"), ("answer: 5", "5"), ("**Answer:** $x = 2$ as was asked", "x = 2"), ("#### 72", "72"),
     ("Final Answer: The final answer is $12$. I hope it is correct.", "12"), ("The answer is 3.5. So", "3.5"),
     ("first the answer is 1\nthen the answer is \\(2\\).", "2"), ("5", ""), ("the answers are many", ""),
     ("answer is 5" + " " * 1100, "")],
)  # fmt: skip
def test_the_last_statement_counts(text, answer):
    """Up to the end of its sentence, without signs around it; only the end of a text is searched."""
    assert stated_answer(text) == answer


@pytest.mark.parametrize("piece", ["<answer>", "</answer>", "\\boxed{", "{", "\\", "answer is ", "#", "$"])
def test_a_megabyte_of_anything_takes_no_time(piece):
    """No text of a policy can hold up the process that extracts."""
    text = piece * (1_000_000 // len(piece))
    started_s = time.process_time()
    for extract in (tagged_answer, boxed_answer, stated_answer):
        extract(text)
    assert time.process_time() - started_s < 1.0
