"""The exchange's daemons report each for its own prompts; what a person sees is all of them together."""

AVERAGED = ("exchange/flow_hit_rate/", "exchange/flow_age_versions/")


class Shards:
    """The newest value of every metric and daemon of the exchange."""

    def __init__(self) -> None:
        self._newest: dict[str, dict[str, float]] = {}
        """Metric -> role of the daemon -> value."""

    def together(self, role: str, name: str, value: float) -> float:
        """Note what a daemon reports, and return what all daemons come to.

        Shares and ages are averaged, for prompts are spread evenly over the daemons; all else is summed.
        """
        of_name = self._newest.setdefault(name, {})
        of_name[role] = value
        total = sum(of_name.values())
        return total / len(of_name) if name.startswith(AVERAGED) else total
