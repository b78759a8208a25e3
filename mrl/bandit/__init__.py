"""The contextual-bandit study behind the sharing regimes: the gain of each in support and its price in stability.

One prompt is a bandit with K arms, the possible answers; C is the set of correct arms. The learner pi is a softmax, the
peer mu any distribution, the reward r is 0 or 1. With p = pi(C), q = mu(C) and the score s(a) = e_a - pi, a method is
an estimator ghat of the policy gradient, and two numbers place it on the stability-support plane:

    support    S = < E ghat, grad log p >               does the expected step raise the success of the learner?
    variance   V = E||ghat||^2 - ||E ghat||^2           how far one step lies from the expected one

GRPO shares nothing; PRP shares answers, XGRPO shares rewards, SGT shares verified successes (methods of arXiv
2605.07244). The bandit model, its formulas and its numbers are an analysis of this project, not results of that paper.

- `problem`      the bandit, and the reference instance of 8 arms
- `moments`      mean and second moment of an estimator; support, variance, bias
- `closed_forms` one function per method
- `counting`     exact moments of estimators whose baseline depends on the group
- `overlap`      rescue probability, chi^2, effective sample size, growth with the length of a sequence
- `sampled`      Monte Carlo twins
- `methods`      the list that table and pictures share
- `sweeps`       families of bandits: the learner's success varies, or the residual
- `toy`, `credit` two softmax policies trained on many contexts
- `stability_support_plots`, `curves`, `labels`, `method_styles`   pictures (matplotlib: extra `plots`)
- `study`        the whole study: the tables, numbers and pictures that the command prints and saves

Shapes: K arms, G own rows of a group, N draws of an estimator. Numpy only, no torch.
"""
