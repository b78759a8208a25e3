"""Pictures of the stability-support plane: variance to the right, support upwards; better is up and to the left."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mrl.bandit.labels import HALO
from mrl.bandit.method_styles import LOOKS
from mrl.bandit.methods import Row
from mrl.bandit.sweeps import ResidualSweep
from mrl.plots import GHOST, INK, SOFT, sheet

SUPPORT = "support S\n(rise of log p per unit step, nats)"
VARIANCE = "variance V (squared gradient length)"
LABEL_SIDES = {
    "GRPO": (-9, -14, "right"), "GRPO, fixed b": (0, 12, "center"), "XGRPO pooled": (8, -16, "left"),
    "XGRPO peer-only": (0, 12, "center"), "SGT": (-11, 6, "right"), "PRP exact": (11, -10, "left"),
    "PRP truncated": (-11, -4, "right"), "PRP residual": (10, 6, "left"), "PRP recompute": (-13, 6, "right"),
}  # fmt: skip


def plane_picture(rows: Sequence[Row]) -> Figure:
    """Draw all methods on the reference instance, with Monte Carlo as open rings around the closed forms."""
    figure = sheet(8.6, 5.6, left=0.9)
    axes = figure.subplots()
    set_plane(axes, (3e-5, 0.2), (4e-3, 0.3))
    for row in rows:
        look = LOOKS[row.name]
        axes.plot(row.variance, row.support, look.mark, color=look.colour, ms=8, zorder=4)
        axes.plot(row.measured.variance, row.measured.support, "o", ms=14, mfc="none", mec=look.colour, mew=1, zorder=3)
        right, up, side = LABEL_SIDES[row.name]
        axes.annotate(row.name, (row.variance, row.support), (right, up), textcoords="offset points", ha=side,
                      color=look.colour, fontweight="bold", path_effects=[HALO], zorder=5)  # fmt: skip
    axes.set_title("Reference instance: where each method stands")
    axes.set_ylabel(SUPPORT)
    axes.set_xlabel(VARIANCE)
    guides(axes, [0.03, 0.1, 0.3, 1.0])
    axes.text(0.015, 0.97, "better: more support, less variance", transform=axes.transAxes, color=SOFT, va="top")
    return figure


def set_plane(axes: Axes, variance: tuple[float, float], support: tuple[float, float]) -> None:
    """Set logarithmic axes with fixed limits."""
    axes.set(xscale="log", yscale="log", xlim=variance, ylim=support)


def guides(axes: Axes, levels: Sequence[float]) -> None:
    """Draw lines of equal S / sqrt(V): a learning rate moves a method along its line, and to no other line."""
    low, high = axes.get_xlim()
    bottom, top = axes.get_ylim()
    ends = np.array([low, high])
    for level in levels:
        axes.plot(ends, level * np.sqrt(ends), color=GHOST, lw=0.9, ls=(0, (4, 3)), zorder=1)
        # The name stands just inside the frame, where the line leaves it to the right or at the top.
        x = min(high, (top / level) ** 2) * 0.93
        if bottom < level * np.sqrt(x) < top:
            axes.annotate(f"S/√V = {level:g}", (x, level * np.sqrt(x)), (-2, -11), textcoords="offset points",
                          ha="right", fontsize=8, color=SOFT)  # fmt: skip


def residual_picture(residual: ResidualSweep, exact: tuple[float, float], gradient_norm: float) -> Figure:
    """Draw, on the left, the places of PRP in the plane under random residuals; on the right, its bias, against the
    bound and against g*.
    """
    figure = sheet(10.4, 4.6, left=0.9)
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.22})
    set_plane(left, (1e-5, 3e-2), (1e-3, 0.1))
    left.set(xlabel=VARIANCE, ylabel=SUPPORT)
    for kappa, shade in zip((2.0, 1.0, 0.3), ("#f4b183", "#e07a2a", "#8f3f00"), strict=True):
        index = int(np.argmin(np.abs(residual.kappa_nats_P - kappa)))
        place = residual.variance_PR[index], residual.support_PR[index]
        left.plot(*place, ".", color=shade, ms=5, mew=0, label=f"κ = {kappa:g}")
    left.plot(*exact, LOOKS["PRP exact"].mark, color=INK, ms=9, mec="white", label="PRP exact, κ = 0", ls="none")
    left.legend(loc="upper left", frameon=False, markerscale=1.4, reverse=True, handletextpad=0.3)
    left.set_title("Residuals of at most κ nats per answer")
    _bias_panel(right, residual, gradient_norm)
    return figure


def _bias_panel(axes: Axes, residual: ResidualSweep, gradient_norm: float) -> None:
    kappa_P, colour = residual.kappa_nats_P, LOOKS["PRP exact"].colour
    low_P, middle_P, high_P = np.quantile(residual.bias_PR, [0.05, 0.5, 0.95], axis=1)
    axes.fill_between(kappa_P, low_P, high_P, color=colour, alpha=0.18, lw=0)
    axes.plot(kappa_P, middle_P, color=colour, lw=2.2)
    axes.plot(kappa_P, residual.bound_P, color=SOFT, lw=1.4, ls="--")
    axes.axhline(gradient_norm, color=INK, lw=1.2, ls=":")
    axes.set(xscale="log", yscale="log", xlabel="κ, largest residual (nats)")
    axes.set_ylabel("bias of the gradient, $\\|E\\,\\hat g - g^*\\|$")
    at = len(kappa_P) // 3
    axes.annotate("proved bound", (kappa_P[at], residual.bound_P[at]), (-8, 4), textcoords="offset points", ha="right",
                  color=SOFT, fontweight="bold")  # fmt: skip
    axes.annotate("median, and 5 to 95 %", (kappa_P[at], low_P[at]), (10, -12), textcoords="offset points",
                  color=colour, fontweight="bold")  # fmt: skip
    axes.text(kappa_P[0], gradient_norm * 1.15, "length of the true gradient g*", fontsize=9.5)
    axes.set_title("Bias that the residual adds")
