"""Hooks that make a run meet its worst day at an exact instant.

`KEEPSTEP_TEST_ACT` holds a JSON list of acts: {"when": ..., "step": n, "do": ...}. `when` is one of
build, start, forward, evaluating, step, evaluated, snapshot, committed, rewound, end, exit (when
Python itself ends); `step` is the step that is being taken or was just taken; `do` is a signal's
name (several with a `+`; PAUSE waits, GROUP_SIGTERM goes to the group), or one of nan, nan_loss,
inf_weight, raise, exit, unhealthy, stop, save, late (takes until the run's time is nearly over),
due (until a save is due by the clock), tracked (until every tracker holds the
step). With `rank` only that rank acts, and with `samples`, in the place of `step`, at the batch
that begins (or, when it was taken, ends) at that position. `once` is for the first time in a
process.
"""

import atexit
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

from keepstep.errors import Unhealthy
from keepstep.report.trackers import Follower

CONFIG = "tests.helpers.hooks:Act"


def acting(*acts: dict[str, Any]) -> dict[str, str]:
    """The environment in which the hook `Act` does these."""
    return {"KEEPSTEP_TEST_ACT": json.dumps(acts)}


class Act:
    """Does what `KEEPSTEP_TEST_ACT` says."""

    def __init__(self) -> None:
        self.acts = json.loads(os.environ.get("KEEPSTEP_TEST_ACT", "[]"))
        self.done: list[dict[str, Any]] = []
        if any(act.get("when") == "build" for act in self.acts):
            self._hear_of_the_build()

    def _hear_of_the_build(self) -> None:
        """Act in the middle of it, when the first module gets a parameter."""

        def on_parameter(*_: Any) -> None:
            heard.remove()
            self._act(None, "build", 0)

        heard = torch.nn.modules.module.register_module_parameter_registration_hook(on_parameter)

    def on_run_start(self, run: Any) -> None:
        state = run.position
        first = next(p for p in state.model.parameters() if p.requires_grad)

        def on_forward(module: torch.nn.Module, _inputs: Any) -> None:
            if module.training:
                self._act(run, "forward", state.counters.step + 1)
            else:
                self._act(run, "evaluating", state.counters.step)

        def on_gradient(gradient: torch.Tensor) -> torch.Tensor:
            wanted = self._due(run, state.counters.step + 1, do="nan")
            return gradient * float("nan") if wanted else gradient

        def on_output(module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            if module.training and self._due(run, state.counters.step + 1, do="nan_loss"):
                output.logits = output.logits * float("nan")

        state.model.register_forward_pre_hook(on_forward)
        state.model.register_forward_hook(on_output)
        first.register_hook(on_gradient)
        self._act(run, "start", state.counters.step)
        atexit.register(self._act, run, "exit", 0)

    def on_step_end(self, run: Any, step: int, metrics: Any) -> None:
        self._act(run, "step", step)

    def on_evaluated(self, run: Any, step: int, metrics: Any) -> None:
        self._act(run, "evaluated", step)

    def on_snapshot(self, run: Any, step: int) -> None:
        self._act(run, "snapshot", step)

    def on_committed(self, run: Any, path: Path, manifest: Any) -> None:
        self._act(run, "committed", manifest.step)

    def on_rewound(self, run: Any, step: int) -> None:
        self._act(run, "rewound", step)

    def on_run_end(self, run: Any, outcome: Any) -> None:
        self._act(run, "end", outcome.step)

    def _act(self, run: Any, when: str, step: int) -> None:
        for act in self._due(run, step, when=when):
            _do(run, act["do"])

    def _due(self, run: Any, step: int, **what: str) -> list[dict[str, Any]]:
        """Return the acts of that kind for this rank, here and now; `run` is None in the build."""
        rank = run.group.rank if run is not None else int(os.environ.get("RANK", "0"))
        samples = run.position.counters.samples if run is not None else 0
        found = [
            act
            for act in self.acts
            if what.items() <= act.items()
            and act.get("step", step) == step
            and act.get("samples", samples) == samples
            and act.get("rank", rank) == rank
            and not (act.get("once") and act in self.done)
        ]
        self.done += found
        return found


def _do(run: Any, what: str) -> None:
    match what:
        case "raise":
            raise ValueError("the hook fails on purpose")
        case "exit":
            raise SystemExit(0)
        case "unhealthy":
            raise Unhealthy("a peer is gone, says the hook")
        case "stop":
            run.request_stop("the hook asks for it")
        case "save":
            run.request_save()
        case "nan" | "nan_loss":
            return
        case "late":
            while not run.clock.is_late(saving=False):
                threading.Event().wait(0.02)
        case "due":
            while not run.clock.save_is_due:
                threading.Event().wait(0.02)
        case "inf_weight":
            weight = next(run.position.model.parameters())
            part = getattr(weight, "_local_tensor", weight).detach()
            part.view(-1)[-1] = float("inf")
        case "tracked":
            _wait_until_tracked(run.position.counters.step)
        case signals:
            for name in signals.split("+"):
                if name == "PAUSE":
                    # Not signal.pause: it would return after each handler.
                    threading.Event().wait(60)
                elif name.startswith("GROUP_"):
                    os.killpg(os.getpgrp(), getattr(signal.Signals, name.removeprefix("GROUP_")))
                else:
                    os.kill(os.getpid(), getattr(signal.Signals, name))


class Record:
    """Writes the calls that it gets into a file beside the journal; each rank has its own."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def _write(self, run: Any, text: str) -> None:
        self.calls += 1
        of_rank = f"-{run.group.rank}" if run.group.rank else ""
        with (run.folder / f"calls{of_rank}.txt").open("a") as file:
            file.write(f"{text}\n")

    def on_run_start(self, run: Any) -> None:
        self._write(run, f"start {self.calls}")

    def on_snapshot(self, run: Any, step: int) -> None:
        self._write(run, f"snapshot {step}")

    def on_committed(self, run: Any, path: Path, manifest: Any) -> None:
        assert (path / "manifest.json").is_file()
        self._write(run, f"committed {manifest.step}")

    def on_run_end(self, run: Any, outcome: Any) -> None:
        self._write(run, f"end {outcome.ending}")


class FreezeAllButTheHead:
    """Freezes weights as a user does, when everything is built and restored."""

    def on_run_start(self, run: Any) -> None:
        for name, parameter in run.position.model.named_parameters():
            parameter.requires_grad_("lm_head" in name)


def _wait_until_tracked(step: int) -> None:
    followers = [thread for thread in threading.enumerate() if isinstance(thread, Follower)]
    assert followers
    deadline = time.monotonic() + 60
    while any(follower.written < step for follower in followers):
        assert time.monotonic() < deadline, followers
        # A thread tells nobody what it has written: it is looked at.
        threading.Event().wait(0.01)


class RecordSamples:
    """Writes what each forward pass of training is given into a file of its rank, one a line."""

    def on_run_start(self, run: Any) -> None:
        counters = run.position.counters
        path = run.folder / f"samples-{run.group.world_size}-{run.group.rank}.jsonl"

        def on_forward(module: torch.nn.Module, _args: Any, words: Any) -> None:
            if module.training:
                with path.open("a") as file:
                    samples = words["input_ids"].tolist()
                    file.write(json.dumps({"step": counters.step, "samples": samples}) + "\n")

        run.position.model.register_forward_pre_hook(on_forward, with_kwargs=True)
