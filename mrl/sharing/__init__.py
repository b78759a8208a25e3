"""Sharing: the experience that a policy publishes, and the training examples that it makes of its peers' experience.

A regime turns own groups and peer records into training examples that carry their credit (component, advantage,
weight). The learner is blind to it: it sums components, each divided by a denominator that the regime declares and that
is known before the first backward. Nothing here holds a tensor, a socket or a clock.

    loss = sum over components c of   coefficient_c / D_c * sum over rows i of c, tokens t of   weight_it * term_it

What a regime is
- `regime`, `context`  the protocol and its values; the policy and run that a regime serves
- `regimes`            the one dict of regimes; building and checking by name

The regimes
- `independent`  the own objective on own groups
- `prp`          peers' answers beside the own ones (arXiv 2605.07244)
- `xgrpo`        peers' rewards in the own baseline (arXiv 2605.07244)
- `sgt`          success-gated transfer (arXiv 2605.07244)
- `prefix`       own episodes that go on from the first turns of a peer's success
- `hacpo`        capability-weighted advantages, stepwise clipped rows of others (arXiv 2603.02604)
- `graft`        failed groups replaced by a peer's
- `rlad`         a teacher's log-probs in the ratio (arXiv 2602.22495)
- `copd`         in turn by rewards and by peers' log-probs of own answers (arXiv 2604.27083)

Around a regime
- `collective`   rewards by the policies' vote, for tasks without labels (arXiv 2508.12338)

Own rows
- `own_objective`  the objective of a policy on own rows, with its method's values
- `advantages`     group-relative advantages, overlong penalties
- `own_examples`   own answers as training examples
- `own_traces`     own answers as peers can read them

From peers
- `peer_groups`     whole groups: asked for, awaited, kept
- `peer_rollouts`   whole groups of answers: published, and taken in own tokens
- `peer_traces`     answers of peers in own tokens, and the training examples that they make
- `peer_turns`      episodes of peers, aligned turn by turn
- `peer_episodes`   verified episodes of peers in own tokens, to be imitated or played again
- `teacher_traces`  a teacher's log-probs laid on own tokens
- `rescues`         the bounded table of prompts that wait for a peer's success

Costs
- `recorder`  the residual of alignment, as metrics; no regime takes part in it

To add a regime, write one file and add one line to `regimes.REGIMES`: `docs/new-regime.md` shows one.
"""
