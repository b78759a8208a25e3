"""Log-probabilities of given sequences by one plain forward: what a canary compares."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


@torch.no_grad()
def score_tokens(model: nn.Module, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probabilities in nats of every token after the first, at temperature 1; sequences have equal lengths."""
    device = next(model.parameters()).device
    ids = torch.tensor(token_ids, device=device)
    logits: Any = model(input_ids=ids, use_cache=False).logits
    logprobs = logits[:, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1).tolist()
