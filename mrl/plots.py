"""Look of pictures made with matplotlib: quiet axes, fixed margins, no global state. Needs the extra `plots`."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.figure import Figure

INK, SOFT, RULE, GHOST = "#1c2128", "#5b6470", "#dfe3e8", "#c4cad2"
DPI = 160

SETTINGS: dict[Any, dict[str, Any]] = {
    "font": {"family": "DejaVu Sans", "size": 10.5},
    "mathtext": {"fontset": "dejavusans"},
    "text": {"color": INK},
    "axes": {
        "titlesize": 11.5,
        "titleweight": "bold",
        "titlelocation": "left",
        "titlepad": 9,
        "edgecolor": "#9aa3ad",
        "labelcolor": INK,
        "axisbelow": True,
        "grid": True,
    },
    "axes.spines": {"top": False, "right": False},
    "xtick": {"color": SOFT},
    "ytick": {"color": SOFT},
    "grid": {"color": RULE, "linewidth": 0.7},
    "figure": {"dpi": DPI},
}


@contextmanager
def quiet_style() -> Iterator[None]:
    """Draw the block's pictures with SETTINGS, whatever the user's own matplotlib settings are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        for group, settings in SETTINGS.items():
            matplotlib.rc(group, **settings)
        yield


def sheet(
    width: float, height: float, *, left: float = 0.75, right: float = 0.15, top: float = 0.45, bottom: float = 0.6
) -> Figure:
    """Return an empty figure; size and margins in inches. Fixed margins take half the time of automatic layout."""
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(left=left / width, right=1 - right / width, bottom=bottom / height, top=1 - top / height)
    return figure


def png(figure: Figure) -> bytes:
    """Return the figure as PNG; the same figure gives the same bytes."""
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=DPI, metadata={"Software": None})
    return target.getvalue()
