"""One policy answers and the other checks, and the run trains both: mrl train examples/answer_and_check.toml."""

import asyncio
import random
import re
import string

TRIM = "Remove the first letter of this word (example: sun -> un): {}"
CAPITAL = "Write this word in capitals (example: sun -> SUN): {}"


async def answer_and_check(clients, row):
    """Which policy answers, and which one checks, follows from the row; each gets a reward of its own."""
    rng = random.Random(f"word {row['seed']}")
    answers, checks = rng.sample(sorted(clients), 2)
    asked, word = rng.choice([TRIM, CAPITAL]), "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 4)))
    question, right = {"role": "user", "content": asked.format(word)}, word[1:] if asked is TRIM else word.upper()

    async def ask(name, *talk):
        choice = (await clients[name].chat.completions.create(model="policy", messages=talk)).choices[0]
        return choice.message.content, choice.finish_reason == "length"

    async def ask_again(name, words):
        said, is_cut = first[name]  # behind a turn that was cut there is no other
        talk = question, {"role": "assistant", "content": said}, {"role": "user", "content": words}
        return "" if is_cut else (await ask(name, *talk))[0]

    # Both have their turns at the same time, since the run is synchronous; words of the other come in the second.
    first = dict(zip(clients, await asyncio.gather(*(ask(name, question) for name in clients)), strict=True))
    answer, own = found(first[answers][0]), found(first[checks][0])
    check, again = f"Another says {answer}. Right or wrong?", f"Another says {own}. And you?"
    verdict, last = await asyncio.gather(ask_again(checks, check), ask_again(answers, again))
    is_seen = bool(verdict) and ("right" in verdict.lower()) == (answer == right)
    return {answers: ((answer == right) + (found(last) == right)) / 2, checks: ((own == right) + is_seen) / 2}


def found(text):
    """What stands in the answer's tags, in short."""
    return tagged[1] if (tagged := re.search(r"<answer>(.{0,9})</answer>", text)) else text[:9]
