"""Which modules are not looked at for examples: the GPU kernels, where Triton is not installed."""

from __future__ import annotations

import importlib.util

KERNELS = ["clearhead/kernels/triton/*", "clearhead/kernels/gluon*", "clearhead/kernels/hopper*"]
collect_ignore_glob = [] if importlib.util.find_spec("triton") else KERNELS
