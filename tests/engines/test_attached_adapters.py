"""Adapters in the embedded engine: each version takes the place of the last, and none that is wrong goes unnoticed."""

import json
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import torch

from mrl.engines import attached_adapters
from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Sampling
from mrl.errors import WeightsError, WeightsUnproved
from mrl.models.load_policy import load_policy
from mrl.models.parameters import named_weights
from mrl.models.scoring import score_tokens
from mrl.rollout.weight_updates import Route, install, prove
from mrl.weights.canary import gap_nats, make_canary, reference_logprobs, rounded_logprobs
from mrl.weights.manifest import read_manifest
from tests.support.engine_rig import EOS_IDS, Rig, Weights, full_forward
from tests.support.family_rig import Learner, Learnt, make_family

LORA = {"rank": 3, "alpha": 7}
ADAPTED = "model.layers.1.mlp.up_proj"
Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]
FIRST = "base_model.model.model.layers.{}.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def learner(tmp_path) -> Learner:
    """Of adapters, far enough from its start that every version is another one by the canary."""
    return Learner(tmp_path / "published", make_family(tmp_path / "start", "qwen3"), lr=1e-2, lora=LORA)


@pytest.fixture
def engine(learner, tmp_path) -> EmbeddedEngine:
    return EmbeddedEngine(tmp_path / "start", Sampling(0.7, 40, EOS_IDS[:1]), device="cpu", max_running=16)


def weights(engine: EmbeddedEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named_weights(engine._model).items()}


def check_serves(engine: EmbeddedEngine, learnt: Learnt) -> None:
    """What the learner's model gives with its adapters merged; the weights stay those of the folder."""
    texts = [[7, 8, 9, 300], [5, 6, 250]]
    np.testing.assert_allclose(
        np.concatenate(engine.score(texts)), np.concatenate(score_tokens(learnt.model, texts)), atol=2e-5, rtol=0
    )
    start = named_weights(load_policy(learnt.start))
    assert all(torch.equal(tensor, start[name]) for name, tensor in weights(engine).items())
    assert engine.version == learnt.version


def test_versions_take_each_others_place(learner, engine):
    """The first one, whose adapters do nothing yet, too; an older one again, and after a restart the newest."""
    versions = [learner.learn(steps) for steps in (0, 2, 2)]

    for learnt in (*versions, versions[1], versions[2]):
        installed = install(engine, learnt.manifest, learnt.version)
        assert installed.route is Route.ADAPTERS
        assert installed.compared_share == 1.0
        check_serves(engine, learnt)
    engine.restart()
    install(engine, versions[2].manifest, versions[2].version)

    check_serves(engine, versions[2])


def test_sleep_keeps_the_weights_of_the_folder_and_nothing_else(learner, engine):
    """Awake, the newest version is loaded as after a start."""
    first, second = learner.learn(0), learner.learn(2)
    install(engine, second.manifest, second.version)
    engine.sleep()

    engine.label(first.version)
    check_serves(engine, first)
    assert not engine._adapters.checksums()
    engine.wake()
    install(engine, second.manifest, second.version)
    check_serves(engine, second)


def test_a_restart_lets_go_of_the_weights_before_it_reads_them(learner, engine, monkeypatch):
    """There may be no memory for both, whoever still holds the old model."""
    learnt = learner.learn(1)
    install(engine, learnt.manifest, learnt.version)
    old, seen = engine._model, []

    def read(*arguments, **named):
        seen.append({parameter.device.type for parameter in old.parameters()})
        return load_policy(*arguments, **named)

    monkeypatch.setattr("mrl.engines.embedded.load_policy", read)
    engine.restart()

    assert seen == [{"meta"}]
    install(engine, learnt.manifest, learnt.version)
    check_serves(engine, learnt)


def test_an_update_in_mid_answer_gives_spans_that_are_right(learner, engine, tmp_path):
    """Each span has the log-probabilities of its own adapters."""
    first, second = learner.learn(1), learner.learn(3)
    rig = Rig(engine, 0.7)
    for learnt in (first, second):
        rig.served[learnt.version] = Weights(tmp_path, learnt.model)
    install(engine, first.manifest, first.version)
    request = rig.ask(answers=8)
    engine.submit([request])
    finished = engine.collect(0.0)
    with ThreadPoolExecutor(1) as thread:
        update = thread.submit(install, engine, second.manifest, second.version)
        finished += rig.collect(8 - len(finished))
        update.result(120)
    mixed = [one for one in finished if len(one.generation.versions) == 2]
    assert mixed, "the update landed in no answer"
    for one in finished:
        expected = rig.expected(request, one, keeps_cache=True)
        np.testing.assert_allclose(one.generation.logprobs, expected, atol=1e-4, rtol=0)
    text = [7, 8, 9, 300]
    weights = rig.served[second.version]
    np.testing.assert_allclose(engine.score([text])[0], full_forward([(weights, text)], 1.0), atol=1e-4, rtol=0)


def factors(engine: EmbeddedEngine) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Those that the engine computes with."""
    return {name: (first.tensor, second.tensor) for name, (first, second) in engine._adapters._attached.factors.items()}


def stale(engine: EmbeddedEngine, before: Factors) -> None:
    """What is computed with is that of the version before."""
    for name, pair in factors(engine).items():
        for tensor, old in zip(pair, before[name], strict=True):
            tensor.copy_(old)


def half_applied(engine: EmbeddedEngine, before: Factors) -> None:
    """One layer was left out."""
    for tensor, old in zip(factors(engine)[ADAPTED], before[ADAPTED], strict=True):
        tensor.copy_(old)


def applied_twice(engine: EmbeddedEngine, before: Factors) -> None:
    """To what has them already."""
    first, second = factors(engine)[ADAPTED]
    named_weights(engine._model)[f"{ADAPTED}.weight"].add_(second @ first)


def swapped(engine: EmbeddedEngine, before: Factors) -> None:
    """Two adapters of one shape."""
    held = engine._adapters._attached.factors
    one, other = (f"model.layers.{layer}.mlp.up_proj" for layer in range(2))
    held[one], held[other] = held[other], held[one]


def other_base(engine: EmbeddedEngine, before: Factors) -> None:
    """A weight that nothing adapts differs in one bit, which no canary shows."""
    norm = named_weights(engine._model)["model.norm.weight"].data
    norm[0] = torch.nextafter(norm[0], torch.tensor(9.0))


@pytest.mark.parametrize(
    ("fault", "found_by"),
    [
        (stale, "weights differ from version"),
        (half_applied, "weights differ from version.*up_proj"),
        (applied_twice, "weights differ from version.*up_proj"),
        (swapped, "weights differ from version.*up_proj"),
        (other_base, "weights differ from version.*model.norm.weight"),
        *((fault, "canary") for fault in (stale, half_applied, applied_twice, swapped)),
    ],
)
def test_an_engine_that_serves_others_than_were_published_is_found_out(learner, engine, fault, found_by, monkeypatch):
    """By the bytes, and the tensor is named; by the canary where nobody can tell the bytes."""
    first, second = learner.learn(2), learner.learn(2)
    install(engine, first.manifest, first.version)
    before = {name: tuple(tensor.clone() for tensor in pair) for name, pair in factors(engine).items()}
    install(engine, second.manifest, second.version)
    manifest = read_manifest(second.manifest)

    with torch.no_grad():
        fault(engine, before)

    if found_by == "canary":
        monkeypatch.setattr(engine, "checksums", lambda: None)
    with pytest.raises(WeightsUnproved, match=found_by):
        prove(engine, manifest)


def test_another_scale_is_found_by_the_canary(learner, engine, tmp_path):
    """It stands beside the tensors, which are as they were published."""
    planted = learner.learn(2).planted(tmp_path / "planted", lambda tensors: None)
    described = planted.manifest.parent / "adapter_config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"lora_alpha": 16}))

    with pytest.raises(WeightsUnproved, match="canary"):
        install(engine, planted.manifest, planted.version)


def swap_files(tensors: dict[str, torch.Tensor]) -> None:
    tensors[FIRST.format(0)], tensors[FIRST.format(1)] = tensors[FIRST.format(1)], tensors[FIRST.format(0)]


def leave_out(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[FIRST.format(0)]


@pytest.mark.parametrize(("change", "why"), [(swap_files, "checksum"), (leave_out, "is missing")])
def test_files_that_changed_after_they_were_published_are_refused(learner, engine, tmp_path, change, why):
    """Before anything is served."""
    first, second = learner.learn(2), learner.learn(2)
    install(engine, first.manifest, first.version)
    planted = second.planted(tmp_path / "planted", change)

    with pytest.raises(WeightsError, match=why):
        install(engine, planted.manifest, planted.version)
    check_serves(engine, first)


def without_second(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[FIRST.format(0).replace("lora_A", "lora_B")]


def of_another_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[FIRST.format(1)] = tensors[FIRST.format(1)][:, :-1].contiguous()


def of_another_model(tensors: dict[str, torch.Tensor]) -> None:
    for part in ("lora_A", "lora_B"):
        name = FIRST.format(0).replace("lora_A", part)
        tensors[name.replace("layers.0", "layers.9")] = tensors.pop(name)


def of_fewer_layers(tensors: dict[str, torch.Tensor]) -> None:
    for part in ("lora_A", "lora_B"):
        del tensors[FIRST.format(0).replace("lora_A", part)]


def with_one_more(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.norm.lora_magnitude_vector"] = torch.ones(64)


@pytest.mark.parametrize("change", [without_second, of_another_shape, of_another_model, of_fewer_layers, with_one_more])
def test_adapters_that_do_not_fit_are_refused_and_the_old_ones_served_on(learner, engine, tmp_path, change):
    """To the bit."""
    first, second = learner.learn(2), learner.learn(2)
    install(engine, first.manifest, first.version)

    with pytest.raises(WeightsError, match="adapter"):
        engine.load_adapters(second.planted(tmp_path / "planted", change).manifest.parent, second.version)
    check_serves(engine, first)


def test_adapters_on_whole_weights_of_another_version_are_found_out(learner, engine, tmp_path, monkeypatch):
    """They belong to the weights of the policy's folder, and to no others: bytes show it, and scores."""
    first, learnt = learner.learn(2), learner.learn(2)
    install(engine, first.manifest, first.version)
    learnt.model.save_pretrained(tmp_path / "whole")
    engine.load(tmp_path / "whole", learnt.version)
    assert engine.checksums().keys() == named_weights(learnt.model).keys()

    with pytest.raises(WeightsUnproved, match="weights differ from version"):
        install(engine, learnt.manifest, learnt.version)
    monkeypatch.setattr(engine, "checksums", lambda: None)
    with pytest.raises(WeightsUnproved, match="canary"):
        prove(engine, read_manifest(learnt.manifest))


def test_bytes_are_looked_at_without_gradients(learner, engine, monkeypatch):
    """Attached adapters."""
    learnt, seen = learner.learn(2), []
    install(engine, learnt.manifest, learnt.version)
    digests = attached_adapters.digests
    monkeypatch.setattr(
        attached_adapters, "digests", lambda tensors: seen.append(torch.is_grad_enabled()) or digests(tensors)
    )
    engine._adapters.checksums()

    assert seen == [False]


@pytest.mark.parametrize("released", [torch.bfloat16, torch.float32])
def test_an_engine_in_16_bits_is_held_to_what_the_learner_keeps_of_a_small_step(tmp_path, released):
    """Of one that is below the units of the sums that it is added to, most is lost, in the learner's pass too."""
    start = make_family(tmp_path / "start", "qwen3")
    load_policy(start, dtype=released).save_pretrained(start)
    learner = Learner(tmp_path / "published", start, lr=6e-4, lora=LORA)
    engine = EmbeddedEngine(start, Sampling(0.7, 40, EOS_IDS[:1]), device="cpu", max_running=16, dtype="bfloat16")
    texts = [row.tolist() for row in torch.randint(10, 300, (512, 60), generator=torch.Generator().manual_seed(1))]
    first = learner.learn(1)
    before = [scores(learner.model, texts, "bfloat16") for scores in (reference_logprobs, rounded_logprobs)]
    second = learner.learn(1)
    canary = make_canary(learner.model, texts, "bfloat16", *before)
    for learnt in (first, second):
        manifest = msgspec.structs.replace(read_manifest(learnt.manifest), canary=canary)
        learnt.manifest.write_bytes(msgspec.json.encode(manifest))

    installed = install(engine, second.manifest, second.version)

    assert installed.compared_share == 1.0
    assert abs(installed.gap.missing_share) < 0.1
    assert installed.gap.tells_versions
    by_exact = msgspec.structs.replace(canary, previous_rounded=[])
    assert "is missing" in gap_nats(by_exact, engine.score(texts)).problem
    with pytest.raises(WeightsUnproved, match="is missing"):
        install(engine, first.manifest, first.version)
