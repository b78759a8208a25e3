"""The embedded engine samples what it says it samples, from the weights it says it serves."""

import numpy as np
import pytest
import torch

from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import GenerationRequest, ScoringRequest
from mrl.engines.sampling import answer_seeds
from mrl.errors import WeightsError
from mrl.models.parameters import named_weights
from mrl.models.scoring import score_answers
from mrl.records.version import Version, VersionSpan

EOS = 1


@pytest.fixture
def served(tiny_model):
    """An engine that serves version 0.3 of a tiny model, and the model."""

    def make(family: str = "qwen3", max_new_tokens: int = 12, temperature: float = 1.0):
        model = tiny_model(family, seed=1)
        engine = EmbeddedEngine(
            tiny_model(family, seed=2), eos_ids=[EOS], max_new_tokens=max_new_tokens, temperature=temperature
        )
        engine.load(named_weights(model))
        engine.release(Version(0, 3))
        return engine, model

    return make


def requests(count: int, group_size: int = 4) -> list[GenerationRequest]:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 12, size=count)
    return [
        GenerationRequest(rng.integers(2, 64, size=n).astype(np.int32), answer_seeds(0, "a", f"p{i}", 0, group_size))
        for i, n in enumerate(sizes)
    ]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_sampling_distribution(served, family, temperature):
    """Every log-probability equals a full forward of the published model at the sampling temperature."""
    engine, model = served(family, temperature=temperature)
    asked = requests(5)

    for request, answers in zip(asked, engine.generate(asked), strict=True):
        for answer in answers:
            ids = torch.tensor(np.concatenate([request.prompt_token_ids, answer.token_ids]).astype(np.int64))
            with torch.no_grad():
                logprobs = (model(ids[None]).logits[0] / temperature).log_softmax(-1)
            start = request.prompt_token_ids.size
            expected = logprobs[start - 1 : -1].gather(-1, ids[start:, None]).squeeze(-1)
            assert torch.allclose(torch.from_numpy(answer.logprobs), expected, atol=1e-4)


def test_what_is_sampled_does_not_depend_on_the_rows_beside_it(served):
    """A request alone gives the same answers as in a batch."""
    engine, _ = served()
    asked = requests(6)

    together, alone = engine.generate(asked), engine.generate(asked[4:5])

    for a, b in zip(together[4], alone[0], strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)


def test_defaults_of_the_model_folder_do_not_change_the_samples(served, tiny_model):
    """A repetition penalty or suppressed tokens in generation_config.json are ignored."""
    engine, model = served()
    other = tiny_model(seed=2)
    other.generation_config.repetition_penalty = 1.5
    other.generation_config.suppress_tokens = [5, 6, 7]
    shipped = EmbeddedEngine(other, eos_ids=[EOS], max_new_tokens=12, temperature=1.0)
    shipped.load(named_weights(model))
    shipped.release(Version(0, 3))

    for a, b in zip(engine.generate(requests(4)), shipped.generate(requests(4)), strict=True):
        assert all(np.array_equal(x.token_ids, y.token_ids) for x, y in zip(a, b, strict=True))


def test_any_of_several_eos_ids_ends_an_answer(served, tiny_model):
    """The first of them in an answer is its last token."""
    _, model = served()
    several = EmbeddedEngine(tiny_model(seed=2), eos_ids=[EOS, 9, 11], max_new_tokens=30, temperature=1.0)
    several.load(named_weights(model))
    several.release(Version(0, 3))
    answers = [answer for group in several.generate(requests(20, 8)) for answer in group]

    assert {int(a.token_ids[-1]) for a in answers if a.finished} == {EOS, 9, 11}
    assert not any(np.isin(a.token_ids[:-1], [EOS, 9, 11]).any() for a in answers)


def test_answers_end_at_eos_or_at_the_limit(served):
    """EOS appears once, at the end of a finished answer; an unfinished one has the full length and no EOS."""
    engine, _ = served(max_new_tokens=30)
    answers = [answer for group in engine.generate(requests(20, 8)) for answer in group]

    assert {answer.finished for answer in answers} == {True, False}
    for answer in answers:
        assert (answer.token_ids[:-1] != EOS).all()
        assert (answer.token_ids[-1] == EOS) == answer.finished
        assert answer.finished or answer.token_ids.size == 30
        assert answer.versions == [VersionSpan(answer.token_ids.size, Version(0, 3))]
        assert answer.logprobs.size == answer.token_ids.size


def test_loaded_weights_are_not_served_before_their_release(served, tiny_model):
    """From a load until its release the engine samples nothing."""
    engine, _ = served()
    engine.load(named_weights(tiny_model(seed=5)))

    assert engine.version is None
    with pytest.raises(WeightsError, match="no verified weights"):
        engine.generate(requests(1))
    engine.release(Version(0, 4))
    assert engine.generate(requests(1))[0][0].versions[0].version == Version(0, 4)


def test_weights_that_do_not_fit_leave_the_served_version(served, tiny_model):
    """A load that is refused changes nothing."""
    engine, _ = served()

    with pytest.raises(WeightsError, match="do not fit"):
        engine.load(named_weights(tiny_model(vocab_size=72)))

    assert engine.version == Version(0, 3)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_of_sampled_answers_are_what_they_were_sampled_with(served, temperature):
    """Scoring what the engine sampled gives the log-probabilities of the sampling, EOS included."""
    engine, _ = served(temperature=temperature)
    asked = requests(3)

    for request, answers in zip(asked, engine.generate(asked), strict=True):
        scored = engine.score_answers(ScoringRequest(request.prompt_token_ids, [a.token_ids for a in answers]))
        for answer, logprobs in zip(answers, scored, strict=True):
            np.testing.assert_allclose(logprobs, answer.logprobs, atol=1e-4)
    assert engine.score_answers(ScoringRequest(asked[0].prompt_token_ids, [])) == []


def test_scoring_is_split_by_what_is_asked_alone(tiny_model):
    """One forward for all answers or one for each: the same log-probabilities; an unserved engine scores nothing."""
    model, prompt = tiny_model(), np.array([5, 6], dtype=np.int32)
    answers = [np.arange(2, 2 + n, dtype=np.int32) for n in (1, 7, 3)]
    whole = score_answers(model, prompt, answers, temperature=1.0)
    single = score_answers(model, prompt, answers, temperature=1.0, max_logits=1)

    assert [row.size for row in whole] == [1, 7, 3]
    for one, other in zip(whole, single, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    engine = EmbeddedEngine(model, eos_ids=[EOS], max_new_tokens=4, temperature=1.0)
    with pytest.raises(WeightsError, match="no verified weights"):
        engine.score_answers(ScoringRequest(prompt, answers))
