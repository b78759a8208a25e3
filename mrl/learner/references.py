"""A learner's canaries: its own scores of short texts for every version, compared with those of the version before."""

from collections.abc import Sequence

import numpy as np

from mrl.learner.sharding import is_wrapped
from mrl.learner.step_order import StepOrder
from mrl.learner.trainer import Trainer
from mrl.models.number_formats import COARSENESS, NumberFormat, coarser
from mrl.weights.canary import make_canary, reference_logprobs, rounded_logprobs
from mrl.weights.canary_texts import MAX_ROW_TOKENS, texts_of_prompts, texts_of_step
from mrl.weights.manifest import Canary


class CanaryReferences:
    """Texts and scores of the canaries of one policy; every rank has the same texts.

    The first texts are prompts, later ones rows of the last step: a step changes scores of its own rows most.
    """

    def __init__(
        self,
        trainer: Trainer,
        prompts: Sequence[Sequence[int]],
        *,
        engine_format: NumberFormat = "float32",
        merges_adapters: bool = False,
        sends_adapters: bool = False,
        max_row_tokens: int = MAX_ROW_TOKENS,
    ) -> None:
        """`engine_format` is the number format of the engines.

        With `merges_adapters` engines get weights with merged adapters, with `sends_adapters` the adapters alone.
        """
        self._trainer, self._max_row_tokens = trainer, max_row_tokens
        ids = [np.asarray(prompt, dtype=np.int32) for prompt in prompts]
        self.texts = texts_of_prompts(ids, max_row_tokens=max_row_tokens)
        precision: NumberFormat = trainer.precision
        self._format = coarser(precision, engine_format)
        # The version before is scored with its weights rounded as in the engines, so the learner has to know how.
        # It does not where it computes in a coarser format than they, or where they round sums that it never made.
        engine_rounds_more = COARSENESS.index(engine_format) >= COARSENESS.index(precision)
        self._can_compare = engine_rounds_more and not (merges_adapters and engine_format != "float32")
        self._rounds_sums = sends_adapters and self._format in ("float16", "bfloat16")
        self._previous: list[list[float]] = []
        self._previous_rounded: list[list[float]] = []

    def before_step(self, order: StepOrder) -> None:
        """Score the rows that are about to be trained on under the weights published last; all ranks call it."""
        if examples := order.examples:  # without rows the texts before are as good
            self.texts = texts_of_step(
                [example.prompt_token_ids for example in examples],
                [example.answer_token_ids for example in examples],
                max_row_tokens=self._max_row_tokens,
            )
        if self._can_compare and self._takes_part:
            self._previous = reference_logprobs(self._trainer.model, self.texts, self._arithmetic)
            if self._rounds_sums:
                self._previous_rounded = rounded_logprobs(self._trainer.model, self.texts, self._arithmetic)

    def make(self) -> Canary | None:
        """Return the canary of the current weights; all ranks call it. None for a rank that has no part in it."""
        if not self._takes_part:
            return None
        before = self._previous, self._previous_rounded
        self._previous, self._previous_rounded = [], []
        return make_canary(self._trainer.model, self.texts, self._arithmetic, *before)

    @property
    def _takes_part(self) -> bool:
        return self._trainer.world.is_first or is_wrapped(self._trainer.model)

    @property
    def _arithmetic(self) -> NumberFormat:
        """Number format: engines on GPUs multiply float32 on tensor cores, in attention whatever torch is told."""
        on_gpu = self._trainer.world.device.type == "cuda"
        return "tf32" if on_gpu and self._format == "float32" else self._format
