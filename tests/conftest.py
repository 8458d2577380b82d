"""What every test module shares."""

from __future__ import annotations

import libraries  # noqa: F401  # sets XLA's flags before anything imports JAX
