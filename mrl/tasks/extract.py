r"""The place of the answer in a completion: in tags, in \boxed{}, or after "the answer is".

Every function takes time linear in the completion, which may be a megabyte of anything.
"""

import hashlib
import re

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
STATED = re.compile(r"(?i)\banswer\s*(?:is\b|:|=)[ \t:=]*|####[ \t]*")
SENTENCE_END = re.compile(r"\.(?:\s|$)|\n")
TAIL_CHARS = 1_000
"""Characters at the end of a completion in which a stated answer is looked for."""
MAX_ANSWER_CHARS = 1_000
"""Longest answer; a longer one counts as no answer."""


def tagged_answer(completion: str) -> str:
    """Return the content of the last `<answer>...</answer>`, or the whole completion without one; stripped.

    >>> tagged_answer("reverse <answer>nus</answer>")
    'nus'
    """
    start = completion.rfind("<answer>", 0, completion.rfind("</answer>") + 1)
    found = ANSWER.match(completion, start) if start >= 0 else None
    return (found[1] if found else completion).strip()


def boxed_answer(text: str) -> str:
    r"""Return the content of the last \boxed{...} or \fbox{...}; "" without one, or when its brace is not closed.

    >>> boxed_answer(r"so \boxed{3}, no, \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    >>> boxed_answer(r"so \boxed 7$ it is")
    '7'
    """
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    found = BOX.match(text, start) if start >= 0 else None
    if found is None:
        return ""
    inside = text[found.end() : found.end() + MAX_ANSWER_CHARS + 2]
    return _braced(inside) if inside.startswith("{") else re.split(r"[\s$]", inside, maxsplit=1)[0]


def stated_answer(text: str) -> str:
    """Return the text after the last "answer is", "answer:" or "####", up to the end of the sentence; "" without one.

    >>> stated_answer("Final Answer: The final answer is $12$. I hope it is correct.")
    '12'
    >>> stated_answer("5 + 4 = 9 so the answer is 9 apples.")
    '9 apples'
    """
    tail = text[-TAIL_CHARS:]
    ends = [found.end() for found in STATED.finditer(tail)]
    if not ends:
        return ""
    rest = tail[ends[-1] :].strip().strip("*").strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if rest.startswith(opening) and closing in rest[len(opening) :]:
            return rest[len(opening) :].split(closing, 1)[0].strip()
    return SENTENCE_END.split(rest, maxsplit=1)[0].strip().strip("*").strip()


def choice_of(extracted: str) -> str:
    """Return 16 hex digits, equal for equal extracted answers; "" for an empty answer."""
    return hashlib.blake2b(extracted.encode(errors="replace"), digest_size=8).hexdigest() if extracted else ""


def _braced(text: str) -> str:
    r"""Return the content of the braces that begin `text`; an escaped brace (in \{1, 2\}) opens and closes nothing."""
    depth = 0
    for found in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0 and found[0] == "}":
            return text[1 : found.start()].strip()
    return ""
