"""Hooks that make a run meet its worst day at an exact instant.

`KEEPSTEP_TEST_ACT` holds a JSON list of acts: {"when": ..., "step": n, "do": ...}. `when` is one of
start, forward, evaluating, step, evaluated, snapshot, committed, end; `step` is the step that is
being taken or was just taken; `do` is a signal's name (several with a `+`; PAUSE waits,
GROUP_SIGTERM goes to the group), or one of nan, nan_loss, raise, exit, unhealthy, stop,
save. With `rank` only that rank acts.
"""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch

from keepstep.errors import Unhealthy

CONFIG = "tests.helpers.hooks:Act"


def acting(*acts: dict[str, Any]) -> dict[str, str]:
    """The environment in which the hook `Act` does these."""
    return {"KEEPSTEP_TEST_ACT": json.dumps(acts)}


class Act:
    """Does what `KEEPSTEP_TEST_ACT` says."""

    def __init__(self) -> None:
        self.acts = json.loads(os.environ.get("KEEPSTEP_TEST_ACT", "[]"))

    def on_run_start(self, run: Any) -> None:
        model, counters = run.position.model, run.position.counters
        first = next(p for p in model.parameters() if p.requires_grad)

        def on_forward(module: torch.nn.Module, _inputs: Any) -> None:
            if module.training:
                self._act(run, "forward", counters.step + 1)
            else:
                self._act(run, "evaluating", counters.step)

        def on_gradient(gradient: torch.Tensor) -> torch.Tensor:
            wanted = any(
                act["do"] == "nan" and act["step"] == counters.step + 1 and _is_here(act, run)
                for act in self.acts
            )
            return gradient * float("nan") if wanted else gradient

        def on_output(module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            wanted = any(
                act["do"] == "nan_loss" and act["step"] == counters.step + 1 and _is_here(act, run)
                for act in self.acts
            )
            if wanted and module.training:
                output.logits = output.logits * float("nan")

        model.register_forward_pre_hook(on_forward)
        model.register_forward_hook(on_output)
        first.register_hook(on_gradient)
        self._act(run, "start", counters.step)

    def on_step_end(self, run: Any, step: int, metrics: Any) -> None:
        self._act(run, "step", step)

    def on_evaluated(self, run: Any, step: int, metrics: Any) -> None:
        self._act(run, "evaluated", step)

    def on_snapshot(self, run: Any, step: int) -> None:
        self._act(run, "snapshot", step)

    def on_committed(self, run: Any, path: Path, manifest: Any) -> None:
        self._act(run, "committed", manifest.step)

    def on_run_end(self, run: Any, outcome: Any) -> None:
        self._act(run, "end", outcome.step)

    def _act(self, run: Any, when: str, step: int) -> None:
        for act in self.acts:
            if act.get("when") == when and act["step"] == step and _is_here(act, run):
                _do(run, act["do"])


def _is_here(act: dict[str, Any], run: Any) -> bool:
    return act.get("rank", run.group.rank) == run.group.rank


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
    """Writes the calls that it gets into a file beside the journal, one word a line."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def _write(self, run: Any, text: str) -> None:
        self.calls += 1
        with (run.folder / "calls.txt").open("a") as file:
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
