# ruff: noqa: RUF001
"""The texts on which a pair card is made when none are given: one list of rows per kind, the same on every call.

math          worked word problems, digits in every line; where tokenizers differ most
prose         documentation of the Python language, from the standard library
code          sources of the standard library
multilingual  one or two sentences in twenty-one languages and ten scripts
adversarial   decomposed characters, emoji with joiners, controls, literals of special tokens and of the metaspace mark
"""

import argparse
import inspect
import random
import re
import textwrap
from collections import Counter
from pydoc_data.topics import topics

ROW_CHARACTERS = 1200
NUMBER_DRAWS = 20_000
NUMBER_SHARE = 0.12
NUMBER_LENGTHS = (6, 6, 4, 3, 1, 1)
"""Weights of numbers of one to six digits: small numbers are common, as in worked problems."""
NAMES = ("Natalia", "Weng", "Betty", "Julie", "Tobias", "Mark", "Albert", "Ken")
THINGS = ("apples", "clips", "pages", "stickers", "marbles", "eggs", "pounds of flour", "dollars")

LANGUAGES = {
    "en": "All human beings are born free and equal in dignity and rights. They are endowed with reason.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen begabt.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison.",
    "es": "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados como están de razón.",
    "pt": "Todos os seres humanos nascem livres e iguais em dignidade e em direitos. Dotados de razão.",
    "pl": "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw. Są oni obdarzeni rozumem.",
    "cs": "Všichni lidé rodí se svobodní a sobě rovní co do důstojnosti a práv. Jsou nadáni rozumem a svědomím.",
    "fi": "Kaikki ihmiset syntyvät vapaina ja tasavertaisina arvoltaan ja oikeuksiltaan.",
    "hu": "Minden emberi lény szabadon születik és egyenlő méltósága és joga van.",
    "tr": "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar. Akıl ve vicdana sahiptirler.",
    "vi": "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền lợi.",
    "ru": "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и совестью.",
    "uk": "Всі люди народжуються вільними і рівними у своїй гідності та правах. Вони наділені розумом і совістю.",
    "el": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.",
    "ar": "يولد جميع الناس أحراراً متساوين في الكرامة والحقوق. وقد وهبوا عقلاً وضميراً.",
    "he": "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם.",
    "hi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
    "th": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
    "ja": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "zh": "人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心,并应以兄弟关系的精神相对待。",
    "ko": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
}

ADVERSARIAL = (
    "cafe\u0301 \u212b \uf900 \u1112\u1161\u11ab\u1100\u1173\u11af",
    "\U0001f469\u200d\U0001f52c \U0001f1e9\U0001f1ea \U0001f9d1\U0001f3fd\u200d\U0001f680 \U0001d4b3\U0001f9a9",
    "a\u00a0b\u200bc\ufeffd\u2028e\x0bf\x1bg\x7fh",
    "line\r\nline\rline\n\n\n   indented\t\tend ",
    "<|im_end|></s><s>[INST]<unk><|endoftext|><think>",
    "literal \u2581 mark and \u0120 mark and <0x0A>",
    "1234567890 3.14159 1,000,000 0x7fff 12:34:56 -0.001e-10",
    "\u00bd \ufb01 \u2460 \uff21 \u33a5 \u0130 \u1e9e",
)


def card_texts() -> dict[str, list[str]]:
    """Return kind of text -> rows."""
    return {
        "math": [_problem(random.Random(seed)) for seed in range(300)],
        "prose": rows_of("\n\n".join(topics[name] for name in sorted(topics)), limit=300),
        "code": rows_of("\n".join(map(inspect.getsource, (argparse, inspect, textwrap))), limit=200),
        "multilingual": list(LANGUAGES.values()),
        "adversarial": list(ADVERSARIAL),
    }


def rows_of(text: str, *, limit: int | None = None) -> list[str]:
    """Cut a long text at line ends into rows of about `ROW_CHARACTERS`, at most `limit` of them."""
    rows, current, size = [], list[str](), 0
    for line in text.splitlines(keepends=True):
        current.append(line)
        size += len(line)
        if size >= ROW_CHARACTERS:
            rows.append("".join(current))
            current, size = [], 0
    return ([*rows, "".join(current)] if current else rows)[:limit]


def word_frequencies(num_words: int = 12_000) -> tuple[tuple[str, ...], list[float]]:
    """Return words of the prose with their probabilities, and numbers that make up `NUMBER_SHARE` of the probability.

    They are the source of the zero-difference floor: words and numbers as they stand in technical text.
    """
    counts = Counter(re.findall(r"[A-Za-z]+", " ".join(topics.values())))
    words = counts.most_common(num_words)
    total = sum(count for _, count in words)
    rng = random.Random(0)
    lengths = rng.choices(range(1, 7), NUMBER_LENGTHS, k=NUMBER_DRAWS)
    numbers = Counter(str(rng.randrange(10**length)) for length in lengths)
    probabilities = [(1 - NUMBER_SHARE) * count / total for _, count in words]
    probabilities += [NUMBER_SHARE * count / NUMBER_DRAWS for count in numbers.values()]
    return (*(word for word, _ in words), *numbers), probabilities


def _problem(rng: random.Random) -> str:
    """Return a word problem and its worked answer, every step with its calculation."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    first, rate, days = rng.randint(3, 480), rng.randint(2, 60), rng.randint(2, 24)
    price, given = rng.randint(1, 40), rng.randint(1, 90)
    made, total = rate * days, first + rate * days
    kept = max(0, total - given)
    return (
        f"{name} has {first} {thing} and gets {rate} more on each of {days} days. {given} are given away and the rest "
        f"is sold for ${price}.50 apiece. How much money is made?\n"
        f"In {days} days there are {rate} * {days} = <<{rate}*{days}={made}>>{made} more {thing}.\n"
        f"Together that is {first} + {made} = <<{first}+{made}={total}>>{total}.\n"
        f"After giving away {given}, {total} - {given} = {kept} remain, which is {100 * kept / total:.1f}%.\n"
        f"They sell for {kept} * {price}.5 = ${kept * price + kept / 2:,.2f}.\n#### {kept * price + kept // 2}\n"
    )
