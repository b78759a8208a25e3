"""Objectives: the contribution of one token to the loss. Pure functions, tensors in, tensors out, nothing else.

Every term is returned per token, unmasked and unnormalised. The learner multiplies by the per-token weights that a
sharing regime assigned, and divides by denominators that are known before the first backward, so that k microbatches or
n ranks give one gradient. Log-probabilities are natural logarithms; advantages, proximal, behaviour and teacher values
never carry gradient.

Shapes: T packed tokens, V vocabulary, D hidden width.

- `specs`        the terms as plain values, without torch
- `terms`        one function per spec: PPO, GRPO, Dr.GRPO, DAPO, GSPO, CISPO, DPPO; the terms of SGT, HACPO, GRAFT,
                 RLAD, LUFFY
- `ratios`       bounded ratios of tokens and rows, corrections against staleness, a peer's spans divided over tokens
- `regularizer`  divergence from a reference, entropy bonus
- `logprobs`     log-probability and entropy of given tokens from hidden states, in checkpointed chunks
- `liger`        the outputs of `logprobs` by Liger's fused kernel
- `diagnostics`  numbers to look at, without gradient
"""
