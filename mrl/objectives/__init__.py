"""Objectives: what one token contributes to the loss. Pure functions, tensors in, tensors out, nothing else.

Every term is returned per token, unmasked and unnormalised. The learner multiplies by the per-token weights that a
sharing regime assigned, and divides by denominators that are known before the first backward, so that k microbatches or
n ranks give one gradient. Log-probabilities are natural logarithms; advantages, proximal and behaviour values never
carry gradient.

Shapes: T packed tokens, V vocabulary, D hidden width.

- `logprobs`    log-probability of given tokens from hidden states, in checkpointed chunks
- `clipped`     the clipped policy-gradient term and the detached behaviour weight of decoupled PPO
- `imitation`   the log-likelihood term of rescues
- `diagnostics` numbers to look at, without gradient
"""
