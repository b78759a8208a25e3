"""Was the answer right? Extraction, and the verdict."""

import re
from dataclasses import dataclass

from mrl.tasks.source import Item, Source

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reward` is 1.0 for a right answer and else 0.0; `raw_score` is the data set's own number, for display only.

    Scorers give partial credit even to nonsense, which is why training never sees `raw_score`.
    """

    reward: float
    raw_score: float
    extracted: str


def extract_answer(completion: str) -> str:
    """What stands in the last `<answer>...</answer>`, or the whole completion without one; stripped.

    >>> extract_answer("reverse <answer>nus</answer>")
    'nus'
    """
    found = ANSWER.findall(completion)
    return (found[-1] if found else completion).strip()


def judge(source: Source, item: Item, completion: str) -> Verdict:
    """The verdict on a completion: right means that the data set's own scorer gives exactly 1.0."""
    extracted = extract_answer(completion)
    raw_score = source.score(item, extracted)
    return Verdict(1.0 if raw_score == 1.0 else 0.0, raw_score, extracted)
