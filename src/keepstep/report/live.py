"""A run that is watched: what there is to say of it now, and of each new line of its journal."""

import json
import math
import time
from pathlib import Path
from typing import Any

from keepstep.config.quantities import number_text
from keepstep.report.console import duration_text
from keepstep.report.history import Event, JournalReader
from keepstep.report.view import (
    LOST,
    State,
    View,
    one_line,
    recorded_config,
    require_run,
    state_of,
)
from keepstep.store.layout import JOURNAL_NAME

_STEPS_OF_THE_SPEED = 100
_NOTICES = 5
_BAR_COLUMNS, _SPARK_COLUMNS, _STEPS_OF_A_SPARK = 30, 60, 10
_SPARKS = "▁▂▃▄▅▆▇█"


class Watch:
    """Follows a run's folder from another process; `look` is what costs, and only reads."""

    def __init__(self, folder: Path) -> None:
        require_run(folder)
        self._folder = folder
        self._reader = JournalReader(folder / JOURNAL_NAME)
        # A long run's past is not held as events: it is in the history.
        state = state_of(folder)
        for _ in self._reader.poll():
            pass
        self.view = self._view(state, recorded_config(folder))

    def look(self) -> list[Event]:
        """Bring `view` up to date; return the events that are new since the last look."""
        # The state first: behind an ending there is no further line.
        state = state_of(self._folder)
        events = list(self._reader.poll())
        begun = any(event["kind"] == "session" for event in events)
        record = recorded_config(self._folder) if begun else self.view.record
        self.view = self._view(state, record)
        return events

    def _view(self, state: State, record: dict[str, Any]) -> View:
        history = self._reader.history
        return View(folder=self._folder, record=record, history=history, state=state)


def status_lines(view: View) -> list[str]:
    """Return what there is to say of a run now, a few lines of text."""
    history = view.history
    task = f" · {one_line(str(view.field('task')))}" if view.field("task") else ""
    lines = [f"{view.name}{task} · {view.state.text} · {one_line(str(view.folder))}"]
    lines.append(f"step     {_progress(view)}")
    if history.steps:
        spark = sparkline(list(history.values["loss"]))
        lines.append(f"loss     {number_text(history.values['loss'][-1])}  {spark}".rstrip())
        lines.append(f"speed    {_speed(view)}")
    if best := history.best(*view.metric):
        lines.append(f"best     {one_line(view.metric[0])} {number_text(best[1])} at {best[0]:,}")
    if history.saves:
        lines.append(f"saved    {one_line(history.saves[-1].name)}")
    if history.sessions:
        lines.append(f"session  {_session(view)}")
    if history.skipped:
        last = f"the last at {history.skipped[-1]:,}"
        lines.append(f"skipped  {len(history.skipped):,} steps, not finite; {last}")
    if history.unreadable:
        lines.append(f"journal  {history.unreadable:,} lines are torn or damaged")
    notices = [event for event in history.events if event["kind"] == "notice"][-_NOTICES:]
    return lines + [f"{_clock(event['time'])} {_notice(event)}" for event in notices]


def last_line(view: View) -> str:
    """Return the last words about a run that no process trains any more."""
    step, state = view.history.step, view.state
    if state.word != LOST:
        return f"{state.word} at step {step:,}" + (f": {one_line(state.why)}" if state.why else "")
    checkpoint = view.checkpoint()
    where = f"continues it from {checkpoint}" if checkpoint else "starts it anew"
    return f"{LOST} at step {step:,}: {one_line(state.why)}. The same command {where}."


def event_line(event: Event, view: View) -> str | None:
    """Return an event as a line of text; None for a step that is not shown.

    Shown are the steps that the run itself would show, and every one that was skipped.
    """
    match event["kind"]:
        case "step":
            return _step_line(event, view)
        case "evaluation":
            metrics = {str(name): float(value) for name, value in event["metrics"].items()}
            numbers = "  ".join(f"{one_line(k)} {number_text(v)}" for k, v in metrics.items())
            return f"evaluate step {event['step']:,}  {numbers}"
        case "saved":
            return f"save     step {event['step']:,}  {one_line(str(event['path']))}"
        case "session":
            return f"session  process {event['pid']}"
        case "resumed":
            return f"resume   step {event['step']:,} from {one_line(str(event.get('path')))}"
        case "notice":
            return _notice(event)
        case "outcome":
            return None  # The last line says it.
        case kind:
            facts = {name: value for name, value in event.items() if name not in ("kind", "time")}
            return f"{one_line(str(kind)):<8} {one_line(json.dumps(facts))}"


def _step_line(event: Event, view: View) -> str | None:
    step, loss, norm = event["step"], float(event["loss"]), float(event["grad_norm"])
    if event.get("skipped"):
        return (
            f"skip     step {step:,}: no update, because not all is finite: loss {loss:g},"
            f" gradient norm {norm:g}"
        )
    interval = view.field("train.log_interval")
    every = interval if isinstance(interval, int) and interval > 0 else 1
    if step % every and step != view.max_steps:
        return None
    of = f"/{view.max_steps:,}" if view.max_steps is not None else ""
    return (
        f"step {step:,}{of}  loss {number_text(loss)}  lr {float(event['rate']):.1e}"
        f"  grad {number_text(norm, digits=2)}  {_speed(view)}"
    )


def _progress(view: View) -> str:
    step, of = view.history.step, view.max_steps
    if not of or of < 0:
        return f"{step:,}"
    done = min(step / of, 1.0)
    filled = int(done * _BAR_COLUMNS)
    bar = "━" * filled + "─" * (_BAR_COLUMNS - filled)
    return f"{step:,}/{of:,}  {bar}  {done:.0%}"


def _speed(view: View) -> str:
    speed = view.history.speed(last=_STEPS_OF_THE_SPEED)
    if speed is None:
        return "-"
    steps, tokens = speed
    text = f"{number_text(steps, digits=2)} steps/s"
    text += f"  tok/s {tokens:,.0f}" if tokens else ""
    left = (view.max_steps or 0) - view.history.step
    # A run that nobody trains arrives at no time.
    return text + (f"  eta {duration_text(left / steps)}" if left > 0 and view.live else "")


def _session(view: View) -> str:
    sessions = view.history.sessions
    last = sessions[-1]
    text = f"{len(sessions):,} · since {_clock(last.start)}"
    return text + (f" · resumed at {last.resumed_at:,}" if last.resumed_at is not None else "")


def _notice(event: Event) -> str:
    word, text = str(event.get("word", "notice")), str(event.get("text", ""))
    return f"{one_line(word):<8} {one_line(text)}"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def sparkline(values: list[float]) -> str:
    """Return the newest values as a row of small bars, each the mean of a few; a gap is a space."""
    recent = values[-_SPARK_COLUMNS * _STEPS_OF_A_SPARK :]
    width = max(1, math.ceil(len(recent) / _SPARK_COLUMNS))
    bins = [recent[start : start + width] for start in range(0, len(recent), width)]
    finite = [[value for value in part if math.isfinite(value)] for part in bins]
    means = [sum(part) / len(part) if part else None for part in finite]
    there = [mean for mean in means if mean is not None]
    if not there:
        return ""
    low, span = min(there), max(there) - min(there)
    top = len(_SPARKS) - 1
    return "".join(
        " " if mean is None else _SPARKS[round((mean - low) / span * top) if span > 0 else 0]
        for mean in means
    )
