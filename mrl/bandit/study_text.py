"""What `bandit.html` says: prose, captions and the style sheet."""

from typing import NamedTuple


class Caption(NamedTuple):
    """One picture's section: the finding as its title, the question before it, how to read it, and what it shows."""

    finding: str
    before: str
    reading: str
    alt: str


OPENING = """<header><h1>What does a learner gain from a peer, and what does it pay?</h1>
<p class="lead">Four ways for one policy to use the experience of another, on the smallest problem that still tells
them apart: a bandit whose arms are the possible answers to one prompt.</p>
<p>Mutual reinforcement learning (<a href="https://arxiv.org/abs/2605.07244">arXiv 2605.07244</a>) compares policies
that share nothing (<b>GRPO</b>), whole answers (<b>PRP</b>), rewards only (<b>XGRPO</b>) or one verified success
where the own group failed (<b>SGT</b>). The bandit model, its formulas and all numbers on this page are an analysis
of this project; they are not results of that paper.</p></header>"""

TWO_NUMBERS = """<h2>Two numbers per method</h2>
<p>The learner π is a softmax over answers, C the set of right ones, p = π(C) its success; the peer μ succeeds with q
= μ(C). A method is a random gradient ĝ. It is judged by</p>
<dl><dt>support&ensp;S = ⟨E ĝ, ∇ log p⟩</dt><dd>how much log p rises per unit of step size in expectation. Near zero,
the method is blind on this prompt: it costs samples and teaches nothing.</dd>
<dt>variance&ensp;V = E‖ĝ‖² &minus; ‖E ĝ‖²</dt><dd>how far a single step strays from the expected one. This is what
makes training unstable.</dd></dl>
<p>A larger learning rate multiplies S by c and V by c². So a learning rate moves a method along a line of equal
<b>S/√V</b>, the signal-to-noise ratio of one step; only a better method crosses those lines. Variants of PRP:
<b>exact</b> reweights by w = π/μ, <b>truncated</b> cuts w at 1.5, <b>residual</b> adds the error e<sup>ξ</sup> that
alignment of tokenizers leaves in w, <b>recompute</b> pretends that the peer's answers were the learner's own.</p>"""

LIMITS = """<h2>What this study cannot tell</h2>
<ul><li>Arms are independent: learning one answer teaches nothing about another. Language models generalise, for
better and worse, so no ranking here is a ranking of training runs.</li>
<li>PRP recompute looks strong because nothing punishes its bias: a peer's right answer is as good as an own one. With
whole sequences, off-policy text can be far from anything the learner would write.</li>
<li>Whether XGRPO ends above or below GRPO depends on the seed, the number of steps and the instance. Read nothing
into the sign of that difference.</li>
<li>Closed forms have no clipping and no division by the standard deviation. The toy has both.</li>
<li>The heights of the toy's curves depend on its set-up: on how far apart the policies begin, and on the learning rate.
Only the order of the methods is to be read.</li></ul>"""

CAPTIONS: dict[str, Caption] = {
    "plane.png": Caption(
        "On a prompt that the learner hardly solves, only two methods have support",
        "The stability-support plane of the instance above. GRPO, XGRPO and exact PRP all estimate the learner's "
        "own gradient, which is about as small as p. SGT and PRP recompute add a direction of the peer.",
        "Up is more learning, right is more noise; both axes are logarithmic. Dashed lines join points of equal "
        "S/√V. Filled marks are closed forms, rings are Monte Carlo estimates. That exact PRP is quiet here is "
        "special: this peer covers the right answers better than the learner, and answers are single arms.",
        "Scatter plot of variance against support for nine estimators; SGT and PRP recompute lie highest.",
    ),
    "success_lines.png": Caption(
        "Rarer success: support falls with p, unless a success comes from outside",
        "The same peer, and a learner that gets worse and worse. Reweighting exactly gives back what sharing "
        "gave: the support of exact PRP falls as fast as that of GRPO.",
        "p falls to the right. SGT keeps its support, because the probability of a rescue tends to <span "
        'class="m">1 &minus; (1&minus;q)<sup>G&prime;</sup></span>. XGRPO pays a constant variance for a '
        "vanishing support: its baseline follows the peer. The thin dotted line is the reference instance.",
        "Two line charts over the learner's success: support and variance of six methods.",
    ),
    "plane_learner.png": Caption(
        "The same in the plane: three ways to become blind, two to stay awake",
        "Each panel follows one method from a hopeless learner to one that succeeds nine times in ten.",
        "Numbers at the dots are p. GRPO slides down a steep line and loses signal against noise. Exact PRP "
        "slides along a line of equal S/√V: still informative, but only at a learning rate that grows like 1/p. "
        "XGRPO falls straight down. SGT and recompute stay in the upper right corner. All meet where p is large: "
        "a peer is no longer needed.",
        "Six panels of paths in the plane as the learner's success grows.",
    ),
    "plane_peer.png": Caption(
        "A better peer helps SGT; it only makes XGRPO louder",
        "Now the peer's success q varies, from a useless peer to a nearly perfect one.",
        "Numbers at the dots are q. XGRPO moves right and never up: more noise, no more support. SGT rises until "
        "rescues are certain. Exact PRP is noisiest with a peer that misses what the learner finds. Recompute "
        "turns round at q = ½: with a perfect peer all rewards are equal and nothing is left to compare.",
        "Six panels of paths in the plane as the peer's success grows.",
    ),
    "plane_group.png": Caption(
        "Larger groups calm every method, and make SGT superfluous in the end",
        "Own and peer group grow together. More samples cost compute and divide variance.",
        "Numbers at the dots are G = G&prime;. Most paths run left: less noise, the same support. SGT first "
        "rises, since a larger peer group finds a success more often, then falls, since a larger own group fails "
        "as a whole less and less often.",
        "Six panels of paths in the plane as the group size grows.",
    ),
    "plane_mismatch.png": Caption(
        "Mismatch is paid by those who use density ratios",
        "p and q stay fixed, but the peer prefers other answers than the learner, among the right and among the "
        "wrong ones.",
        "Numbers at the dots are χ²(π‖μ). Exact PRP drifts right without limit. Truncation first follows, then "
        "turns back: the noise is gone, and so is part of the support, which is its bias. GRPO and XGRPO do not "
        "see which answers the peer gave. SGT and recompute hardly move.",
        "Six panels of paths in the plane as chi-squared grows.",
    ),
    "sequences.png": Caption(
        "For whole answers, mismatch grows exponentially with length",
        "An answer is a product of tokens, and so is its density ratio. Even a peer that differs by a hair per "
        "token is out of reach after a few hundred tokens.",
        "A height of 1000 means that a thousand peer answers, exactly reweighted, are worth one own answer. d is "
        "the standard deviation of the log-ratio of one token, tokens taken as independent: "
        "1&nbsp;+&nbsp;χ²&nbsp;=&nbsp;exp(T&nbsp;d²).",
        "Line chart of 1 + chi-squared against the length of the answer for four spreads.",
    ),
    "residual.png": Caption(
        "Errors of alignment become bias inside a ratio",
        "Between tokenizers a peer's log-probabilities are known only up to a residual ξ with "
        "|ξ|&nbsp;≤&nbsp;κ. In PRP it "
        "stands in an exponent. XGRPO and SGT read no peer probabilities and pay nothing here.",
        "Left: each dot is one random residual. Support can seem to rise, but this is bias, not learning: the "
        "estimator now means another gradient. Right: the bias against its bound (e<sup>κ</sup> &minus; 1) E|r "
        "&minus; b| ‖s‖. Above the dotted line the bias is longer than the gradient itself.",
        "Left a cloud of points in the plane per kappa, right the bias over kappa below its bound.",
    ),
    "rescue.png": Caption(
        "SGT acts where the learner fails and the peer does not",
        "&alpha;(p, q) = (1&minus;p)<sup>G</sup> [1 &minus; (1&minus;q)<sup>G&prime;</sup>] is the share of "
        "visits on which SGT adds anything to GRPO.",
        "Both axes are logarithmic. As the learner improves it moves right, and the rescue term switches itself "
        "off: the bias λ&alpha;(μ<sub>C</sub> &minus; π) vanishes with &alpha;. Compare it with the measured "
        "rescue rate of a run.",
        "Contour plot of the rescue probability over the success of learner and peer.",
    ),
    "toy.png": Caption(
        "Over many prompts, rescues add up",
        "Two softmax policies learn many contexts side by side, with clipping and normalised advantages. "
        "Each starts good at different contexts. PRP behaviour is the variant that puts the peer's "
        "log-probabilities inside the clipped ratio, with a residual of 0.5 nats.",
        "Higher is better. SGT keeps learning where GRPO is stuck on contexts without a success. PRP behaviour "
        "loses: the clipped ratio shrinks the peer's rare successes and leaves large pushes away from failures.",
        "Line chart of mean success over training steps for five methods.",
    ),
}
"""By file name of the picture."""

STYLE = """
:root{color-scheme:light}*{box-sizing:border-box}
body{margin:0;background:#fdfdfc;color:#1c2128;
font:17px/1.6 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1020px;margin:0 auto;padding:48px 24px 72px}
p,ul,dl,footer,h1,h2{max-width:43em}
h1{font-size:34px;line-height:1.2;margin:0 0 12px}h2{font-size:23px;line-height:1.3;margin:56px 0 10px}
.lead{font-size:20px;line-height:1.5;color:#5b6470;margin:0 0 20px}
a{color:#0067a3}
code{font:15px ui-monospace,"DejaVu Sans Mono",monospace;
background:#f1f3f5;padding:1px 5px;border-radius:4px}
dl{margin:16px 0;padding:4px 20px 12px;background:#f5f6f8;border-radius:10px}
dt{font-weight:600;margin-top:10px}dd{margin:0;color:#3c444e}
figure{margin:18px 0 0;background:#fff;border:1px solid #e3e6ea;border-radius:12px;padding:18px 18px 16px}
img{display:block;width:100%;height:auto;max-width:940px;margin:0 auto}
figcaption{margin:14px auto 0;max-width:54em;font-size:15px;line-height:1.55;color:#3c444e}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:14.5px;font-variant-numeric:tabular-nums;margin:16px 0}
th,td{padding:6px 20px 6px 0;text-align:left;border-bottom:1px solid #e3e6ea;white-space:nowrap}
thead th{color:#5b6470;font-weight:500;font-size:14px}tbody th{font-weight:600}.n{text-align:right}
.m{white-space:nowrap}
li{margin:6px 0}footer{margin-top:56px;padding-top:16px;border-top:1px solid #e3e6ea;font-size:15px;color:#5b6470}
@media print{section{break-inside:avoid}figure{border:0}}
"""
