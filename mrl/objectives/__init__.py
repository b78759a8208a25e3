"""Objectives: what one token contributes to the loss. Pure functions, tensors in, tensors out, nothing else.

Every term is returned per token, unmasked and unnormalised. The learner multiplies by the per-token weights that a
sharing regime assigned, and divides by denominators that are known before the first backward, so that k microbatches or
n ranks give one gradient. Log-probabilities are natural logarithms; advantages, proximal, behaviour and teacher values
never carry gradient.

Shapes: T packed tokens, V vocabulary, D hidden width.

What a term is
- `specs`          the terms as plain values, without torch
- `inputs`         what a term sees of its tokens
- `terms`          spec -> function, one dict

The terms
- `clipped`        PPO, GRPO, Dr.GRPO, DAPO, GSPO
- `cispo`, `dppo`  clipped weights; a trust region of probabilities
- `imitation`      the log-likelihood term of SGT's rescues
- `cross_sequence` HACPO's rows of another agent
- `grafted`        GRAFT's rows of a peer
- `trrd`           RLAD's ratio to old policy and teacher
- `shaped`         LUFFY's off-policy rows

Their parts
- `logprobs`       log-probability and entropy of given tokens from hidden states, in checkpointed chunks
- `ratios`, `rows` bounded ratios of tokens and rows; sums and means over rows
- `spreading`      a peer's log-probs of spans, divided over their tokens
- `correction`     detached weights against staleness and engine mismatch
- `kl`, `regularizer`  divergence from a reference, entropy bonus
- `diagnostics`    numbers to look at, without gradient
"""
