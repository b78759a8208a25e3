"""What an engine of a policy that does not learn has to prove is what lies in the policy's folder."""

import pytest
import torch
from safetensors.torch import load_file

from mrl.errors import ModelFolderError
from mrl.models.tensor_file import digest
from mrl.records.version import Version
from mrl.weights.canary import canary_sequences, gap_nats
from mrl.weights.frozen_manifest import describe_folder

TEXTS = canary_sequences(64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_digests_are_those_of_the_files_and_its_canary_that_of_a_forward_in_float32(tiny_model, tmp_path, dtype):
    """Whatever number format the folder has."""
    tiny_model(seed=1).to(dtype).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")

    manifest = describe_folder(tmp_path, "teacher", Version(0, 0), TEXTS)

    held = load_file(tmp_path / "model.safetensors")
    assert manifest.tensors == {name: digest(tensor) for name, tensor in held.items()}
    model = tiny_model(seed=1)
    for tensor in model.parameters():
        tensor.data = tensor.data.to(dtype).float()
    ids = torch.tensor(TEXTS)
    logprobs = model(ids).logits[:, :-1].log_softmax(-1)
    expected = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(torch.tensor(manifest.canary.logprobs), expected, atol=1e-5, rtol=0)
    assert not gap_nats(manifest.canary, manifest.canary.rounded).problem


def test_a_folder_without_a_model_is_refused(tmp_path):
    """In the line of every missing model."""
    with pytest.raises(ModelFolderError, match="model folder is missing"):
        describe_folder(tmp_path / "none", "teacher", Version(0, 0), TEXTS)
