"""The real SGLang tells the experts of its tokens, over an update in mid-answer, and a learner replays them."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from mrl.engines.engine import Sampling
from mrl.engines.environment import engine_python
from mrl.engines.server_backend import Launch
from mrl.engines.server_engine import ServerEngine
from mrl.engines.server_timeouts import ServerTimeouts
from mrl.engines.sglang import SGLang
from mrl.models.load_policy import load_policy
from mrl.models.routing.router_record import RouterRecord
from tests.support.engine_rig import Rig, Weights
from tests.support.family_rig import make_family

pytestmark = [pytest.mark.engines, pytest.mark.slow]
SAMPLING = Sampling(1.0, 900, (), tells_experts=True)
SAME_SHARE = 0.999
"""Of experts: scores of two may lie within rounding of each other."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> list[Weights]:
    """A mixture, and another one of its shape."""
    found = []
    for number in range(2):
        folder = make_family(tmp_path_factory.mktemp("moe") / str(number), "qwen3_moe")
        model = load_policy(folder)
        if number:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
            model.save_pretrained(folder)
        found.append(Weights(folder, model))
    return found


@pytest.fixture(scope="module")
def rig(weights, tmp_path_factory) -> Iterator[Rig]:
    python = engine_python("sglang", device="cpu")
    launch = Launch(python, weights[0].folder, "127.0.0.1", 0, "cpu", "float32", 1, 8, 1000, 0, tells_experts=True)
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    engine = ServerEngine(SGLang(), SAMPLING, launch=launch, log=log, bounds=ServerTimeouts(start_s=240.0, load_s=60.0))
    yield Rig(engine, 1.0)
    engine.close()


def by_hand(weights: Weights, ids: np.ndarray) -> np.ndarray:
    """[places, X] of all tokens but the last."""
    record = RouterRecord(weights.model)
    with torch.no_grad():
        weights.model(torch.from_numpy(ids[None, :-1].astype(np.int64)))
    return record.last()


def test_answers_tell_the_experts_of_their_tokens_and_the_first_those_of_its_prompt(rig, weights):
    """As transformers chooses them."""
    rig.serve(weights[0])
    request = rig.ask(answers=3, prompt_tokens=12)
    asked = type(request)(request.request_id, request.prompt_token_ids, request.seeds, tells_prompt=True)
    rig.engine.submit([asked])

    for one in rig.collect(3):
        expected = by_hand(weights[0], np.concatenate([request.prompt_token_ids, one.generation.token_ids]))
        expected = expected if one.index == 0 else expected[11:]
        assert one.generation.experts.shape == expected.shape
        assert (one.generation.experts == expected).mean() >= SAME_SHARE


def test_over_an_update_in_mid_answer_each_token_has_the_experts_of_its_version(rig, weights):
    """What was given up is told as well; the new version reads all that stands before its first token anew."""
    rig.serve(weights[0])
    request = rig.ask(answers=3, prompt_tokens=12)
    rig.engine.submit([request])
    time.sleep(1.0)  # a third of what 900 tokens take
    rig.serve(weights[1])

    num_mixed = 0
    for one in rig.collect(3):
        spans, answer = one.generation.versions, one.generation
        num_mixed += len(spans) > 1
        bounds = np.cumsum([0, *(span.num_tokens for span in spans)])
        for span, start, end in zip(spans, bounds, bounds[1:], strict=False):
            ids = np.concatenate([request.prompt_token_ids, answer.token_ids[:end]])
            expected = by_hand(rig.served[span.version], ids)[11 + start :]
            assert (answer.experts[start:end] == expected).mean() >= SAME_SHARE
    assert num_mixed
