"""Exercises that are checked: what to do, whether it is right, and if not, which mistake it is."""

from clearhead.learning.listing import Assignment, Contents
from clearhead.learning.outcome import Outcome
from clearhead.learning.teaching import learn

__all__ = ["Assignment", "Contents", "Outcome", "learn"]
