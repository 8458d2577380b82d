"""Who is running: the modules of a watched model as they are entered and left, on every thread, and what they miss."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn

from clearhead.core.observations import Observed
from clearhead.watching import again, familiar
from clearhead.watching.attending import attends, silence
from clearhead.watching.call import CROSS, Call, layer_of
from clearhead.watching.given import Given
from clearhead.watching.holding import Holding
from clearhead.watching.leaving import Arriving, Doubted, ask
from clearhead.watching.names import Tokens
from clearhead.watching.running import Frame, Thread, again_in_backward, inside, still_runs
from clearhead.watching.seen import Seen
from clearhead.watching.wants import Wanted


class Recorder:
    """One `watch`: what it wants, whom it is watching, and what it has seen."""

    def __init__(
        self,
        root: nn.Module,
        wanted: Wanted,
        layers: tuple[int | str, ...] | None,
        heads: tuple[int, ...] | None,
        tokens: Tokens,
        on_device: bool,
        every: int = 1,
    ) -> None:
        self.root, self.wanted, self.layers, self.heads = root, wanted, layers, heads
        self.tokens, self.every = tokens, every
        self.holding = Holding(on_device=on_device)
        self.seen = Seen(Arriving(self.holding.leaving))
        self.turns = 0
        self.known: familiar.Known = {}  # who makes calls, by the module whose run was seen; nobody in a stranger
        self.callers: frozenset[str] | None = None  # all of those
        self.follows = True  # steps are followed, since there may be attention in them
        self.learnt: Callable[[], None] | None = None  # told that only some modules matter
        self.estranged: Callable[[], None] | None = None  # told that all do
        self.alone: Callable[[str], None] | None = None  # told of a module that runs by itself
        self.careful = False  # numbers were met that are not finite
        self.played = again.sort_of(wanted, heads, on_device)  # kinds of calls that are played; None for none
        self.doubted = Doubted(self)
        self.here = Thread()
        self.lock = threading.Lock()
        self.begun = 0
        self.runs = 0
        self.inside = 0
        self.whole = 0
        self.closed = False
        self.at_last: Callable[[], None] | None = None
        self.order: dict[str, int] = {}  # modules without a number in their name, in the order of their first call
        self.made_calls: set[str] = set()
        self.ways: dict[str, familiar.Way] = {}  # how each of them made its calls
        self.direct: frozenset[str] = frozenset()  # of the callers, those that are known by what is handed to them
        self.scripts: dict[str, str] = {}  # modules that are TorchScript, and their classes
        self.silent: dict[str, str] = {}
        self.in_steps: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.edit: Callable[[Tensor], Tensor] | None = None  # a change to what heads give, and then nothing is observed

    def rests(self, module: nn.Module) -> bool:
        """True where nobody looks at a run: at all but every so manyth of the whole model."""
        here = self.here
        if self.every > 1 and module is self.root and not here.frames:
            with self.lock:
                here.resting = self.turns % self.every != 0
                self.turns += 1
        return here.resting

    def rested(self, module: nn.Module) -> bool:
        """True where a module has run at which nobody looked."""
        resting = self.here.resting
        if module is self.root:
            self.here.resting = False
        return resting

    def enter(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], depth: int = 3
    ) -> bool:
        """A module starts to run; True where it is the outermost on this thread. `depth` frames from what runs it."""
        here = self.here
        if module is self.root and not still_runs(here.within):
            self.abandon()
        outermost = not here.frames
        if outermost:
            with self.lock:
                if self.closed:
                    return False
                self.runs += 1
                self.inside += 1
                here.within = sys._getframe(depth)  # past the hook: what called it also runs the module
                here.whole = module is self.root
                # a part that runs while the model does is run by it, on a thread of its own
                here.step = self.begun - 1 if self.whole and not here.whole else self.begun
                if here.whole:
                    self.begun += 1
                    self.whole += 1
                self.tokens.begin(here.step, args, kwargs, whole=here.whole)
            if self.callers is not None and not self._knows(name) and self.estranged is not None:
                self.callers, self.follows, self.direct = None, True, frozenset()
                self.estranged()
        here.frames.append(Frame(name, module, here.made, here.mixed))
        return outermost

    def leave(self, name: str) -> bool:
        """A module has run or has failed; True where it was the outermost on this thread."""
        frames = self.here.frames
        while frames:
            frame = frames.pop()
            if frame.name == name:
                self._notesilence(frame)
                if not frames:
                    self._note_quiet()
                    self._one_less()
                    self._learn(name)
                return not frames
        return False

    def ready(self, name: str, module: nn.Module) -> bool:
        """A module starts to run inside another that is looked at only when a function is handed to it; else False."""
        here = self.here
        if not here.frames:
            return False
        here.ran[module] = name
        here.quiet.append((name, module))
        return True

    def begin(self, module: nn.Module) -> bool:
        """A function was handed to a module; True where it is one of those."""
        here = self.here
        name = here.ran.get(module)
        if name is None or self.closed or not here.frames or again_in_backward():
            return False
        here.frames.append(Frame(name, module, here.made, here.mixed))
        return True

    def end(self, module: nn.Module) -> None:
        """That function has run."""
        if self.runs_now(module):
            self.here.frames.pop()

    def runs_now(self, module: nn.Module) -> bool:
        """Is it the innermost module that is running on this thread?"""
        frames = self.here.frames
        return bool(frames) and frames[-1].module is module

    def calling(self, name: str) -> bool:
        """Is a module that is running one that makes calls, where these are known, and not inside another such one?"""
        callers = self.callers
        if callers is None or name not in callers:
            return False
        return sum([frame.name in callers for frame in self.here.frames]) == 1

    def abandon(self) -> None:
        """Forget a run on this thread that was interrupted, as Ctrl-C does, without being left."""
        if self.here.frames:
            self.here.frames.clear()
            self.here.ran.clear()
            self.here.quiet.clear()
            self._one_less()

    def close(self, at_last: Callable[[], None]) -> None:
        """Look at no new run; call `at_last` once those of other threads have ended."""
        self.abandon()
        with self.lock:
            self.closed = True
            waiting = self.inside > 0
            self.at_last = at_last if waiting else None
        if not waiting:
            at_last()

    def _one_less(self) -> None:
        self.here.within = None
        with self.lock:
            self.inside -= 1
            self.whole -= self.here.whole
            last = self.at_last if not self.inside else None
        if last is not None:
            last()

    def _learn(self, name: str) -> None:
        """A run has ended: where all attention was seen, the next ones are looked at with less effort."""
        if self.callers is not None or self.edit is not None or not self.made_calls or self.inside:
            return
        if not (self.in_steps or self.silent or self.refused):
            callers = {who: self.ways[who] for who in self.made_calls}
            self.know(familiar.remember(self.root, name, callers))

    def know(self, known: familiar.Known) -> None:
        """All attention of some modules is computed by these parts of them."""
        if self.learnt is not None:
            self.known, self.callers, self.follows = known, familiar.all_of(known), False
            self.direct = familiar.direct_of(known)
            self.learnt()

    def _knows(self, name: str) -> bool:
        """Was a run seen that has all that a run of this module has?"""
        return any(name == entered or inside(name, entered) for entered in self.known)

    def asks(self, name: str) -> bool:
        """Does a module that makes calls make all of them by what transformers' registry hands it?"""
        return all(callers[name] >= familiar.Way.HANDED for callers in self.known.values() if name in callers)

    def _note_quiet(self) -> None:
        """A run has ended: which modules ran that make their calls when a function is handed to them, and made none?"""
        here = self.here
        for name, module in here.quiet:
            familiar.forget(self.root)
            with self.lock:
                self.silent[name] = silence(module, "in steps, or in a kernel of its own")
        here.quiet.clear()
        here.ran.clear()

    def _notesilence(self, frame: Frame) -> None:
        if not self.follows and self.callers is not None:
            if frame.name in self.callers and self.here.made == frame.before:
                familiar.forget(self.root)
                with self.lock:
                    self.silent[frame.name] = silence(frame.module, "in steps, or in a kernel of its own")
            return
        if not attends(frame.name, frame.module):
            return
        with self.lock:
            # what stands inside it are its helpers, and not attention of their own; inside the whole model only where
            # it attends by itself: all its layers stand there
            if frame.name or "" in self.made_calls:
                self.silent = {n: why for n, why in self.silent.items() if not inside(n, frame.name)}
            # one that did nothing that attention needs only is called so
            if self.here.made == frame.before and self.here.mixed > frame.mixed:
                self.silent[frame.name] = silence(frame.module, "in steps, or in a kernel of its own")

    @property
    def running(self) -> str:
        """The innermost module that is running on this thread."""
        return self.here.frames[-1].name if self.here.frames else ""

    @property
    def crosses(self) -> bool:
        """Does the module that is running attend to another sequence, by its name?"""
        if CROSS.search(self.running):
            return True
        frames = self.here.frames
        layer = frames[-2].module if len(frames) > 1 else None
        return isinstance(layer, nn.TransformerDecoderLayer) and frames[-1].module is layer.multihead_attn

    def count(self, way: familiar.Way) -> None:
        """A call was made, in some way, whether it is wanted or not."""
        here = self.here
        name = here.frames[-1].name if here.frames else ""
        here.made += 1
        self.made_calls.add(name)
        self.ways[name] = min(way, self.ways.get(name, way))
        if here.quiet and here.quiet[-1][0] == name:
            here.quiet.pop()

    def step(self, found: str) -> None:
        """A step was made that "mixes" positions, as attention does and other things do, or with which it "attends"."""
        self.here.mixed += 1
        if found != "attends" or not self.here.frames:
            return
        frames = self.here.frames
        outer = (frame for frame in frames if frame.name and attends(frame.name, frame.module))
        frame = next(outer, frames[-1])  # of which the others are helpers
        with self.lock:
            self.in_steps.setdefault(frame.name, silence(frame.module, "in steps, softmax(a @ b) @ c"))

    def selects(self) -> bool:
        """Is the call that is being made now one of the layers that are wanted?"""
        if self.closed or self.layers is None:
            return not self.closed
        name = self.running
        self.number(name)
        return any(self._is(name, which) for which in self.layers)

    def number(self, name: str) -> int:
        """The layer of a module: the number in its name, or else its place among those that have none."""
        found = layer_of(name)
        if found is not None:
            return found
        with self.lock:
            return self.order.setdefault(name, len(self.order))

    def add(self, given: Given, observed: Observed, distance: Tensor | None) -> None:
        """Hold on to what was observed of the call that is being made."""
        frame = self.here.frames[-1]
        number = self.number(frame.name)
        kept = self.holding.kept(given) if self.wanted.keep else None
        observed = self.holding.observed(observed, output=self.wanted.output)
        step = self.here.step
        batch = math.prod(observed.lse.shape[:-2])
        named = self.tokens.of(frame.name, step, batch, given.queries, given.keys, crossing=self.crosses)
        with self.lock:
            call = Call(
                name=frame.name,
                kind=type(frame.module).__name__,
                index=len(self.seen.calls),
                step=step,
                layer=number,
                keys=given.keys,
                observed=observed,
                heads=self.heads,
                distance=distance,
                kept=kept,
                queries_named=named[0],
                keys_named=named[1],
                counted=self.wanted.counted(given.queries),
            )
            self.seen.calls.append(call)
        self.holding.rest(call)

    def hold(self, kind: again.Kind, kept: Tensor, output: Tensor) -> None:
        """Hold on to what was kept of a call that was played."""
        here = self.here
        frame = here.frames[-1]
        named: Any = (None, None)
        if self.tokens.known_of:
            named = self.tokens.of(frame.name, here.step, kind.batch, kind.queries, kind.keys, crossing=self.crosses)
        fields = {
            "name": frame.name, "kind": type(frame.module).__name__, "index": 0, "step": here.step,
            "layer": self.number(frame.name), "heads": None, "queries_named": named[0], "keys_named": named[1],
        }  # fmt: skip
        pending: Any = again.Pending(kind, kept, output if kind.output else None, self.doubted, fields)
        with self.lock:
            fields["index"] = len(self.seen.calls)
            self.seen.calls.append(pending)
        self.holding.pending(pending)

    def doubt(self, given: Given) -> None:
        """Whether numbers on a GPU are finite is told when what was observed is read: nobody waits for it before.

        Where they are not, PyTorch's result and ours may differ. It is then said of this call, and later ones wait.
        """
        ask(self.holding.leaving, given, partial(self.doubted, self.running))

    def refuse(self, why: str) -> None:
        """The call that is being made cannot be observed."""
        self.refused.setdefault(self.running, why)

    def settle(self) -> None:
        """Say what was missed, now that everything has run."""
        self.holding.settle()
        self.learnt = self.estranged = self.alone = None  # who closes it is not held by it
        missed = {**self.in_steps, **self.refused}
        made_calls = set(self.made_calls)
        for name, why in self.silent.items():
            if any(name == other or inside(name, other) or inside(other, name) for other in self.in_steps):
                continue
            if name not in made_calls and not any(inside(made, name) for made in made_calls):
                missed.setdefault(name, why)
        for name, kind in self.scripts.items():
            missed.setdefault(name, f"{kind} is TorchScript, which runs where Python cannot see")
        if unmet := self._unmet(made_calls | set(missed)):
            known = ", ".join(sorted(made_calls)[:6]) + (", …" if len(made_calls) > 6 else "")
            missed.setdefault("", f"layers has {unmet}, and no call was made there; calls were made by {known}")
        if not missed and not self.made_calls:
            kind = type(self.root).__name__
            missed[""] = (
                f"{kind} ran and made no attention call that can be seen"
                if self.runs
                else f"{kind} was not called while watch was open"
            )
        self.seen.missed.clear()
        self.seen.missed.update(missed)

    @property
    def blind(self) -> bool:
        """Does the model attend in steps, and was none of its attention seen?"""
        return not self.seen.calls and bool(self.in_steps)

    def _unmet(self, names: set[str]) -> str:
        """Those of the layers asked for that none of the names belongs to."""
        if not self.made_calls or self.layers is None:
            return ""
        return ", ".join(repr(which) for which in self.layers if not any(self._is(name, which) for name in names))

    def _is(self, name: str, which: int | str) -> bool:
        if isinstance(which, str):
            return fnmatchcase(name, which)
        number = layer_of(name)
        return (self.order.get(name) if number is None else number) == which
