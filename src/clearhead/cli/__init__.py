"""The command line: `clearhead explain | check | plan | profile | scaling | explore | plot | watch`, and others.

`approximate` and `compare` put mechanisms beside exact attention, `learn` has exercises.
"""

from clearhead.cli.application import app, main

__all__ = ["app", "main"]
