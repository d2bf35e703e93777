"""A run on one page: HTML that needs nothing else, with its curves in it.

Guarantees:
1. Nothing is fetched: no script, no picture, no style from elsewhere, and the page forbids it.
2. What comes from a run (names, notices, metrics, config) is text on it, whatever it holds.
"""

import json
import time
from collections.abc import Iterable, Sequence
from html import escape

from keepstep.config.quantities import number_text
from keepstep.report.console import duration_text
from keepstep.report.curves import drawable, marks_of, metric_names, panels_of
from keepstep.report.figure import picture
from keepstep.report.history import OF_A_STEP, Event, Session
from keepstep.report.view import View, one_line

MARK = '<meta name="generator" content="keepstep report">'
"""By this, near its start, a page is known as an earlier report."""

_EVENTS_MAX = 1000
_STYLE = """\
body { font: 15px/1.45 system-ui, sans-serif; color: #1c2530; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin: 2.2rem 0 .5rem; border-bottom: 1px solid #d5dbe1; }
.state { color: #566372; margin-top: .2rem; }
.scroll { overflow-x: auto; } svg { width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 13px; }
td, th { text-align: left; vertical-align: top; padding: .2rem .9rem .2rem 0;
  border-bottom: 1px solid #edf0f3; overflow-wrap: break-word; }
td:first-child { white-space: nowrap; }
pre { background: #f5f7f9; padding: .8rem; overflow-x: auto; }
"""


def page(
    view: View, *, checkpoints: Sequence[Sequence[str]] | str, config: str, now: float
) -> bytes:
    """Return the page. ``checkpoints``: rows under their headings, or why there are none.

    ``config``: the text of the run's `run.toml`; ``now``: when it is made (seconds since 1970).
    """
    name = escape(view.name)
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8">{MARK}',
        '<meta http-equiv="Content-Security-Policy"'
        " content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width">',
        f"<title>{name}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{name}</h1>",
        f'<p class="state">{_text(view.state.text)} · {_text(str(view.folder.absolute()))}'
        f" · as of {_when(now)}</p>",
        _section("Summary", _table(_summary(view))),
        _section("Curves", _curves(view)),
        _section("Checkpoints", _checkpoints(checkpoints)),
        _section("Sessions", _table(_sessions(view), headings=True)),
        _section("Notices and events", _events(view.history.events)),
        _section("Config", f"<pre>{_lines(config)}</pre>" if config else _none("no run.toml")),
        _section("Environment", _table(_environment(view.history.sessions))),
        "</body></html>\n",
    ]
    # A lone half of a UTF-16 pair, which JSON can hold, has no bytes.
    return "\n".join(parts).encode("utf-8", "backslashreplace")


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>\n{body}\n</section>"


def _none(text: str) -> str:
    return f"<p>{_text(text)}</p>"


def _text(text: str) -> str:
    return escape(one_line(text))


def _lines(text: str) -> str:
    return "\n".join(_text(line) for line in text.splitlines())


def _when(seconds: float) -> str:
    return escape(time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds)))


def _table(rows: Iterable[Sequence[str]], *, headings: bool = False) -> str:
    """Return rows as a table, each cell escaped."""
    shown = []
    for number, row in enumerate(rows):
        kind = "th" if headings and number == 0 else "td"
        shown.append("<tr>" + "".join(f"<{kind}>{_text(c)}</{kind}>" for c in row) + "</tr>")
    if len(shown) == headings:
        return _none("none")
    return f'<div class="scroll"><table>{"".join(shown)}</table></div>'


def _summary(view: View) -> list[tuple[str, str]]:
    history = view.history
    of = f" of {view.max_steps:,}" if view.max_steps is not None else ""
    rows = [("task", str(view.field("task") or "-")), ("step", f"{history.step:,}{of}")]
    if history.steps:
        rows.append(("loss", number_text(history.values["loss"][-1])))
        rows.append(("tokens", f"{history.tokens[-1]:,}"))
        rows.append(("time in sessions", duration_text(history.seconds[-1])))
    if speed := history.speed():
        rows.append(("speed", f"{number_text(speed[0], digits=2)} steps/s"))
    if best := history.best(*view.metric):
        rows.append(("best", f"{view.metric[0]} {number_text(best[1])} at step {best[0]:,}"))
    rows.append(("skipped steps", f"{len(history.skipped):,}"))
    if history.unreadable:
        rows.append(("unreadable lines of the journal", f"{history.unreadable:,}"))
    return rows


def _curves(view: View) -> str:
    there = metric_names(view.history)
    names = [name for name in ("loss", view.metric[0], *OF_A_STEP) if name in there]
    panels = panels_of([view], names, "step")
    if not drawable(panels):
        return _none("no step has a finite value yet")
    svg = picture(panels, marks_of([view], "step"), axis="step", kind="svg").decode()
    return svg[svg.index("<svg") :]


def _checkpoints(found: Sequence[Sequence[str]] | str) -> str:
    return _none(found) if isinstance(found, str) else _table(found, headings=True)


def _sessions(view: View) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("began", "process", "from step", "last line", "ended")]
    sessions = view.history.sessions
    for session in sessions:
        lives = session is sessions[-1] and view.live
        rows.append(
            (
                _when(session.start),
                str(session.pid) if session.pid is not None else "-",
                f"{session.resumed_at:,}" if session.resumed_at is not None else "the start",
                _when(session.last),
                _ending(session, view.state.word if lives else "killed, or lost its machine"),
            )
        )
    return rows


def _ending(session: Session, without: str) -> str:
    if session.outcome is None:
        return without
    word, reason = session.outcome.get("outcome", "-"), session.outcome.get("reason")
    code = session.outcome.get("code", "-")
    return f"{word}, code {code}" + (f": {reason}" if reason else "")


def _events(events: Sequence[Event]) -> str:
    """Return every event but the steps, notices in full; of very many, the last ones."""
    shown = events[-_EVENTS_MAX:]
    rows = [("when", "what", "facts")]
    rows += [(_when(float(e["time"])), _word(e), _facts(e)) for e in shown]
    left_out = len(events) - len(shown)
    note = f"{left_out:,} earlier ones are in the journal" if left_out else ""
    return (_none(note) if note else "") + _table(rows, headings=True)


def _word(event: Event) -> str:
    return str(event.get("word") if event["kind"] == "notice" else event["kind"])


def _facts(event: Event) -> str:
    if event["kind"] == "notice":
        return str(event.get("text"))
    facts = {name: value for name, value in event.items() if name not in ("kind", "time")}
    return json.dumps(facts, ensure_ascii=False)


def _environment(sessions: Sequence[Session]) -> list[tuple[str, str]]:
    last = sessions[-1].environment if sessions else {}
    return [(str(name), str(value)) for name, value in last.items()]
