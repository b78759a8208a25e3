"""Success records of one policy or another."""

from mrl.records.experience import OutcomeRecord, TokenTrace
from mrl.records.finish import FinishReason
from mrl.records.version import Version


def success(
    record_id: str = "r1",
    source: str = "qwen",
    prompt_id: str = "p1",
    step: int = 0,
    epoch: int = 0,
    *,
    completion: bytes = b"yah",
    trace: TokenTrace | None = None,
) -> OutcomeRecord:
    """Make a success record of the version (`epoch`, `step`)."""
    version = Version(epoch, step)
    return OutcomeRecord(
        record_id=record_id, source=source, oldest=version, newest=version, fingerprint="f", prompt_id=prompt_id,
        task="t", created_unix_s=0.0, completion=completion, finish_reason=FinishReason.STOP, verifier="v",
        reward=1.0, trace=trace,
    )  # fmt: skip
