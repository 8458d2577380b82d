"""`python -m clearhead` is the command `clearhead`."""

from __future__ import annotations

from clearhead.cli import main

if __name__ == "__main__":
    main()
