"""The verifier that asks a language model: a question from a template, and a score from the model's reply.

It runs in verifier processes as any verifier of a task does; their environment holds the task's table `judge`. A reward
is kept on disk by its question: address, model and text. A reply without a score within the bounds is a failure of the
verifier, which is counted; no number is made up.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mrl.config.task_tables import JudgeTable, TaskTable
from mrl.files import replace_file
from mrl.metrics.trackers.own_secrets import hidden
from mrl.tasks.judging.judge_request import JudgeBounds, JudgeError, ask
from mrl.tasks.rewards import JudgeCosts
from mrl.tasks.verifier_process import WALL_FACTOR

SETTINGS = "MRL_JUDGE"
"""Environment variable with the table as JSON, and the seconds that there are for an answer."""
SOONER = 0.9
"""Part of a process's time after which the judge gives up, so that it can still say why."""
MAX_SHOWN_CHARS = 120
_PLACE = re.compile(r"\{(prompt|answer|reference)\}")


class JudgedReward(float):
    """A reward with its cost."""

    spent: JudgeCosts

    @classmethod
    def of(cls, reward: float, spent: JudgeCosts) -> "JudgedReward":
        """Return a reward with its cost."""
        judged = cls(reward)
        judged.spent = spent
        return judged


def judge_environment(table: TaskTable, environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return the environment of a task's verifier processes; None, for this process's own, without a judge."""
    if table.judge is None:
        return None
    total_s = SOONER * WALL_FACTOR * table.verifier_timeout_s
    return dict(environment) | {SETTINGS: json.dumps({"judge": table.judge.model_dump(), "total_s": total_s})}


def judge(reference: str, answer: str, prompt: str) -> JudgedReward:
    """Return the reward that the judge gives, between 0 and 1 for scores between `least` and `most`.

    Raises JudgeError where the judge gives no score.
    """
    table, total_s = _settings(os.environ[SETTINGS])
    body = question(table, prompt=prompt, answer=answer, reference=reference)
    kept = _file_of(table, body)
    known = _read(kept)
    if known is not None:
        return JudgedReward.of(known, JudgeCosts(cached=1))
    try:
        reply, spent = ask(_address(table), body, _headers(table), _bounds(table, total_s))
        spent = spent.plus(_tokens(reply))
        reward = _reward(table, reply, spent)
    except JudgeError as error:
        raise JudgeError(_without_key(table, str(error)), error.spent) from None
    if kept is not None:
        _keep(kept, reward)
    return JudgedReward.of(reward, spent)


def question(table: JudgeTable, *, prompt: str, answer: str, reference: str) -> dict[str, Any]:
    """Return the body of the request. Braces in a prompt or an answer are not part of the template."""
    parts = {"prompt": prompt, "answer": answer, "reference": reference}
    text = _PLACE.sub(lambda place: parts[place[1]], table.template)
    messages = [{"role": "system", "content": table.system}] * bool(table.system)
    return {
        "model": table.model,
        "messages": [*messages, {"role": "user", "content": text}],
        "temperature": 0.0,
        "max_tokens": table.max_tokens,
        **table.options,
    }


def score_in(table: JudgeTable, text: str) -> float | None:
    """Return the last score in a judge's reply; None where there is none, or it is no number within the bounds."""
    found = [match[1] for match in re.finditer(table.score, text)]
    try:
        score = float(found[-1])
    except (IndexError, TypeError, ValueError):
        return None
    return score if table.least <= score <= table.most else None


@cache
def _settings(text: str) -> tuple[JudgeTable, float]:
    found = json.loads(text)
    return JudgeTable.model_validate(found["judge"]), float(found["total_s"])


def _address(table: JudgeTable) -> str:
    return table.url.rstrip("/") + "/chat/completions"


def _bounds(table: JudgeTable, total_s: float) -> JudgeBounds:
    return JudgeBounds(table.timeout_s, total_s, table.retries, table.backoff_s)


def _headers(table: JudgeTable) -> dict[str, str]:
    if not table.key_variable:
        return {}
    key = os.environ.get(table.key_variable, "").strip()
    if not key:
        raise JudgeError(f"the environment variable {table.key_variable} for the judge's key is not set", JudgeCosts())
    if not (key.isascii() and key.isprintable()):
        raise JudgeError(
            f"the key in {table.key_variable} has characters that an HTTP header cannot hold", JudgeCosts()
        )
    return {"Authorization": f"Bearer {key}"}


def _without_key(table: JudgeTable, words: str) -> str:
    """Return a message without the judge's key: a server's reply may repeat the request."""
    key = os.environ.get(table.key_variable, "").strip() if table.key_variable else ""
    return hidden(words.replace(key, "***") if key else words, os.environ)


def _tokens(reply: Mapping[str, Any]) -> JudgeCosts:
    usage = reply.get("usage")
    told = usage if isinstance(usage, dict) else {}
    counts = [told.get(name) for name in ("prompt_tokens", "completion_tokens")]
    return JudgeCosts(0, *(count if type(count) is int and count >= 0 else 0 for count in counts))


def _reward(table: JudgeTable, reply: Mapping[str, Any], spent: JudgeCosts) -> float:
    try:
        text = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str):
        raise JudgeError("the reply has no choices[0].message.content", spent)
    score = score_in(table, text)
    if score is None:
        wanted = f"a score from {table.least:g} to {table.most:g} that matches {table.score!r}"
        raise JudgeError(f"the judge said {text[-MAX_SHOWN_CHARS:]!r}; wanted {wanted}", spent)
    return (score - table.least) / (table.most - table.least)


def _file_of(table: JudgeTable, body: Mapping[str, Any]) -> Path | None:
    """Return the path of a question's kept reward, named by all that determines the reward; None without a cache."""
    if not table.cache:
        return None
    address = urlsplit(table.url)
    place = f"{address.hostname}:{address.port}{address.path}"  # a user name in the address changes nothing
    known_by = [place, body, table.score, table.least, table.most]
    name = hashlib.blake2b(json.dumps(known_by, sort_keys=True).encode(), digest_size=20).hexdigest()
    root = os.environ.get("MRL_CACHE") or Path.home() / ".cache" / "mrl"
    return Path(root) / "judge" / name[:2] / name[2:]


def _read(file: Path | None) -> float | None:
    """Return a kept reward; None where there is none, or the file holds no reward."""
    if file is None:
        return None
    try:
        reward = float(file.read_bytes())
    except (OSError, ValueError):
        return None
    return reward if 0.0 <= reward <= 1.0 else None


def _keep(file: Path, reward: float) -> None:
    """Keep a reward. With a full disk the question is only asked again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, repr(reward).encode(), sync=False)
    except OSError:
        pass
