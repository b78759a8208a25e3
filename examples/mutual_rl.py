"""Mutual reinforcement learning in one file: two small policies of different vocabularies, GRPO and rescues (SGT).

    python examples/mutual_rl.py            # about two minutes on one core; --alone trains without rescues

Two policies learn to write a word in capitals. One reads letters, the other pairs of letters, so no token of one means
anything to the other: what passes between them is text. Each was shown half of the task before (words that begin with
a, b, c, or with d, e, f). Alone, a policy that never succeeds on a prompt learns nothing there: all its rewards are
equal, and so all its advantages are 0. With success-gated transfer (SGT, arXiv 2605.07244) it imitates one answer of
its peer that the verifier found right.

With seed 1, on words that nobody trains on: letters 0.48 -> 0.80 and pairs 0.34 -> 0.46; alone they end at 0.65 and
0.42. That is one seed and 384 answers, enough to watch and no measurement.

mrl does the same with whole models, in many processes at once. `tests/system/test_mutual_rl_run.py` holds `train_step`
to a synchronous run of mrl on the same seeds: the same answers, the same rescues, and the same parameters to 1e-5.
"""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

LETTERS = "abcdef"
WORDS = ["".join(letters) for letters in itertools.product(LETTERS, repeat=3)]
GROUP_SIZE = 8
PROMPTS_PER_STEP = 24
MAX_NEW_TOKENS = 5
CLIP = 0.2
RESCUE_WEIGHT = 0.6
EPS = 1e-6


# 1. The task: a prompt, and a verifier that reads text and nothing else.


def prompt_of(word: str) -> str:
    """What a policy is asked."""
    return f"{word}="


def verify(word: str, answer: str) -> float:
    """1 for the word in capitals, else 0."""
    return float(answer == word.upper())


# 2. Vocabularies: the same text is other tokens for each policy.


class Vocabulary:
    """Tokens are pieces of text; a text is cut greedily, the longest piece first. The last id ends an answer."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = sorted(pieces, key=lambda piece: (-len(piece), piece))
        self.end = len(self.pieces)

    def __len__(self) -> int:
        return len(self.pieces) + 1

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ids = []
        while text:
            index = next(i for i, piece in enumerate(self.pieces) if text.startswith(piece))
            ids.append(index)
            text = text[len(self.pieces[index]) :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, up to the end of the answer."""
        return "".join(self.pieces[i] for i in itertools.takewhile(lambda i: i != self.end, ids))


CHARACTERS = [*LETTERS, *LETTERS.upper(), "="]
PAIRS = [a + b for a in LETTERS for b in LETTERS] + [a + b for a in LETTERS.upper() for b in LETTERS.upper()]


# 3. A policy: a recurrent network that gives the log-probabilities of the next token.


class Network(nn.Module):
    """Ids [N, L] to log-probabilities [N, L, V] of what comes next."""

    def __init__(self, size: int, width: int = 96) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(size, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, size)

    def forward(self, ids_NL: Tensor) -> Tensor:
        """Log-softmax over the vocabulary at every place."""
        return self.head(self.body(self.embed(ids_NL))[0]).log_softmax(-1)


@dataclass
class Answer:
    """One sampled answer: ids are the policy's own, and nobody else's."""

    ids: list[int]
    logprobs: list[float]
    """Under the policy that sampled."""
    text: str
    reward: float


@dataclass
class Row:
    """What one summand of the loss is about: an own answer with its advantage, or a rescue."""

    prompt: list[int]
    answer: list[int]
    behaviour: list[float] = field(default_factory=list)
    advantage: float = 0.0
    is_rescue: bool = False


class Policy:
    """A network, its vocabulary and its optimizer."""

    def __init__(self, name: str, vocabulary: Vocabulary, network: nn.Module, lr: float = 2e-3) -> None:
        self.name, self.vocabulary, self.network = name, vocabulary, network
        self.optimizer = torch.optim.Adam(network.parameters(), lr=lr)

    @torch.no_grad()
    def sample(self, word: str, uniforms_NT: np.ndarray) -> list[Answer]:
        """N answers to one prompt, token by token; a number in [0, 1) for each token says which one is drawn."""
        vocabulary = self.vocabulary
        ids_NL = torch.tensor([vocabulary.encode(prompt_of(word))] * len(uniforms_NT))
        start, told = ids_NL.shape[1], []
        for uniforms_N in torch.from_numpy(uniforms_NT).unbind(1):
            logprobs_NV = self.network(ids_NL)[:, -1]
            cumulative_NV = logprobs_NV.exp().cumsum(1, dtype=torch.float64)
            next_N1 = torch.searchsorted(cumulative_NV, uniforms_N[:, None] * cumulative_NV[:, -1:], right=True)
            told.append(logprobs_NV.gather(1, next_N1))
            ids_NL = torch.cat([ids_NL, next_N1], dim=1)
        answers = []
        for ids, logprobs in zip(ids_NL[:, start:].tolist(), torch.cat(told, 1).tolist(), strict=True):
            length = ids.index(vocabulary.end) + 1 if vocabulary.end in ids else len(ids)
            text = vocabulary.decode(ids)
            reward = verify(word, text) if vocabulary.end in ids else 0.0
            answers.append(Answer(ids[:length], logprobs[:length], text, reward))
        return answers

    def logprobs(self, rows: Sequence[Row]) -> list[Tensor]:
        """For each row [T] log-probabilities of its answer's tokens under the network as it is now."""
        texts = [torch.tensor(row.prompt + row.answer) for row in rows]
        ids_NL = nn.utils.rnn.pad_sequence(texts, batch_first=True)  # what follows an answer changes nothing in it
        told_NL = self.network(ids_NL)[:, :-1].gather(2, ids_NL[:, 1:, None])[..., 0]
        starts = [len(row.prompt) - 1 for row in rows]
        return [
            told_L[start : start + len(row.answer)] for told_L, start, row in zip(told_NL, starts, rows, strict=True)
        ]

    def show(self, words: Sequence[str], steps: int = 300) -> None:
        """Supervised learning of some words, so that there is something to reinforce."""
        rng = np.random.default_rng(0)
        for _ in range(steps):
            shown = rng.choice(words, PROMPTS_PER_STEP)
            rows = [self.row_of(word, word.upper()) for word in shown]
            self.update(torch.stack([-logprobs_T.mean() for logprobs_T in self.logprobs(rows)]).mean())

    def row_of(self, word: str, text: str) -> Row:
        """A text in own tokens, closed by the own end: this is all that a peer's answer can be here."""
        encode = self.vocabulary.encode
        return Row(encode(prompt_of(word)), [*encode(text), self.vocabulary.end], is_rescue=True)

    def update(self, loss: Tensor) -> None:
        """One optimizer step."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def small_policy(name: str, pieces: Sequence[str], seed: int) -> Policy:
    """One with random weights."""
    torch.manual_seed(seed)
    vocabulary = Vocabulary(pieces)
    return Policy(name, vocabulary, Network(len(vocabulary)))


# 4. GRPO: a group of answers is its own baseline (arXiv 2402.03300).


def advantages(rewards: Sequence[float]) -> np.ndarray:
    """A_i = (r_i - mean) / (std + eps); exactly 0 in a group of equal rewards."""
    rewards_G = np.asarray(rewards, dtype=np.float64)
    if np.all(rewards_G == rewards_G[0]):
        return np.zeros(len(rewards_G), dtype=np.float32)
    return ((rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=1) + EPS)).astype(np.float32)


def surrogate(logprobs_T: Tensor, behaviour_T: Tensor, advantage: float) -> Tensor:
    """-min(r A, clip(r) A) for every token, r = pi / pi_behaviour."""
    ratio_T = (logprobs_T - behaviour_T).exp()
    return -torch.minimum(ratio_T * advantage, ratio_T.clamp(1 - CLIP, 1 + CLIP) * advantage)


# 5. SGT: where every own answer failed, one right answer of the peer is imitated.


def rescue(word: str, own: Sequence[Answer], peer: Sequence[Answer], rng: np.random.Generator) -> str | None:
    """The text that is imitated; None where the own group needs no help, or the peer has none to give."""
    if any(answer.reward == 1.0 for answer in own):
        return None
    right = sorted({answer.text for answer in peer if answer.reward == 1.0})
    return right[rng.integers(len(right))] if right else None


# 6. One step: each term is a mean over the tokens of a row, and is divided by what was known before.


def loss_of(policy: Policy, rows: Sequence[Row], num_prompts: int) -> Tensor:
    """Own rows divided by their number, rescues by the number of prompts."""
    own, rescues = torch.zeros(()), torch.zeros(())
    for row, logprobs_T in zip(rows, policy.logprobs(rows), strict=True):
        if row.is_rescue:
            rescues = rescues - logprobs_T.mean()
        else:
            own = own + surrogate(logprobs_T, torch.tensor(row.behaviour), row.advantage).mean()
    num_own = sum(not row.is_rescue for row in rows)
    return own / max(1, num_own) + RESCUE_WEIGHT * rescues / num_prompts


def rows_of(policy: Policy, groups: dict[str, list[Answer]], peers: dict[str, list[Answer]], seed: int) -> list[Row]:
    """What a policy trains on in one step; `peers` is empty where it is alone."""
    rng, rows = np.random.default_rng(seed), []
    for word, group in groups.items():
        prompt = policy.vocabulary.encode(prompt_of(word))
        scored = zip(group, advantages([answer.reward for answer in group]), strict=True)
        rows += [Row(prompt, answer.ids, answer.logprobs, float(advantage)) for answer, advantage in scored]
        text = rescue(word, group, peers.get(word, ()), rng)
        if text is not None:
            rows.append(policy.row_of(word, text))
    return rows


def train_step(
    policies: Sequence[Policy], groups: Sequence[dict[str, list[Answer]]], seed: int, alone: bool = False
) -> list[list[Row]]:
    """One update of both policies, on the groups that each of them sampled; returns what each was trained on."""
    trained = []
    for policy, own, peers in zip(policies, groups, groups[::-1], strict=True):
        rows = rows_of(policy, own, {} if alone else peers, seed)
        policy.update(loss_of(policy, rows, len(own)))
        trained.append(rows)
    return trained


# 7. Both learn.


def accuracy(policy: Policy, words: Sequence[str], rng: np.random.Generator) -> float:
    """Share of right answers among those that are sampled, a group for each word."""
    groups = [policy.sample(word, rng.random((GROUP_SIZE, MAX_NEW_TOKENS))) for word in words]
    return float(np.mean([answer.reward for group in groups for answer in group]))


def main(steps: int, alone: bool, seed: int) -> dict[str, tuple[float, float]]:
    """Train both, and return the accuracy of each before and after, on words that nobody trains on."""
    rng = np.random.default_rng(seed)
    words = list(rng.permutation(WORDS))
    held_out, pool = words[:48], words[48:]
    policies = [small_policy("letters", CHARACTERS, seed), small_policy("pairs", [*CHARACTERS, *PAIRS], seed + 1)]
    for policy, first in zip(policies, ("abc", "def"), strict=True):
        policy.show([word for word in pool if word[0] in first])
    before = {policy.name: accuracy(policy, held_out, rng) for policy in policies}
    for step in range(steps):
        asked = rng.choice(pool, PROMPTS_PER_STEP, replace=False)
        groups = [
            {word: policy.sample(word, rng.random((GROUP_SIZE, MAX_NEW_TOKENS))) for word in asked}
            for policy in policies
        ]
        for policy, own, rows in zip(policies, groups, train_step(policies, groups, step, alone), strict=True):
            reward = np.mean([answer.reward for group in own.values() for answer in group])
            num_rescues = sum(row.is_rescue for row in rows)
            print(f"step {step + 1:3} {policy.name:7} reward {reward:.2f} rescues {num_rescues}")
    after = {policy.name: accuracy(policy, held_out, rng) for policy in policies}
    for name in before:
        print(f"held-out accuracy of {name}: {before[name]:.2f} -> {after[name]:.2f}")
    return {name: (before[name], after[name]) for name in before}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--alone", action="store_true", help="no rescues")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    main(given.steps, given.alone, given.seed)
