"""What the learner hears of its workers' progress: what a wait for groups is held against.

A worker says every second how far it is, also while its engine starts, samples for long or takes new weights. As long
as any of them gets on, a run is slow at the most.
"""

from dataclasses import dataclass, field

from mrl.records.rollouts import WorkRequest


@dataclass(slots=True)
class WorkerNews:
    """Of one life of a learner; times are of the monotonic clock. Not thread-safe."""

    heard_s: float
    """When a worker was heard last, or the learner began to listen."""
    moved_s: float
    """When one last sampled or judged something, delivered it, or was in the middle of loading."""
    worked_s: float
    """The same without loading."""
    num_moves: int = 0
    """How often anything of this policy got on."""
    has_spoken: bool = False
    """Whether any worker was heard at all."""
    has_served: bool = False
    """Whether any worker has proved weights of this life."""
    _progress: dict[str, int] = field(default_factory=dict)
    _published: int = 0

    @classmethod
    def since(cls, now_s: float) -> "WorkerNews":
        """Nothing has been heard yet."""
        return cls(now_s, now_s, now_s)

    def asked(self, request: WorkRequest, now_s: float, *, serves: bool) -> None:
        """A worker asks for work, and says how far it is; whether it `serves` what it may sample under."""
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
        """There are new weights: workers that had nothing to do before have something now."""
        self.moved_s = self.worked_s = now_s
        self.num_moves += 1

    def publishing(self, progress: int, now_s: float) -> None:
        """How far new weights are on their way; while they get on, workers without work are none that stand still."""
        if progress != self._published:
            self._published = progress
            self.announced(now_s)

    def delivered(self, now_s: float) -> None:
        """A worker gets on, if only with groups that come again."""
        self.has_spoken = True
        self.heard_s = self.moved_s = self.worked_s = now_s
        self.num_moves += 1


@dataclass(frozen=True, slots=True)
class WaitBounds:
    """How long a learner waits for groups, in seconds."""

    data_timeout_s: float
    """While no worker is heard any more, or none gets on."""
    first_word_s: float
    """Until the first word of any: its process starts, which the supervisor bounds."""
    loading_s: float
    """While all that workers do is to start engines and to load weights, which they bound themselves."""

    def given_up(self, news: WorkerNews, began_s: float, now_s: float) -> str:
        """Why a wait since `began_s` is over; empty while it is not."""
        silence_s = self.data_timeout_s if news.has_spoken else max(self.first_word_s, self.data_timeout_s)
        if now_s - max(news.heard_s, began_s) > silence_s:
            return f"nothing was heard for {silence_s:g} s"
        if news.has_spoken and now_s - max(news.moved_s, began_s) > self.data_timeout_s:
            return f"nothing was sampled, judged, published or loaded for {self.data_timeout_s:g} s"
        if news.has_spoken and now_s - max(news.worked_s, began_s) > max(self.loading_s, self.data_timeout_s):
            return f"engines were started and weights loaded for {self.loading_s:g} s, and no token was sampled"
        return ""
