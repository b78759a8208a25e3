"""Logging of every process: structlog events with fixed keys, as text on a terminal and as JSON elsewhere.

Logs are events; numbers go to metrics. Lines of third-party libraries pass through the same handlers. Tracebacks never
carry the local variables of their frames, which could hold prompts, tensors or keys.
"""

import logging
import sys
from typing import Any, TextIO

import structlog


def configure_logging(role: str, policy: str = "", *, stream: TextIO | None = None) -> None:
    """Set up structlog and the standard library for this process; called once, by the entry point of a role.

    Every event carries `role` and, if given, `policy`, in every thread; further keys are bound with
    `structlog.contextvars.bind_contextvars(version=...)`. `stream` defaults to standard error.
    """
    stream = stream or sys.stderr
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        _bound(role, policy),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(stream.isatty())],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel("INFO")
    logging.captureWarnings(True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _bound(role: str, policy: str) -> Any:
    bound = {"role": role, "policy": policy} if policy else {"role": role}

    def add_role(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        return bound | event

    return add_role


def _renderers(terminal: bool) -> list[Any]:
    if terminal:
        return [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(transformer), structlog.processors.JSONRenderer(default=str)]
