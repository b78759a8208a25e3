"""Progress of a learner's workers, by which its waits for groups are bounded.

A worker reports its progress every second, also while its engine starts, samples for long or loads new weights. As long
as any worker gets on, a run is slow at the most.
"""

from dataclasses import dataclass, field

from mrl.records.rollouts import WorkRequest


@dataclass(slots=True)
class WorkerActivity:
    """Progress of all workers in one life of a learner; times are of the monotonic clock. Not thread-safe."""

    heard_s: float
    """When a worker was heard last, or the learner began to listen."""
    moved_s: float
    """When a worker last sampled, judged, delivered or loaded something, or got news of new weights."""
    worked_s: float
    """When a worker last did one of these things other than loading."""
    num_moves: int = 0
    """How often any part of this policy got on."""
    has_spoken: bool = False
    """Whether any worker was heard at all."""
    has_served: bool = False
    """Whether any worker has proved weights of this life."""
    _progress: dict[str, int] = field(default_factory=dict)
    _published: int = 0

    @classmethod
    def since(cls, now_s: float) -> "WorkerActivity":
        """Begin at a time, with nothing heard yet."""
        return cls(now_s, now_s, now_s)

    def asked(self, request: WorkRequest, now_s: float, *, serves: bool) -> None:
        """Take in a worker's request; `serves` says whether it has weights under which it may sample."""
        self.heard_s, self.has_spoken = now_s, True
        before = self._progress.get(request.worker)
        self._progress[request.worker] = request.progress
        if request.is_loading:
            self.moved_s = now_s
            self.num_moves += 1
        elif request.progress != before:
            self.delivered(now_s)
        self.has_served |= serves and not request.is_loading

    def announced(self, now_s: float) -> None:
        """Note new weights: workers that had nothing to do before have something now."""
        self.moved_s = self.worked_s = now_s
        self.num_moves += 1

    def publishing(self, progress: int, now_s: float) -> None:
        """Note how far new weights are; while their publishing gets on, idle workers do not count as standing still."""
        if progress != self._published:
            self._published = progress
            self.announced(now_s)

    def delivered(self, now_s: float) -> None:
        """Note that a worker gets on, if only with groups that it sends again."""
        self.has_spoken = True
        self.heard_s = self.moved_s = self.worked_s = now_s
        self.num_moves += 1


@dataclass(frozen=True, slots=True)
class WaitBounds:
    """Bounds of a learner's wait for groups, in seconds."""

    data_timeout_s: float
    """Longest time in which no worker is heard, or none gets on."""
    first_word_s: float
    """Longest time until any worker is heard first: its process starts, which the supervisor bounds."""
    loading_s: float
    """Longest time in which workers only start engines and load weights, which they bound themselves."""

    def given_up(self, news: WorkerActivity, began_s: float, now_s: float) -> str:
        """Return why a wait since `began_s` is over; empty while it is not."""
        silence_s = self.data_timeout_s if news.has_spoken else max(self.first_word_s, self.data_timeout_s)
        if now_s - max(news.heard_s, began_s) > silence_s:
            return f"no message from any worker for {silence_s:g} s"
        if news.has_spoken and now_s - max(news.moved_s, began_s) > self.data_timeout_s:
            return f"nothing was sampled, judged, published or loaded for {self.data_timeout_s:g} s"
        if news.has_spoken and now_s - max(news.worked_s, began_s) > max(self.loading_s, self.data_timeout_s):
            return f"workers only started engines or loaded weights for {self.loading_s:g} s; no token was sampled"
        return ""
