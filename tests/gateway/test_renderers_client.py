"""The client by which verifiers asks for token ids, of the package renderers, over the real server of the gateway."""

import json

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI
from renderers import config_from_name, create_renderer
from renderers.client import generate
from transformers import PreTrainedTokenizerFast

from mrl.alignment.receiver import load_receiver
from mrl.models.tokenizers import train_byte_level
from mrl.models.turn_renderer import TurnRenderer
from mrl.records.direct_requests import DirectAnswer, DirectRefusal, TokenLogprob
from mrl.rollout.direct_codec import DirectRequestCodec
from tests.gateway.test_direct_requests import KEY, TALK, run
from tests.support.family_folders import write_family


@pytest.fixture
def codec(tmp_path):
    """Of a policy of Qwen3.5's family, whose folder lies beside the run's files."""
    folder = tmp_path / "policy"
    tokenizer = write_family(folder, train_byte_level(["one two three 1 + 2 ?"] * 3, 400), "qwen3.5")
    (folder / "config.json").write_text('{"model_type": "qwen3_5"}')
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (folder / "model.safetensors").touch()
    receiver = load_receiver(folder)
    renderer = TurnRenderer(folder, eos_ids=receiver.eos_ids)
    return DirectRequestCodec("qwen", receiver, renderer, None, (), 1.0, 16, row_tokens=512, max_prompt_tokens=256)


def as_a_worker_answers(codec, text):
    """Checked and spelled as a worker does it; the answer is this text and the policy's EOS."""

    def answer(request):
        try:
            prompt = codec.prompt(request)
        except ValueError as error:
            return DirectRefusal(request.request_id, "invalid_request", str(error))
        ids = [*codec.renderer.plain(text).tolist(), codec.receiver.eos_id]
        sampled = tuple(TokenLogprob(one, codec.spelled(one), -0.5) for one in ids)
        said, _ = codec.read(request, np.array(ids, dtype=np.int32), is_cut=False)
        return DirectAnswer(
            request_id=request.request_id, version=5, num_given_tokens=prompt.size, text=said, sampled=sampled
        )

    return answer


@pytest.mark.parametrize("stray", [False, True])
def test_the_client_of_verifiers_has_its_answer(tmp_path, codec, stray):
    """Its stop ids are the policy's own ends, and each token is named by its id; other ids are refused in a line."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "policy")
    renderer = create_renderer(tokenizer, config_from_name("qwen3.5"))
    stops = renderer.get_stop_token_ids() + [7] * stray
    renderer.get_stop_token_ids = lambda: stops

    async def script(rig, _):
        worker = await rig.worker(as_a_worker_answers(codec, "three"))
        async with AsyncOpenAI(base_url=f"{rig.root}/v1", api_key=KEY, max_retries=0) as client:
            asking = generate(
                client=client, renderer=renderer, messages=TALK, model="qwen", sampling_params={"max_tokens": 9}
            )
            if stray:
                with pytest.raises(openai.BadRequestError, match="stop_token_ids: 7 is not an end token of qwen"):
                    await asking
                return
            found = await asking
        (request,) = worker.asked
        assert list(request.token_ids) == renderer.render_ids(TALK, add_generation_prompt=True)
        assert len(stops) == 2
        assert request.stop_token_ids == tuple(sorted(stops)) == tuple(sorted(codec.receiver.eos_ids))
        assert found["completion_ids"] == [*codec.renderer.plain("three").tolist(), codec.receiver.eos_id]
        assert found["completion_logprobs"] == [-0.5] * len(found["completion_ids"])
        assert (found["finish_reason"], found["usage"]["prompt_tokens"]) == ("stop", len(request.token_ids))

    run(tmp_path, script)
