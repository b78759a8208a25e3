"""Continuous batching: an answer that ends makes room for the next one at once.

Every step runs the model once over the newest token of every row. Prompts are read ahead, a few at once, each a single
time for all answers to it. An ended row is given to a waiting answer; when none waits, the last row moves into it.

Keys and values of a conversation's turn are kept while rows are free, until weights change: of the prompt of the next
turn only the new tokens are read.
"""

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from mrl.engines.engine import (
    Decoding,
    FinishedAnswer,
    Generation,
    GenerationRequest,
    PartialAnswer,
    Sampling,
    StopStringMatcher,
)
from mrl.engines.slot_cache import CachedRow, CachedRows, PrefilledPrompt, SlotCache
from mrl.engines.token_sampling import sample, sample_decoded, uniforms
from mrl.models.routing.router_record import RouterRecord
from mrl.records.chosen_experts import Experts, joined
from mrl.records.finish import FinishReason
from mrl.records.version import Version, VersionSpan, append_span

PROMPTS_AT_ONCE = 16
PROMPT_TOKENS_AT_ONCE = 4096
"""Prompts, and tokens with padding and kept tokens, that one forward reads at most; a longer prompt is read alone."""


@dataclass(slots=True)
class _Waiting:
    """A request with answers that are still to be begun."""

    request: GenerationRequest
    begun: int = 0
    prompt: PrefilledPrompt | None = None
    experts: Experts | None = None
    """[P - 1, X] experts of the prompt, as it was read."""
    epoch: int = 0
    """Number of the weights that read the prompt."""

    @property
    def read_ids(self) -> npt.NDArray[np.int32]:
        """[P - 1] ids that are read before an answer begins; the last token is read by the answer's first step."""
        return self.request.prompt_token_ids[:-1]


@dataclass(slots=True)
class _Answer:
    """An answer that is being sampled in one row."""

    request_id: str
    index: int
    watch: StopStringMatcher
    decoding: Decoding | None = None
    """None: the engine's own Sampling."""
    streams: bool = False
    num_told: int = 0
    """Tokens that `grown` has told."""
    before: Experts | None = None
    """[P - 1, X] experts of the prompt, where the answer tells those, too."""
    prompt_token_ids: npt.NDArray[np.int32] | None = None
    conversation: str = ""
    """Name under which the row is kept when the answer has ended; "" where it is not kept."""
    spans: list[VersionSpan] = field(default_factory=list)
    """Spans of the versions before the present one."""

    def spans_at(self, num_tokens: int, version: Version) -> list[VersionSpan]:
        """Version spans of the first `num_tokens` tokens, the newest of which `version` sampled."""
        return append_span(self.spans, num_tokens - sum(span.num_tokens for span in self.spans), version)


class ContinuousBatch:
    """The answers that one model samples. Only `submit` may be called beside another method."""

    def __init__(
        self, model: PreTrainedModel, sampling: Sampling, *, max_running: int, record: RouterRecord | None = None
    ) -> None:
        """At most `max_running` answers are sampled at once. With a `record` they tell the experts that it saw."""
        self._model, self._sampling, self._max_running = model, sampling, max_running
        self._waiting: deque[_Waiting] = deque()
        self._answers: list[_Answer] = []
        self._dead: list[int] = []
        """Rows whose answers have ended or were aborted."""
        self._cache, self._kept = SlotCache(model.config, max_running), CachedRows()
        self._version: Version | None = None
        self._epoch = 0
        self.running = 0
        """Number of answers that are being sampled."""
        self.waiting = 0
        """Number of answers that are not yet begun."""
        self.generated_tokens = 0
        self.prompt_tokens = 0
        self.reused_prompt_tokens = 0
        limit, self._record = sampling.max_new_tokens, record
        experts = [] if record is None else [("experts", record.dtype, (limit, record.shape.num_slots))]
        self._rows = np.zeros(
            max_running,
            dtype=np.dtype(
                [
                    ("seed", np.uint64),
                    ("position", np.int64),
                    ("newest", np.int64),
                    ("length", np.int64),
                    ("limit", np.int64),
                    ("tokens", np.int32, (limit,)),
                    ("logprobs", np.float32, (limit,)),
                    *experts,
                ],
                align=True,
            ),
        )

    @property
    def in_flight(self) -> int:
        """Number of answers that were handed in and have not ended."""
        return self.running + self.waiting

    @property
    def streams(self) -> bool:
        """Whether any answer that is being sampled streams."""
        return any(answer.streams for answer in self._answers)

    def grown(self) -> list[PartialAnswer]:
        """See Engine."""
        found = []
        for row, answer in enumerate(self._answers):
            length = int(self._rows["length"][row])
            if answer.streams and row not in self._dead and length > answer.num_told:
                answer.num_told = length
                found.append(PartialAnswer(answer.request_id, answer.index, self._sampled(row, FinishReason.ABORT)))
        return found

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Hand in requests; their answers begin when rows are free."""
        self._waiting.extend(_Waiting(request) for request in requests if request.seeds.size)
        self.waiting += sum(request.seeds.size for request in requests)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; rows of their answers are free from the next step."""
        gone = set(request_ids)
        self._waiting = deque(waiting for waiting in self._waiting if waiting.request.request_id not in gone)
        self.waiting = sum(waiting.request.seeds.size - waiting.begun for waiting in self._waiting)
        dead = {row for row, answer in enumerate(self._answers) if answer.request_id in gone}
        self._dead = sorted(dead.union(self._dead))
        self.running = len(self._answers) - len(self._dead)

    def tensors(self) -> list[Tensor]:
        """Tensors that are held between two steps: the cache, kept rows, and prompts that were read ahead."""
        read = [waiting.prompt.layers for waiting in self._waiting if waiting.prompt is not None]
        ahead = [tensor for layers in read for pair in layers for tensor in pair]
        return [*self._cache.tensors(), *self._kept.tensors(), *ahead]

    def relabel(self, version: Version) -> None:
        """Note that the weights have changed: label tokens with `version` from now on, and read prompts anew."""
        for row, answer in enumerate(self._answers):
            if self._version is not None:
                answer.spans = answer.spans_at(int(self._rows["length"][row]), self._version)
        self._version = version
        self._epoch += 1
        self._kept.leave_room(0, 0)

    @torch.inference_mode()
    def step(self) -> list[FinishedAnswer]:
        """Sample one more token for every running answer; return the answers that ended."""
        self._refill()
        if not self._answers:
            return []
        self._cache.prepare()
        logits = self._forward()
        self._cache.advance()
        rows = self._rows[: len(self._answers)]
        draws = torch.from_numpy(uniforms(rows["seed"], rows["length"])).to(logits.device)
        tokens, logprobs = self._sample(logits, draws)
        return self._append(rows, tokens.cpu().numpy(), logprobs.cpu().numpy())

    def _sample(self, logits: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Sample one token per row. Rows with a Decoding change nothing for the rows beside them."""
        apart: defaultdict[Decoding, list[int]] = defaultdict(list)
        for row, answer in enumerate(self._answers):
            if answer.decoding is not None:
                apart[Decoding(answer.decoding.temperature, answer.decoding.top_p)].append(row)
        tokens, logprobs = sample(logits, draws, self._sampling.temperature)
        for decoding, rows in apart.items():
            tokens[rows], logprobs[rows] = sample_decoded(logits[rows], draws[rows], decoding)
        return tokens, logprobs

    def _forward(self) -> Tensor:
        """[rows, V] logits of the next token."""
        rows, device = self._rows[: len(self._answers)], self._model.device
        output = self._model(
            input_ids=_column(rows["newest"], device),
            attention_mask=self._cache.mask(device),
            position_ids=_column(rows["position"], device),
            past_key_values=self._cache,
            use_cache=True,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _append(
        self, rows: npt.NDArray[np.void], tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
    ) -> list[FinishedAnswer]:
        every, length = np.arange(rows.size), rows["length"]
        if self._record is not None:
            rows["experts"][every, length] = self._record.last()
        rows["tokens"][every, length] = tokens
        rows["logprobs"][every, length] = logprobs
        rows["newest"] = tokens
        rows["length"] += 1
        rows["position"] += 1
        self.generated_tokens += rows.size
        stopped = np.isin(tokens, self._sampling.eos_ids)
        if any(one.watch.looks for one in self._answers):
            ends = [one.watch.ends_at([token]) for one, token in zip(self._answers, tokens.tolist(), strict=True)]
            stopped |= np.array([end is not None for end in ends], dtype=bool)
        self._dead = np.flatnonzero(stopped | (rows["length"] == rows["limit"])).tolist()
        self.running -= len(self._dead)
        self._keep_rows(self._dead)
        return [self._finish(row, FinishReason.STOP if stopped[row] else FinishReason.LENGTH) for row in self._dead]

    def _keep_rows(self, ended: Sequence[int]) -> None:
        """Keep ended rows of conversations, unless answers wait for the rows, or experts of prompts are to be told."""
        if self._record is not None or self.waiting >= self._max_running - self.running:
            return
        for row in ended:
            answer = self._answers[row]
            if answer.conversation and not answer.spans:  # else weights changed in mid-answer
                assert answer.prompt_token_ids is not None, "an answer that ends has a prompt"
                sampled = self._rows["tokens"][row, : self._rows["length"][row] - 1]
                token_ids = np.concatenate([answer.prompt_token_ids, sampled])
                self._kept.keep(answer.conversation, CachedRow(token_ids, self._cache.copied(row)))

    def _finish(self, row: int, reason: FinishReason) -> FinishedAnswer:
        answer = self._answers[row]
        return FinishedAnswer(answer.request_id, answer.index, self._sampled(row, reason))

    def _sampled(self, row: int, reason: FinishReason) -> Generation:
        length = int(self._rows["length"][row])
        assert self._version is not None, "no request is accepted before weights are loaded"
        tokens, logprobs = self._rows["tokens"][row, :length].copy(), self._rows["logprobs"][row, :length].copy()
        answer = self._answers[row]
        spans, experts = answer.spans_at(length, self._version), None
        if self._record is not None and answer.decoding is None:
            sampled = self._rows["experts"][row, :length].copy()
            experts = sampled if answer.before is None else joined([answer.before, sampled])
        return Generation(tokens, logprobs, spans, reason, experts=experts)

    def _refill(self) -> None:
        """Give free rows to waiting answers, ended rows first; drop the ended rows that are left."""
        free = deque([*self._dead, *range(len(self._answers), self._max_running)])
        while free and self._waiting:
            waiting = self._waiting[0]
            rows = [free.popleft() for _ in range(min(len(free), waiting.request.seeds.size - waiting.begun))]
            self._begin(waiting, rows)
            if waiting.begun == waiting.request.seeds.size:
                self._waiting.popleft()
        for row in reversed([row for row in self._dead if row in free]):
            self._drop(row)
        self._dead = []
        self._kept.leave_room(self._max_running - self.running, self._cache.num_places)

    def _begin(self, waiting: _Waiting, rows: list[int]) -> None:
        """Begin the next answers of a request in these rows."""
        request = waiting.request
        self._cache.place(self._read(waiting), rows)
        index = range(waiting.begun, waiting.begun + len(rows))
        waiting.begun = index.stop
        self.waiting -= len(rows)
        self.running += len(rows)
        state = self._rows
        state["seed"][rows] = request.seeds[index.start : index.stop]
        state["position"][rows] = request.prompt_token_ids.size - 1
        state["newest"][rows] = request.prompt_token_ids[-1]
        state["length"][rows] = 0
        sampling = self._sampling.decoded(request.decoding)
        state["limit"][rows] = sampling.max_new_tokens
        self._answers.extend(_Answer("", 0, StopStringMatcher(None)) for _ in range(max(rows) + 1 - len(self._answers)))
        for row, place in zip(rows, index, strict=True):
            watch = StopStringMatcher(sampling.stop)
            self._answers[row] = _Answer(request.request_id, place, watch, request.decoding, request.streams)
            self._answers[row].before = waiting.experts if request.num_told_before(place) else None
            self._answers[row].prompt_token_ids = request.prompt_token_ids
            self._answers[row].conversation = request.conversations[place] if request.conversations else ""

    def _drop(self, row: int) -> None:
        """Remove a row; the last row takes its place."""
        self._cache.drop(row)
        self._rows[row] = self._rows[len(self._answers) - 1]
        self._answers[row] = self._answers[-1]
        self._answers.pop()

    def _read(self, wanted: _Waiting) -> PrefilledPrompt:
        """Return the prompt of a request as read by the present weights; if need be, read it with the next prompts."""
        if wanted.prompt is None or wanted.epoch != self._epoch:
            batch = list(self._next_to_read(wanted))
            layers = self._read_batch(batch)
            read = None if self._record is None or not layers else self._record.last_of_rows(len(batch))
            for row, waiting in enumerate(batch):
                size = waiting.read_ids.size
                waiting.prompt = PrefilledPrompt(layers, row, size)
                for name in waiting.request.conversations:
                    self._kept.forget(name)
                waiting.experts = read[row, -size:] if read is not None and size else None
                waiting.epoch = self._epoch
        assert wanted.prompt is not None, "the forward has read this prompt"
        return wanted.prompt

    def _next_to_read(self, wanted: _Waiting) -> Iterator[_Waiting]:
        """Yield `wanted`, the first request that waits, and requests behind it whose prompts one forward can read."""
        longest, count, goes_on = 0, 0, self._num_kept(wanted) > 0
        for waiting in itertools.islice(self._waiting, PROMPTS_AT_ONCE):
            is_read = waiting.prompt is not None and waiting.epoch == self._epoch
            # Beside a prompt of which nothing is kept, the others would be read over its whole length.
            if not is_read and (self._num_kept(waiting) > 0) is goes_on:
                count, longest = count + 1, max(longest, waiting.request.prompt_token_ids.size)
                if waiting is not wanted and count * longest > PROMPT_TOKENS_AT_ONCE:
                    return
                yield waiting

    def _kept_row(self, waiting: _Waiting) -> CachedRow | None:
        """Return the kept row of the conversation that a request continues, or None."""
        names = waiting.request.conversations
        return self._kept.find(names[0]) if len(names) == 1 else None

    def _num_kept(self, waiting: _Waiting) -> int:
        """Tokens of a request's prompt that are kept and need not be read; a forward has to read one at least."""
        kept = self._kept_row(waiting)
        return 0 if kept is None else kept.num_shared(waiting.read_ids[:-1])

    def _read_batch(self, batch: Sequence[_Waiting]) -> list[tuple[Tensor, Tensor]]:
        """Read prompts; return keys and values of every layer, padded on the left, all columns also of sliding windows.

        Of each prompt as many tokens are read as are new in the prompt with the most new ones, so no row has a gap.
        """
        prompts = [waiting.read_ids for waiting in batch]
        width = max(waiting.read_ids.size - self._num_kept(waiting) for waiting in batch)
        if not width:
            return []
        reused = [max(0, prompt.size - width) for prompt in prompts]
        before, device = max(reused), self._model.device
        ids, mask = (np.zeros((len(batch), columns), dtype=np.int64) for columns in (width, before + width))
        for row, (prompt, num) in enumerate(zip(prompts, reused, strict=True)):
            ids[row, width - (prompt.size - num) :] = prompt[num:]
            mask[row, before + width - prompt.size :] = 1
        cache = DynamicCache()
        if before:
            for layer, (keys, values) in enumerate(_beside([*map(self._kept_row, batch)], reused)):
                cache.update(keys, values, layer)
        for waiting, num in zip(batch, reused, strict=True):
            answers, size = waiting.request.seeds.size - waiting.begun, waiting.read_ids.size
            self.prompt_tokens += answers * size
            self.reused_prompt_tokens += num + (answers - 1) * size
        self._model(
            input_ids=torch.from_numpy(ids).to(device),
            attention_mask=torch.from_numpy(mask).to(device),
            position_ids=torch.from_numpy((mask.cumsum(-1) - 1).clip(0)[:, before:]).to(device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return [(keys, values) for keys, values, _ in cache]


def _beside(kept: Sequence[CachedRow | None], reused: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for every layer [rows, heads, columns, head_dim] keys and values of the first `reused` tokens of each row.

    Rows are padded on the left.
    """
    rows = [row for row in kept if row is not None]
    for layer in range(len(rows[0].layers)):
        like = rows[0].layers[layer]
        pair = [one.new_zeros(len(kept), one.shape[0], max(reused), one.shape[2]) for one in like]
        for place, (row, num) in enumerate(zip(kept, reused, strict=True)):
            if row is not None and num:
                for whole, one in zip(pair, row.layers[layer], strict=True):
                    whole[place, :, max(reused) - num :] = one[:, :num]
        yield pair[0], pair[1]


def _column(values: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(values[:, None].copy()).to(device)
