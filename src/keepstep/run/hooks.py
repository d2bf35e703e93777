"""Code of the user's that a run calls, by name from the config or passed from Python.

A hook is any object with some of the methods of `Hook`. An exception in a hook ends the run as
*failed*, with the hook's name: a hook that wants to go on must catch its own errors.
"""

import importlib
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.errors import UsageError

if TYPE_CHECKING:
    from keepstep.run.outcome import Outcome
    from keepstep.run.run import Run
    from keepstep.store import Manifest


class Hook:
    """Subclass and override what is needed.

    Every rank has hooks of its own; one whose class says `first_rank_only = True` is called on the
    first rank alone. A hook may call `run.request_stop(reason)` and `run.request_save()`. The
    ranks agree on it once a step, so what `on_step_end` asks for happens at the end of the next
    step at the latest.
    """

    def on_run_start(self, run: "Run") -> None:
        """Everything is built and restored; the first step is about to be taken."""

    def on_step_end(self, run: "Run", step: int, metrics: Mapping[str, Any]) -> None:
        """`step` was taken: `loss`, `grad_norm`, `rate`, `skipped`, `updates`, `tokens`."""

    def on_evaluated(self, run: "Run", step: int, metrics: Mapping[str, float]) -> None:
        """Held-out data were looked at after `step`."""

    def on_snapshot(self, run: "Run", step: int) -> None:
        """The state of `step` is fixed; nothing of it is durable yet."""

    def on_committed(self, run: "Run", path: Path, manifest: "Manifest") -> None:
        """The checkpoint in `path` is durable."""

    def on_rewound(self, run: "Run", step: int) -> None:
        """The run goes on from `step`, and the journal ends there: a resume, or a rollback.

        What was heard of later steps is void. In a resume this comes before `on_run_start`, also
        where a session that left no checkpoint is begun anew.
        """

    def on_run_end(self, run: "Run", outcome: "Outcome") -> None:
        """The run is over and whatever it leaves is on disk."""

    def on_notice(self, run: "Run", word: str, text: str) -> None:
        """The run has something to tell; `word` is its subject (resume, save, stop, ...)."""


class Hooks:
    """Calls every hook in order; a method that a hook does not have is passed over."""

    def __init__(self, hooks: Sequence[object], *, is_first: bool) -> None:
        self._hooks = [
            hook for hook in hooks if is_first or not getattr(hook, "first_rank_only", False)
        ]
        names = [_name(hook) for hook in self._hooks if hasattr(hook, "state_dict")]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(
                    f"two hooks are a {name}; only one of them could get its saved state back",
                    hint="Give each a class of its own, if only a subclass.",
                )

    def call(self, method: str, *arguments: object) -> None:
        """Call `method` on each hook that has it."""
        for hook in self._hooks:
            bound = getattr(hook, method, None)
            if bound is not None:
                bound(*arguments)

    def state(self) -> dict[str, Any]:
        """Return the state of each hook that has a `state_dict`, by class name."""
        keepers: list[Any] = [hook for hook in self._hooks if hasattr(hook, "state_dict")]
        return {_name(hook): hook.state_dict() for hook in keepers}

    def load(self, saved: Mapping[str, Any]) -> list[str]:
        """Give each hook its saved state back; return the names that no hook answers to.

        A hook that is new to the run begins empty.
        """
        keepers = {_name(hook): hook for hook in self._hooks if hasattr(hook, "load_state_dict")}
        for name, hook in keepers.items():
            if name in saved:
                hook.load_state_dict(saved[name])
        return sorted(set(saved) - set(keepers))


def load_hooks(names: Sequence[str]) -> list[object]:
    """Build the hooks named `module:Class`; UsageError says which cannot be found and why."""
    if names and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return [_load_hook(name) for name in names]


def _load_hook(name: str) -> object:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
        return getattr(module, attribute)()
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"the hook {name!r} of run.hooks cannot be loaded: {error}",
            hint="Write it as module:Class; the module must be importable from this folder.",
        ) from error
    # The module and the class are the user's: they may raise anything.
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise UsageError(
            f"the hook {name!r} of run.hooks cannot be made: {type(error).__name__}: {error}"
            f" ({last.filename}:{last.lineno})",
            hint="It is made without arguments before the run begins.",
        ) from error


def _name(hook: object) -> str:
    return f"{type(hook).__module__}:{type(hook).__qualname__}"
