"""Messages that are sent again until the daemon answers them."""

from collections.abc import Callable
from dataclasses import dataclass

RESEND_S = 2.0
MAX_RESEND_S = 30.0


@dataclass(slots=True)
class Unanswered:
    """One message, and what its sender wants to know about it."""

    body: bytes
    sent_s: float
    num_bytes: int = 0
    """What it weighs; its own length, if nothing else is said."""
    is_sent: bool = True
    """False while the message waits for its turn."""
    num_records: int = 0
    """Records that a Put holds."""
    is_watch: bool = False
    is_awaited: bool = False
    """Whether somebody stands still until the answer comes."""
    parts: int = 0
    """Parts of the answer that have come, in order."""
    wait_s: float = RESEND_S
    whole: Callable[[], bytes | None] | None = None
    """Makes the body that is sent a second time, where it is another one."""

    def __post_init__(self) -> None:
        self.num_bytes = self.num_bytes or len(self.body)

    def complete(self) -> None:
        """Whatever kept the first copy from being answered: the next one depends on nothing but the link."""
        if self.whole is not None:
            self.body, self.whole = self.whole() or self.body, None


class Outbox:
    """Unanswered messages by number, oldest first."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._sent_bytes = 0
        self._messages: dict[int, Unanswered] = {}
        self._unsent: dict[int, Unanswered] = {}

    def __len__(self) -> int:
        return len(self._messages)

    def __contains__(self, seq: int) -> bool:
        return seq in self._messages

    def add(self, seq: int, message: Unanswered) -> None:
        """Keep a message; numbers rise."""
        self._messages[seq] = message
        self.num_bytes += message.num_bytes
        if message.is_sent:
            self._sent_bytes += message.num_bytes
        else:
            self._unsent[seq] = message

    def remove(self, seq: int) -> Unanswered | None:
        """The message was answered, or is given up."""
        message = self._messages.pop(seq, None)
        if message is not None:
            self.num_bytes -= message.num_bytes
            if self._unsent.pop(seq, None) is None:
                self._sent_bytes -= message.num_bytes
        return message

    def next_to_send(self, window_bytes: int, now_s: float) -> list[bytes]:
        """What may be sent now for the first time: no more than `window_bytes` unanswered, but always one message."""
        bodies = []
        while self._unsent:
            seq, message = next(iter(self._unsent.items()))
            if self._sent_bytes and self._sent_bytes + message.num_bytes > window_bytes:
                break
            del self._unsent[seq]
            message.is_sent, message.sent_s = True, now_s
            self._sent_bytes += message.num_bytes
            bodies.append(message.body)
        return bodies

    def note_part(self, seq: int, part: int, parts: int) -> None:
        """One part of an answer has come; the last one of an unbroken series answers the message."""
        message = self._messages.get(seq)
        if message is None:
            return
        if part in (1, message.parts + 1):
            message.parts = part
        if message.parts == part == parts:
            self.remove(seq)

    def oldest(self) -> int | None:
        """The oldest message that nobody stands still for."""
        return next((seq for seq, message in self._messages.items() if not message.is_awaited), None)

    def drop_watches(self) -> None:
        """Give up what asks for watches."""
        for seq in [seq for seq, message in self._messages.items() if message.is_watch]:
            self.remove(seq)

    def is_clear(self, upto_seq: int) -> bool:
        """Whether nothing up to this number waits any more."""
        return next(iter(self._messages), upto_seq + 1) > upto_seq

    def overdue(self, now_s: float) -> list[bytes]:
        """What has to be sent again by now, each time after a longer pause."""
        sent = (message for message in self._messages.values() if message.is_sent)
        overdue = [message for message in sent if now_s - message.sent_s >= message.wait_s]
        for message in overdue:
            message.sent_s, message.wait_s = now_s, min(2 * message.wait_s, MAX_RESEND_S)
            message.complete()
        return [message.body for message in overdue]

    def start_over(self) -> None:
        """Nothing of it has been sent, as far as a new daemon is concerned."""
        self._sent_bytes, self._unsent = 0, dict(self._messages)
        for message in self._messages.values():
            message.is_sent = False
            message.complete()

    def postpone(self, now_s: float) -> None:
        """The daemon is at work: what it has not come to yet waits from now on."""
        for message in self._messages.values():
            if message.is_sent:
                message.sent_s = now_s
