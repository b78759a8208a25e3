"""What Liger's kernel is asked for, and where it is refused; the kernel itself runs in `tests/gpu/test_liger.py`.

Where the package is there, its own stand-in for other devices takes the kernel's arguments and gives its outputs.
"""

import importlib.util

import pytest
import torch
from torch import Tensor

from mrl.errors import ConfigError, MissingError
from mrl.objectives import liger
from mrl.objectives.liger import check_liger
from mrl.objectives.logprobs import token_logprobs, token_logprobs_and_entropy

NEEDS_LIGER = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "triton")),
    reason="no liger-kernel: pip install 'mrl[liger]'",
)


def make_inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    hidden = torch.randn(600, 8, generator=generator).requires_grad_()
    head = torch.randn(29, 8, generator=generator).requires_grad_()
    return hidden, head, torch.randint(0, 29, (600,), generator=generator)


@NEEDS_LIGER
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_it_gives_what_the_chunks_give(temperature: float) -> None:
    """Values, and gradients of a weighted sum of log-probabilities and entropies, by hidden states and head."""
    hidden, head, targets = make_inputs()
    direction = torch.linspace(-1, 1, len(targets))

    def outputs(kernel: str) -> tuple[Tensor, ...]:
        options = {"temperature": temperature, "chunk_tokens": 100, "kernel": kernel}
        alone = token_logprobs(hidden, head, targets, **options)
        logprobs, entropy = token_logprobs_and_entropy(hidden, head, targets, **options)
        loss = (direction * (alone + 2 * logprobs + 3 * entropy)).sum()
        return alone, logprobs, entropy, *torch.autograd.grad(loss, (hidden, head))

    for one, other in zip(outputs("liger"), outputs("chunked"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert one.dtype == torch.float32


def test_a_batch_without_answer_tokens_never_reaches_it() -> None:
    """It takes no empty tensors."""
    hidden, head, targets = make_inputs()
    options = {"temperature": 1.0, "chunk_tokens": 4, "kernel": "liger"}
    assert token_logprobs(hidden[:0], head, targets[:0], **options).shape == (0,)
    assert [one.shape for one in token_logprobs_and_entropy(hidden[:0], head, targets[:0], **options)] == [(0,), (0,)]


@pytest.mark.parametrize(
    ("device", "capability", "softcap", "told"),
    [
        ("cpu", None, None, "requires a Hopper GPU; got 'a CPU'"),
        ("cuda", (8, 0), None, "requires a Hopper GPU; got 'A100'; wanted compute capability 9.0; cure: .*chunked"),
        ("cuda", (9, 0), 30.0, "does not support soft-capped logits; got 30.0; cure: .*chunked"),
    ],
)
def test_other_devices_and_models_are_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, capability: object, softcap: float | None, told: str
) -> None:
    """In one line that names the key."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    with pytest.raises(ConfigError, match=rf"^learner.logprob_kernel: the kernel {told}|^learner.*{told}"):
        check_liger(torch.device(device), softcap)


def test_its_packages_have_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that is missing is named, with the extra that brings all of them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(liger, "PACKAGES", ("torch",))
    check_liger(torch.device("cuda"), None)
    for missing in ("no_such_package", "torch.no_such_part", "no_such_package.part"):
        monkeypatch.setattr(liger, "PACKAGES", ("torch", missing))
        with pytest.raises(MissingError, match=rf"{missing} is not installed; cure: pip install 'mrl\[liger\]'"):
            check_liger(torch.device("cuda"), None)
