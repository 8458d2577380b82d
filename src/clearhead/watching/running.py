"""What runs on a thread: the modules of a watched model that were entered and not left, and where Python is in them."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from types import FrameType

import torch
from torch import nn


@dataclass
class Frame:
    """A module that is running: how many calls and other steps had been made when it was entered."""

    name: str
    module: nn.Module
    before: int
    mixed: int = 0


@dataclass
class Thread(threading.local):
    """What one thread is doing inside a watched model."""

    frames: list[Frame] = field(default_factory=list)
    made: int = 0
    mixed: int = 0  # steps that may be those of attention
    step: int = 0
    whole: bool = False  # it is the whole model that runs
    within: FrameType | None = None  # where Python runs the outermost module
    resting: bool = False  # the whole model runs, and this time nobody looks
    ran: dict[nn.Module, str] = field(default_factory=dict)  # modules that make calls when a function is handed to them
    quiet: list[tuple[str, nn.Module]] = field(default_factory=list)  # those of them that have made none


def still_runs(frame: FrameType | None) -> bool:
    """Is Python still inside this frame, on this thread? A run that was interrupted has left it."""
    here: FrameType | None = sys._getframe(1)  # not its own: a frame that knows itself keeps all that it saw alive
    while here is not None and frame is not None:
        if here is frame:
            return True
        here = here.f_back
    return False


def inside(name: str, other: str) -> bool:
    """Is a module a part of another, by their names?"""
    return name != other and (not other or name.startswith(f"{other}."))


def again_in_backward() -> bool:
    """Is this the backward pass, in which a checkpoint runs modules once more?"""
    return bool(torch._C._current_graph_task_id() != -1)
