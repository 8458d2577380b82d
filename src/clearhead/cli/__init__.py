"""The command line: `clearhead explain | check | plan | profile | approximate | scaling | explore | plot | watch`."""

from clearhead.cli.application import app, main

__all__ = ["app", "main"]
