"""Which modules are not looked at for examples: GPU kernels that cannot be imported here."""

from __future__ import annotations

import importlib.util

# Hopper's own never: they have no examples, and Gluon cannot be imported after Triton was to be interpreted
collect_ignore_glob = ["clearhead/kernels/gluon*", "clearhead/kernels/hopper*"]
if not importlib.util.find_spec("triton"):
    collect_ignore_glob += ["clearhead/kernels/triton/*"]
