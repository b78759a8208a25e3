"""The embedded engine samples what it says it samples, from the weights it says it serves."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.engines.embedded import EmbeddedEngine, _Reading
from mrl.engines.engine import EngineUsage, GenerationRequest, Sampling, ScoringRequest, generate_all
from mrl.engines.token_sampling import answer_seeds
from mrl.errors import DeviceError, ModelFolderError, WeightsError
from mrl.models.parameters import named_weights
from mrl.models.scoring import score_answers, score_tokens
from mrl.records.version import Version, VersionSpan

EOS = 1
WEIGHTS = "model.safetensors"
TOO_MANY_BYTES = 1 << 50


@pytest.fixture
def save(tiny_model, tmp_path):
    """Write a tiny model into a folder."""

    def write(name: str, **kind) -> Path:
        tiny_model(**kind).save_pretrained(tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text("{}")
        return tmp_path / name

    return write


@pytest.fixture
def make(save):
    """An engine that serves version 0.3."""

    def engine(
        *,
        eos_ids: tuple[int, ...] = (EOS,),
        max_new_tokens: int = 12,
        temperature: float = 1.0,
        max_running: int = 64,
        folder: Path | None = None,
        dtype: str = "float32",
    ) -> EmbeddedEngine:
        sampling = Sampling(temperature, max_new_tokens, eos_ids)
        made = EmbeddedEngine(
            folder or save("model", seed=1), sampling, device="cpu", max_running=max_running, dtype=dtype
        )
        made.label(Version(0, 3))
        return made

    return engine


def requests(count: int, group_size: int = 4) -> list[GenerationRequest]:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 12, size=count)
    return [
        GenerationRequest(
            f"r{i}", rng.integers(2, 64, size=n).astype(np.int32), answer_seeds(0, "a", f"p{i}", 0, group_size)
        )
        for i, n in enumerate(sizes)
    ]


def tokens(engine: EmbeddedEngine, asked: list[GenerationRequest]) -> list[list[int]]:
    return [answer.token_ids.tolist() for group in generate_all(engine, asked) for answer in group]


def test_defaults_of_the_model_folder_do_not_change_the_samples(make, save):
    """A repetition penalty or suppressed tokens in generation_config.json are ignored."""
    shipped = save("shipped", seed=1)
    (shipped / "generation_config.json").write_text('{"repetition_penalty": 1.5, "suppress_tokens": [5, 6, 7]}')

    assert tokens(make(), requests(4)) == tokens(make(folder=shipped), requests(4))


def test_answers_end_at_any_eos_or_at_the_limit(make):
    """An EOS stands at the end of a finished answer alone; an unfinished one has the full length and no EOS."""
    ends = {EOS, 9, 11}
    engine = make(eos_ids=tuple(ends), max_new_tokens=30)
    answers = [answer for group in generate_all(engine, requests(20, 8)) for answer in group]

    assert {int(answer.token_ids[-1]) for answer in answers if answer.finished} == ends
    assert not all(answer.finished for answer in answers)
    for answer in answers:
        assert ends.isdisjoint(answer.token_ids[:-1].tolist())
        assert (answer.token_ids[-1] in ends) == answer.finished
        assert answer.finished or answer.token_ids.size == 30
        assert answer.versions == [VersionSpan(answer.token_ids.size, Version(0, 3))]
        assert answer.logprobs.size == answer.token_ids.size


def test_nothing_is_sampled_or_scored_without_weights_to_serve(make):
    """Before its first label, and after a restart, an engine has no version and says so."""
    engine = make()
    engine.restart()

    assert engine.version is None
    with pytest.raises(WeightsError, match="no verified weights"):
        engine.submit(requests(1))
    with pytest.raises(WeightsError, match="no verified weights"):
        engine.score_answers(ScoringRequest(np.array([5], dtype=np.int32), []))


def test_loaded_weights_are_those_that_sample(make, save):
    """After a load answers and scores are those of the new folder, labelled with its version."""
    engine, other = make(), save("other", seed=5)

    engine.load(other, Version(0, 4))

    answers = generate_all(engine, requests(4))
    assert engine.version == Version(0, 4)
    assert {span.version for group in answers for a in group for span in a.versions} == {Version(0, 4)}
    assert [a.token_ids.tolist() for group in answers for a in group] == tokens(make(folder=other), requests(4))


def test_answers_go_on_over_weights_that_another_thread_loads(make, save):
    """While one thread collects without a pause, another's load takes effect; what was in flight has both versions."""
    engine, other = make(max_new_tokens=1500, eos_ids=(99,), max_running=4), save("other", seed=5)
    engine.submit(requests(1))
    with ThreadPoolExecutor(1) as thread:
        collecting = thread.submit(engine.collect, 60.0)
        while not engine.usage().generated_tokens:
            pass
        engine.load(other, Version(0, 4))
        answers = collecting.result()

    assert len(answers) == 4
    for answer in answers:
        old, new = answer.generation.versions
        assert (old.version, new.version) == (Version(0, 3), Version(0, 4))
        assert old.num_tokens + new.num_tokens == 1500


def test_a_load_waits_for_one_forward_at_most(make):
    """Whoever comes between two forwards is never passed over: of 50 that come in mid-forward, all go next."""
    engine = make(max_new_tokens=60, eos_ids=(99,), max_running=4)
    engine.submit(requests(1))
    asked_at, came_at, labels = [], [], []
    forwards = 0
    step, relabel = engine._batch.step, engine._batch.relabel

    def counted():
        nonlocal forwards
        forwards += 1
        if len(came_at) == len(asked_at) < 50:
            asked_at.append(forwards)
            labels.append(thread.submit(engine.label, Version(0, 4)))
            while not engine._turn.locked():
                pass
        return step()

    def noted(version: Version) -> None:
        came_at.append(forwards)
        relabel(version)

    engine._batch.step, engine._batch.relabel = counted, noted
    with ThreadPoolExecutor(1) as thread:
        engine.collect(60.0)
    assert [label.result() for label in labels] == [None] * 50
    assert came_at == asked_at


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda weights: weights | {"extra": torch.zeros(2)}, r"unknown tensor extra"),
        (lambda weights: {k: v for k, v in weights.items() if "norm.weight" not in k}, "missing tensors"),
        (
            lambda weights: weights | {"model.norm.weight": torch.zeros(3)},
            r"norm.weight has shape \(3,\), wanted",
        ),
        (
            lambda weights: weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1},
            "are tied in the model, but their values differ",
        ),
    ],
)
def test_weights_that_do_not_fit_change_nothing(make, save, damage, message):
    """A load that is refused leaves version and weights."""
    engine, other = make(), save("other", seed=5)
    save_file(damage(load_file(other / WEIGHTS)), other / WEIGHTS)
    before = engine.checksums()

    with pytest.raises(WeightsError, match=message):
        engine.load(other, Version(0, 4))

    assert engine.version == Version(0, 3)
    assert engine.checksums() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"other: no \*\.safetensors"),
        (b"", "model.safetensors: invalid safetensors header"),
        (b"\x08\0\0\0\0\0\0\0 not one", "model.safetensors: invalid safetensors header"),
    ],
)
def test_weights_that_cannot_be_read_change_nothing(make, save, content, message):
    """No file, an empty one, and one that is none: one clear line each."""
    engine, other = make(), save("other", seed=5)
    if content is None:
        (other / WEIGHTS).unlink()
    else:
        (other / WEIGHTS).write_bytes(content)

    with pytest.raises(WeightsError, match=message):
        engine.load(other, Version(0, 4))

    assert engine.version == Version(0, 3)


@pytest.mark.parametrize("rename", [False, True])
def test_a_tied_head_may_stand_in_the_folder(make, save, rename):
    """Beside the embedding or in its place; the model keeps one tensor for both."""
    engine, other = make(), save("other", seed=5)
    weights = load_file(other / WEIGHTS)
    embedding = weights.pop("model.embed_tokens.weight") if rename else weights["model.embed_tokens.weight"].clone()
    save_file(weights | {"lm_head.weight": embedding}, other / WEIGHTS)

    engine.load(other, Version(0, 4))

    assert engine._model.lm_head.weight is engine._model.model.embed_tokens.weight
    assert tokens(engine, requests(3)) == tokens(make(folder=save("same", seed=5)), requests(3))


def test_a_loaded_folder_may_be_written_to_afterwards(make, save):
    """The engine keeps copies: not a byte of the folder is its own."""
    engine, other = make(), save("other", seed=5)
    engine.load(other, Version(0, 4))
    before = engine.checksums()

    with (other / WEIGHTS).open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 2)
        file.write(b"\xff" * (size - size // 2))

    assert engine.checksums() == before


def test_from_the_second_load_on_no_memory_is_taken_for_weights(make, save, monkeypatch):
    """The tensors served before the present ones are written over."""
    engine = make()
    engine.load(save("new-1", seed=1), Version(0, 1))
    monkeypatch.delattr(torch, "empty_like")

    for step in (2, 3):
        engine.load(save(f"new-{step}", seed=step), Version(0, step))

    assert engine.version == Version(0, 3)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_of_sampled_answers_are_what_they_were_sampled_with(make, temperature):
    """Scoring what the engine sampled gives the log-probabilities of the sampling, EOS included."""
    engine, asked = make(temperature=temperature), requests(3)

    for request, answers in zip(asked, generate_all(engine, asked), strict=True):
        scored = engine.score_answers(ScoringRequest(request.prompt_token_ids, [a.token_ids for a in answers]))
        for answer, score in zip(answers, scored, strict=True):
            np.testing.assert_allclose(score.logprobs, answer.logprobs, atol=1e-4)
    assert engine.score_answers(ScoringRequest(asked[0].prompt_token_ids, [])) == []


def test_the_canary_is_scored_at_temperature_one(make, tiny_model):
    """Whatever temperature is sampled at."""
    rows = [[5, 6, 7, 8], [9, 10, 11, 12]]

    np.testing.assert_allclose(make(temperature=0.5).score(rows), score_tokens(tiny_model(seed=1), rows), atol=1e-6)


def test_sampling_goes_on_while_new_weights_are_proved(make, monkeypatch):
    """The canary is scored beside it."""
    engine, own_score = make(), score_tokens
    engine.submit(requests(2))
    sampled = []

    def score_while_sampling(model, rows):
        with ThreadPoolExecutor(1) as loop:
            sampled.append(loop.submit(engine.collect, 60.0).result(timeout=120.0))
        return own_score(model, rows)

    monkeypatch.setattr("mrl.engines.embedded.score_tokens", score_while_sampling)
    assert len(engine.score([[2, 3, 4]])[0]) == 2
    assert sampled[0]


@pytest.mark.parametrize(
    ("rope", "is_alone"),
    [
        ({"rope_type": "default"}, False),
        ({"rope_type": "dynamic", "factor": 2.0}, True),
        ({"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, True),
    ],
)
def test_a_model_that_forwards_change_is_scored_between_them(make, save, monkeypatch, rope, is_alone):
    """Rotary frequencies that follow the longest row lie in a buffer, which two forwards at once would both write."""
    folder = save("model", seed=1)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": 1e4, "original_max_position_embeddings": 64, **rope}
    (folder / "config.json").write_text(json.dumps(config))
    engine = make(folder=folder)
    seen = []
    monkeypatch.setattr("mrl.engines.embedded.score_tokens", lambda *_: seen.append(engine._in_use.locked()) or [[]])

    engine.score([[3, 4]])

    assert seen == [is_alone]


def test_scoring_is_split_by_what_is_asked_alone(tiny_model):
    """One forward for all answers or one for each: the same log-probabilities."""
    model, prompt = tiny_model(), np.array([5, 6], dtype=np.int32)
    answers = [np.arange(2, 2 + n, dtype=np.int32) for n in (1, 7, 3)]
    whole = score_answers(model, prompt, answers, temperature=1.0)
    single = score_answers(model, prompt, answers, temperature=1.0, max_logits=1)

    assert [logprobs.size for logprobs, *_ in whole] == [1, 7, 3]
    for (one, *_), (other, *_) in zip(whole, single, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_collect_gives_what_it_has_when_the_time_is_over(make):
    """Without time it samples one token of every row, and with nothing in flight it does not wait."""
    engine = make(max_new_tokens=5, eos_ids=(99,))
    assert engine.collect(60.0) == []
    engine.submit(requests(2))

    for _ in range(4):
        assert engine.collect(0.0) == []
    assert len(engine.collect(0.0)) == 8
    assert engine.collect(60.0) == []


def test_a_nudge_ends_one_collect_after_one_token(make):
    """Whatever its time is; the next one goes on to the end of an answer."""
    engine = make(max_new_tokens=5, eos_ids=(99,))
    engine.submit(requests(2))
    engine.nudge()
    assert engine.collect(3600.0) == []
    assert engine.usage().generated_tokens == 8
    assert len(engine.collect(3600.0)) == 8


def test_usage_counts_what_is_handed_in_until_it_ends(make):
    """Waiting, then running, then nothing; aborted answers count no more."""
    engine = make(max_new_tokens=5, eos_ids=(99,), max_running=8)
    asked = requests(3)
    engine.submit(asked)
    assert engine.usage() == EngineUsage(running=0, waiting=12, cache_share=0.0, generated_tokens=0)
    read_tokens = sum(request.prompt_token_ids.size - 1 for request in asked)
    of_three = EngineUsage(0, 0, 0.0, generated_tokens=8, prompt_tokens=4 * read_tokens)
    of_three = replace(of_three, reused_prompt_tokens=3 * read_tokens)  # one of each group reads it
    engine.collect(0.0)
    assert engine.usage() == replace(of_three, running=8, waiting=4)
    engine.abort(["r0"])
    assert engine.usage() == replace(of_three, running=4, waiting=4)
    engine.abort(["r1", "r2"])
    assert engine.usage() == of_three
    assert engine.collect(60.0) == []


def test_a_restarted_engine_has_the_weights_and_the_memory_of_a_new_one(make, save):
    """What was loaded and handed in is gone; the folder's weights are there again."""
    engine = make()
    first = tokens(engine, requests(3))
    engine.load(save("other", seed=5), Version(0, 4))
    engine.submit(requests(2))
    engine.collect(0.0)

    engine.restart()

    assert engine.collect(60.0) == []
    engine.label(Version(0, 3))
    assert tokens(engine, requests(3)) == first


def test_a_closed_engine_holds_nothing(make):
    """It may be closed twice, and samples no more."""
    engine = make()
    engine.submit(requests(2))

    engine.close()
    engine.close()

    assert engine.collect(60.0) == []
    with pytest.raises(WeightsError, match="no verified weights"):
        engine.submit(requests(1))


def test_too_little_memory_is_one_line_with_its_cure(make, monkeypatch):
    """A device that cannot hold the cache names what to set lower; the model is free for others afterwards."""
    engine = make()
    engine.submit(requests(2))

    monkeypatch.setattr(engine._batch, "step", lambda: torch.empty(TOO_MANY_BYTES))
    with pytest.raises(DeviceError, match=r"out of memory while sampling; .*answers_at_once"):
        engine.collect(60.0)
    assert not engine._in_use.locked()


def test_too_little_memory_for_a_load_or_a_score_is_one_line_too(make, save, monkeypatch):
    """The old weights are served on."""
    engine, folder = make(), save("next", seed=2)
    with monkeypatch.context() as patched:
        patched.setattr("mrl.engines.embedded.read_folder", lambda *_: torch.empty(TOO_MANY_BYTES))
        with pytest.raises(DeviceError, match=r"out of memory while reading new weights"):
            engine.load(folder, Version(0, 4))
    for name in ("score_tokens", "score_answers"):
        monkeypatch.setattr(f"mrl.engines.embedded.{name}", lambda *_, **__: torch.empty(TOO_MANY_BYTES))
    with pytest.raises(DeviceError, match="out of memory while scoring"):
        engine.score([[3, 4]])
    with pytest.raises(DeviceError, match="out of memory while scoring"):
        engine.score_answers(ScoringRequest(np.array([3], dtype=np.int32), [np.array([4], dtype=np.int32)]))

    assert engine.version == Version(0, 3)
    assert generate_all(engine, requests(1))


def test_more_answers_at_once_than_memory_holds_are_refused_at_the_start(make):
    """The rows of all answers that run at once are there from the start."""
    with pytest.raises(DeviceError, match=r"out of memory while allocating the key-value cache; .*answers_at_once"):
        make(max_running=1 << 46)


def test_a_missing_folder_is_named(tmp_path):
    """Before anything is sampled."""
    with pytest.raises(ModelFolderError, match="missing"):
        EmbeddedEngine(tmp_path / "none", Sampling(1.0, 4, (EOS,)), device="cpu", max_running=4)


def test_an_engine_that_slept_forgets_what_it_had_and_serves_what_it_is_given_then(make, save):
    """Nothing before a load; the spare weights and the cache are gone meanwhile."""
    engine, asked = make(), requests(3)
    engine.load(save("second", seed=2), Version(0, 4))
    wanted = tokens(engine, asked)
    engine.submit(requests(2))
    engine.collect(0.0)

    engine.sleep()
    assert engine.version is None
    assert (engine.usage().running, engine.usage().waiting) == (0, 0)
    assert not engine._spare
    engine.wake()
    with pytest.raises(WeightsError):
        engine.submit(asked)
    engine.load(save("second", seed=2), Version(0, 5))
    assert tokens(engine, asked) == wanted


def test_an_engine_in_bfloat16_rounds_what_it_is_given_and_claims_no_bytes_of_it(make, save):
    """Weights, cache and what is sampled; the canary alone can tell then. Weights in its own format it compares."""
    engine, other = make(dtype="bfloat16"), save("other", seed=2)
    assert engine.checksums()
    engine.load(other, Version(0, 4))
    assert {tensor.dtype for tensor in engine._model.state_dict().values()} == {torch.bfloat16}
    assert engine.checksums() == {}
    exact = make(folder=other)
    ids = [[5, 9, 11, 4], [7, 8, 2, 3]]
    gap = np.abs(np.asarray(engine.score(ids)) - np.asarray(exact.score(ids))).max()
    assert 0 < gap < 0.1
    answers = generate_all(engine, requests(3))
    assert all(np.isfinite(answer.logprobs).all() for group in answers for answer in group)
    assert engine._batch._cache.layers[0].keys.dtype == torch.bfloat16

    rounded = {name: tensor.bfloat16() for name, tensor in load_file(other / WEIGHTS).items()}
    save_file(rounded, other / WEIGHTS, metadata={"format": "pt"})
    engine.load(other, Version(0, 5))
    assert engine.checksums().keys() == exact.checksums().keys()


def test_weights_for_another_device_are_all_in_main_memory_before_they_are_copied(tiny_model):
    """As the memory plan counts them on the host of a GPU; "meta" stands for that."""
    model = tiny_model()
    own = named_weights(model)
    reading = _Reading("here", model, {name: tensor.to("meta") for name, tensor in own.items()}, "cpu")
    places = [reading._place(name, tensor.dtype, list(tensor.shape)) for name, tensor in own.items()]

    assert {place.device.type for place in places} == {"cpu"}
    assert sum(place.nbytes for place in reading._staged.values()) == sum(tensor.nbytes for tensor in own.values())
