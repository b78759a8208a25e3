import pytest
import torch

from mrl.objectives.logprobs import token_logprobs, token_logprobs_and_entropy


def make_inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(11)
    hidden = torch.randn(13, 8, generator=generator, dtype=dtype).requires_grad_()
    head = torch.randn(29, 8, generator=generator, dtype=dtype).requires_grad_()
    return hidden, head, torch.randint(0, 29, (13,), generator=generator)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 13, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunks_equal_the_full_log_softmax(chunk_tokens, temperature):
    """Values and gradients do not depend on the chunk, and are those of log_softmax over all logits."""
    hidden, head, targets = make_inputs(torch.float32)
    full = torch.log_softmax(hidden @ head.T / temperature, dim=-1)[torch.arange(13), targets]
    direction = torch.linspace(-1, 1, 13)
    expected = torch.autograd.grad((full * direction).sum(), (hidden, head))
    chunked = token_logprobs(hidden, head, targets, temperature=temperature, chunk_tokens=chunk_tokens)
    found = torch.autograd.grad((chunked * direction).sum(), (hidden, head))
    torch.testing.assert_close(chunked, full, rtol=0, atol=2e-6)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_several_targets_of_a_token_are_each_as_one_alone(softcap, with_entropy):
    """Values and gradients, in chunks; what stands twice in a place counts twice."""
    hidden, head, _ = make_inputs()
    targets = torch.randint(0, 29, (13, 4), generator=torch.Generator().manual_seed(5))
    targets[2, 1] = targets[2, 0]
    direction = torch.linspace(-1, 1, 52, dtype=torch.float64).view(13, 4)
    how = {"temperature": 0.6, "chunk_tokens": 5, "softcap": softcap}
    alone = torch.stack([token_logprobs(hidden, head, column, **how) for column in targets.T], -1)
    expected = torch.autograd.grad((alone * direction).sum(), (hidden, head))

    if with_entropy:
        found, entropy = token_logprobs_and_entropy(hidden, head, targets, **how)
        assert torch.equal(entropy, token_logprobs_and_entropy(hidden, head, targets[:, 0], **how)[1])
    else:
        found = token_logprobs(hidden, head, targets, **how)

    assert torch.equal(found, alone)
    for one, other in zip(torch.autograd.grad((found * direction).sum(), (hidden, head)), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert token_logprobs(hidden[:0], head, targets[:0], **how).shape == (0, 4)


def test_half_precision_is_reduced_in_float32():
    """bfloat16 hidden states give float32 log-probabilities, normalised as such."""
    hidden, head, _ = make_inputs(torch.bfloat16)
    every = torch.stack(
        [
            token_logprobs(hidden, head, torch.full((13,), token), temperature=1.0, chunk_tokens=4).detach()
            for token in range(29)
        ]
    )
    assert every.dtype == torch.float32
    torch.testing.assert_close(every.logsumexp(0), torch.zeros(13), rtol=0, atol=1e-5)


def test_no_grad_gives_the_same_values():
    """Scoring without gradient takes the same path of numbers."""
    hidden, head, targets = make_inputs()
    with torch.no_grad():
        silent = token_logprobs(hidden, head, targets, temperature=0.8, chunk_tokens=4)
    loud = token_logprobs(hidden, head, targets, temperature=0.8, chunk_tokens=4)
    assert not silent.requires_grad
    assert torch.equal(silent, loud.detach())


def test_no_tokens_give_no_logprobs():
    """A batch without answer tokens is legal."""
    hidden, head, targets = make_inputs()
    assert token_logprobs(hidden[:0], head, targets[:0], temperature=1.0, chunk_tokens=4).shape == (0,)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
def test_entropy_equals_that_of_the_full_distribution(chunk_tokens):
    """Values and gradients of the entropy, whatever the chunk; the log-probs beside it are those without it."""
    hidden, head, targets = make_inputs(torch.float32)
    full = torch.distributions.Categorical(logits=hidden @ head.T / 0.6).entropy()
    direction = torch.linspace(-1, 1, 13)
    expected = torch.autograd.grad((full * direction).sum(), (hidden, head))
    chunks = {"temperature": 0.6, "chunk_tokens": chunk_tokens}
    logprobs, entropy = token_logprobs_and_entropy(hidden, head, targets, **chunks)
    found = torch.autograd.grad((entropy * direction).sum(), (hidden, head), retain_graph=True)
    torch.testing.assert_close(entropy, full, rtol=0, atol=4e-6)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=4e-6)
    alone = token_logprobs(hidden, head, targets, **chunks)
    assert torch.equal(logprobs, alone)
    for one, other in zip(
        torch.autograd.grad(logprobs.sum(), (hidden, head)),
        torch.autograd.grad(alone.sum(), (hidden, head)),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_logits_outlive_their_chunk(with_entropy):
    """Between forward and backward nothing of the size [C, V] is kept, whether or not entropies are asked for."""
    hidden, head, targets = make_inputs()
    kept: list[tuple[int, ...]] = []
    compute = token_logprobs_and_entropy if with_entropy else token_logprobs
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
        compute(hidden, head, targets, temperature=1.0, chunk_tokens=5)
    assert all(shape[-1:] != (29,) for shape in kept)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradients_are_those_of_finite_differences(temperature, softcap):
    """Of log-probabilities and entropies, by hidden states and head, over several chunks and one cut short."""
    hidden, head, targets = make_inputs()
    hidden, head, targets = hidden[:5].detach().requires_grad_(), head[:7].detach().requires_grad_(), targets[:5] % 7

    def outputs(hidden, head):
        options = {"temperature": temperature, "chunk_tokens": 2, "softcap": softcap}
        return token_logprobs_and_entropy(hidden, head, targets, **options)

    assert outputs(hidden, head)[0].dtype == torch.float64
    # That nobody uses any output, for which the check would ask too, never reaches a backward pass.
    assert torch.autograd.gradcheck(outputs, (hidden, head), eps=1e-6, atol=1e-7, rtol=1e-6, check_undefined_grad=False)
    alone = token_logprobs(hidden, head, targets, temperature=temperature, chunk_tokens=2, softcap=softcap)
    (found,) = torch.autograd.grad(alone.sum(), head)
    (expected,) = torch.autograd.grad(outputs(hidden, head)[0].sum(), head)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_both_outputs_are_those_of_all_logits(dtype, softcap):
    """Together, as a loss with an entropy bonus has them; in 16 bits as near as a product in these is."""
    hidden, head, targets = make_inputs(dtype)
    of_logprobs, of_entropy = torch.linspace(-1, 1, 13), torch.linspace(0.5, -0.25, 13)
    logits = hidden.double() @ head.double().T
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.6
    full = torch.distributions.Categorical(logits=logits)
    loss = (full.log_prob(targets) * of_logprobs + full.entropy() * of_entropy).sum()
    expected = torch.autograd.grad(loss, (hidden, head))

    options = {"temperature": 0.6, "chunk_tokens": 5, "softcap": softcap}
    logprobs, entropy = token_logprobs_and_entropy(hidden, head, targets, **options)
    found = torch.autograd.grad((logprobs * of_logprobs + entropy * of_entropy).sum(), (hidden, head))

    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert float((one.double() - other.double()).norm() / other.double().norm()) < (
            1e-6 if dtype == torch.float32 else 1e-2
        )
