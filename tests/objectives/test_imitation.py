import torch

from mrl.objectives.imitation import imitation


def test_imitation_is_the_negative_log_likelihood():
    """Each token costs its surprisal, with gradient -1 everywhere."""
    logprobs = torch.tensor([-0.5, -7.0, 0.0], requires_grad=True)
    loss = imitation(logprobs)
    loss.sum().backward()
    assert loss.tolist() == [0.5, 7.0, 0.0]
    assert logprobs.grad.tolist() == [-1, -1, -1]
