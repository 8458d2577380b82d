"""Pictures of attention, by matplotlib: each function returns axes, shows nothing and leaves global state alone."""

from clearhead.plots.comparisons import plot_comparison
from clearhead.plots.curves import plot_profile, plot_scaling
from clearhead.plots.geometry import plot_geometry
from clearhead.plots.kept import plot_kept
from clearhead.plots.maps import plot_attention, plot_bias, plot_entropy, plot_heads, plot_mask
from clearhead.plots.shifts import plot_shift
from clearhead.plots.sweeps import plot_sweep

__all__ = [
    "plot_attention",
    "plot_bias",
    "plot_comparison",
    "plot_entropy",
    "plot_geometry",
    "plot_heads",
    "plot_kept",
    "plot_mask",
    "plot_profile",
    "plot_scaling",
    "plot_shift",
    "plot_sweep",
]
