"""The command line: `clearhead explain | check | plan | profile | scaling | explore | plot | watch`."""

from clearhead.cli.application import app, main

__all__ = ["app", "main"]
