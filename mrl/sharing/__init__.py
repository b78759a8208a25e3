"""Sharing: which experience a policy publishes, and what it makes of the experience of its peers.

A regime turns own groups and peer records into training examples that carry their credit (component, advantage,
weight). The learner is blind to it: it sums components, each divided by a denominator that the regime declares and that
is known before the first backward. Nothing here holds a tensor, a socket or a clock.

    loss = sum over components c of   coefficient_c / D_c * sum over rows i of c, tokens t of   weight_it * term_it

- `regime`      the protocol and its values
- `advantages`  group-relative advantages
- `independent` GRPO on own groups
- `sgt`         success-gated transfer (arXiv 2605.07244)
- `pending`     the bounded table of prompts that wait for a peer's success
- `regimes`     the one dict of regimes; building and checking by name

To add a regime, write one file and add one line to `regimes.REGIMES`.
"""
