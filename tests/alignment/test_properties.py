"""The properties, over generated answers, and what the generators must contain."""

from collections.abc import Callable, Mapping, Sequence
from random import Random

import pytest

from mrl.alignment.peer_answer import PeerAnswer
from tests.support.alignment_properties import CHECKS
from tests.support.alignment_properties.generated import (
    ADDED,
    CLASSES,
    ONLY_ANY_SEGMENTATION,
    make_answer,
    sampled_answer,
    text_for,
)
from tests.support.alignment_properties.kinds import KINDS, METASPACE, Receivers, load

SEEDS = range(2)
MIN_SHARE = 0.02
NFC_KINDS = ("byte_level_nfc",)


@pytest.fixture(scope="module")
def receivers(folders):
    return load(folders)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CHECKS)
def test_property(receivers, name, seed):
    """Every property holds for every seed."""
    CHECKS[name](receivers, Random(seed))


def too_rare(classes: Mapping[str, Callable[[PeerAnswer], bool]], answers: Sequence[PeerAnswer]) -> list[str]:
    """Classes that fewer than `MIN_SHARE` of the answers are of."""
    return [name for name, is_one in classes.items() if sum(map(is_one, answers)) < MIN_SHARE * len(answers)]


def sampled_by(receivers: Receivers, kind: str, size: int) -> list[PeerAnswer]:
    random, source = Random(0), receivers[kind]
    return [sampled_answer(random, source, text_for(random, source, metaspace=kind in METASPACE)) for _ in range(size)]


def test_any_segmentation_contains_every_class():
    """Peers of no known kind: specials and silent tokens anywhere, cut and broken texts, every kind of character."""
    random = Random(0)
    assert too_rare(CLASSES | ONLY_ANY_SEGMENTATION, [make_answer(random) for _ in range(500)]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_answers_contain_every_class(receivers, kind):
    """Every kind says everything, but for what its normalizer or its marks keep it from saying."""
    answers = sampled_by(receivers, kind, 250)
    assert too_rare(CLASSES, answers) == (["not in NFC"] if kind in NFC_KINDS else [])
    pieces, added = receivers[kind].table.pieces, {content.encode() for content in ADDED}
    says_added = {"as a token": lambda answer: any(pieces[index] in added for index in answer.token_ids.tolist())}
    assert too_rare(says_added, answers) == []


@pytest.mark.parametrize("name", [*CLASSES, *ONLY_ANY_SEGMENTATION])
def test_a_class_that_is_missing_is_noticed(name):
    """Without the answers of a class the class is reported."""
    random, classes = Random(0), CLASSES | ONLY_ANY_SEGMENTATION
    others = [answer for answer in (make_answer(random) for _ in range(500)) if not classes[name](answer)]
    assert others
    assert name in too_rare(classes, others)
