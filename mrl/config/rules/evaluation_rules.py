"""Rules on evaluation that span several keys, in a configuration and on the command line."""

from collections.abc import Sequence

from mrl.errors import ConfigError


def check_draws(samples: int, ks: Sequence[int], *, key: str) -> None:
    """Raises ConfigError where one of the `ks` is no number of answers that can be drawn of `samples`."""
    for k in ks:
        if not 1 <= k <= samples:
            raise ConfigError(
                f"{key}: pass@k needs at least k answers to each prompt",
                got=f"k = {k} with {samples} answer{'s' * (samples != 1)}",
                wanted=f"k from 1 to {samples}",
                cure="raise samples, or lower k",
            )


def greedy_note(temperature: float | None, samples: int) -> str:
    """Return a warning about several greedy answers, which are all the same; empty where there is none to give."""
    if temperature != 0 or samples == 1:
        return ""
    return f"temperature 0 gives the same answer {samples} times: pass@k equals pass@1, for {samples} times the work"
