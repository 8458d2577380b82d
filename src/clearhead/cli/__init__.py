"""The command line: `clearhead explain | check | plan | profile | scaling | plot`."""

from clearhead.cli.app import app, main

__all__ = ["app", "main"]
