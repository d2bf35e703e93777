"""What each state of the disk is worth, against what the command had said was saved.

The right answers are the command's own: what the judge loads where nothing is cut, at the start,
at each acknowledgement and at the end. Without acknowledgements, also wherever no file was open
for writing. A state that loads and is none of them is silently wrong.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from keepstep.audit.judges import Judge, Unreadable
from keepstep.audit.operations import (
    Acknowledged,
    DataChange,
    EntryChange,
    Inode,
    Quiet,
    Recording,
)
from keepstep.audit.states import CrashModel, Cut, Key, Known, Model, State
from keepstep.errors import UsageError
from keepstep.store.disk import Disk

_READS_ONLY_BYTES = 1 << 16


class Verdict(StrEnum):
    """What a state is worth."""

    NEW = "new"
    """Newer than what was acknowledged last, and whole."""
    OLD = "old"
    """What was acknowledged last."""
    LOST = "lost"
    """Older than what was acknowledged last."""
    GONE = "nothing left"
    """Something was acknowledged, and nothing is there."""
    UNREADABLE = "unreadable"
    """Something is there, and the loader fails on it."""
    WRONG = "silently wrong"
    """It loads, and is nothing that the command ever saved."""

    @property
    def is_fault(self) -> bool:
        """Whether work is lost, or somebody has to step in."""
        return self not in (Verdict.NEW, Verdict.OLD)


@dataclass(frozen=True, kw_only=True)
class Example:
    """The state with the least missing that has a verdict."""

    verdict: Verdict
    model: Model
    cut: str
    missing: tuple[str, ...]
    there: tuple[str, ...]
    what: str
    remedy: str
    lack: int


@dataclass(kw_only=True)
class Findings:
    """All verdicts of one model."""

    model: Model
    counts: Counter[Verdict] = field(default_factory=Counter)
    examples: dict[Verdict, Example] = field(default_factory=dict)
    cuts: int = 0
    bounded: bool = False

    @property
    def faults(self) -> int:
        """Number of states that lose something."""
        return sum(count for verdict, count in self.counts.items() if verdict.is_fault)


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What the judge loads of a moment without a cut."""

    number: int
    acknowledged: bool
    value: str | None


class Audit:
    """Judges every state of a recording once."""

    def __init__(
        self, recording: Recording, *, judge: Judge, limit: int, scratch: Path, copies: bool
    ) -> None:
        """``limit``: states at one cut; ``scratch``: a folder, best in memory.

        ``copies``: whether the judge may change what it is given, and gets copies.
        """
        self._recording = recording
        self._judge = judge
        self._limit = limit
        self._scratch = scratch
        self._copies = copies
        self._disk = Disk()
        self._known = Known()
        self._values: dict[Key, str | Unreadable | None] = {}
        self._answers = list(self._look_at_answers())

    @property
    def num_states(self) -> int:
        """Number of distinct states that were judged."""
        return len(self._values)

    def judge(self, model: Model) -> Findings:
        """Return the verdicts on all states under a model."""
        findings = Findings(model=model)
        crashes = CrashModel(self._recording, model, limit=self._limit, known=self._known)
        told: set[tuple[Key, Verdict]] = set()
        for cut in crashes.cuts():
            findings.cuts += 1
            for pool in self._scratch.iterdir():
                self._disk.unlink(pool)
            for state in cut.states:
                value = self._value(state.key)
                verdict = self._verdict(value, cut)
                if (state.key, verdict) not in told:
                    told.add((state.key, verdict))
                    findings.counts[verdict] += 1
                best = findings.examples.get(verdict)
                if best is None or state.lack < best.lack:
                    findings.examples[verdict] = self._example(verdict, model, cut, state, value)
        findings.bounded = crashes.bounded
        return findings

    def _look_at_answers(self) -> Iterator[_Answer]:
        """Yield what is loaded at the start, where it was acknowledged or quiet, and at the end."""
        operations = self._recording.operations
        said = any(isinstance(operation, Acknowledged) for operation in operations)
        crashes = CrashModel(self._recording, "journal", limit=1, known=self._known)
        yield self._answer(crashes, 0, acknowledged=True)
        for operation in operations:
            crashes.apply(operation)
            if isinstance(operation, Acknowledged):
                yield self._answer(crashes, operation.number, acknowledged=True)
            elif isinstance(operation, Quiet) and not said:
                yield self._answer(crashes, operation.number, acknowledged=False)
        # A command that ended well has said so.
        ended = self._recording.exit_code == 0
        yield self._answer(crashes, len(operations), acknowledged=ended)

    def _answer(self, crashes: CrashModel, number: int, *, acknowledged: bool) -> _Answer:
        value = self._value(crashes.whole())
        if isinstance(value, Unreadable):
            if acknowledged and number > 0:
                raise UsageError(
                    f"the judge cannot load what the command left when it said that it was saved,"
                    f" without any cut: {value}",
                    hint="Is it the right judge? See `keepstep audit --help`.",
                )
            return _Answer(number=number, acknowledged=False, value=None)
        return _Answer(number=number, acknowledged=acknowledged, value=value)

    def _verdict(self, value: str | Unreadable | None, cut: Cut) -> Verdict:
        # At the end nothing comes after: what the end acknowledges is wanted there.
        before = [a for a in self._answers if a.acknowledged and a.number <= cut.number]
        last = before[-1] if before else self._answers[0]
        if isinstance(value, Unreadable):
            return Verdict.UNREADABLE
        if value == last.value:
            return Verdict.OLD
        if value is None:
            return Verdict.GONE
        known = [answer.number for answer in self._answers if answer.value == value]
        if not known:
            return Verdict.WRONG
        return Verdict.NEW if known[-1] > last.number else Verdict.LOST

    def _value(self, key: Key) -> str | Unreadable | None:
        if key not in self._values:
            with tempfile.TemporaryDirectory(dir=self._scratch) as place:
                folder = Path(place) / "state"
                self._lay_out(key, folder)
                try:
                    self._values[key] = self._judge(folder)
                except Unreadable as error:
                    self._values[key] = error
        return self._values[key]

    def _lay_out(self, key: Key, folder: Path) -> None:
        """Make the folder of a state; large files are links where the judge only reads."""
        folder.mkdir()
        for path, kind, number, content in self._known.tree(key):
            if kind == "folder":
                (folder / path).mkdir()
            elif kind == "link":
                self._disk.symlink(content.decode(errors="surrogateescape"), folder / path)
            elif self._copies or len(content) < _READS_ONLY_BYTES:
                (folder / path).write_bytes(content)
            else:
                pool = self._scratch / f"content-{number}"
                if not pool.exists():
                    pool.write_bytes(content)
                self._disk.link(pool, folder / path)

    def _example(
        self,
        verdict: Verdict,
        model: Model,
        cut: Cut,
        state: State,
        value: str | Unreadable | None,
    ) -> Example:
        torn = [(self._name(inode, cut.number), shape.text) for inode, (shape, _) in state.torn]
        missing = [change.text for change in state.missing]
        gone = {change.number for change in state.missing}
        there = [
            operation.text
            for operation in self._recent(cut)
            if isinstance(operation, EntryChange) and operation.number not in gone
        ]
        return Example(
            verdict=verdict,
            model=model,
            cut=cut.text,
            missing=tuple(missing + [f"{name}: {text}" for name, text in torn]),
            there=tuple(there),
            what=str(value) if value is not None else "nothing",
            remedy=self._remedy(cut, state),
            lack=state.lack,
        )

    def _recent(self, cut: Cut) -> Sequence[object]:
        """Return what happened between the last acknowledgement, or some way back, and the cut."""
        said = (a.number for a in self._answers if a.number < cut.number and a.acknowledged)
        start = max(said, default=0)
        return self._recording.operations[start : cut.number][-12:]

    def _remedy(self, cut: Cut, state: State) -> str:
        """Name a sync that would have kept the state from being possible."""
        operations = self._recording.operations[: cut.number]
        if state.torn:
            inode = state.torn[0][0]
            last = max(
                operation.number
                for operation in operations
                if isinstance(operation, DataChange) and operation.inode == inode
            )
            name = self._name(inode, cut.number)
            later = [
                operation.text
                for operation in operations[last + 1 :]
                if isinstance(operation, EntryChange)
            ]
            when = f"before `{later[0]}`" if later else f"after its last write, {cut.text}"
            return f"an fsync of {name} {when}"
        if state.missing:
            change = state.missing[0]
            folders = " and ".join(
                sorted(self._name(folder, cut.number) for folder in change.folders)
            )
            return f"an fsync of the folder {folders} after `{change.text}`"
        return ""

    def _name(self, inode: Inode, number: int) -> str:
        """Return the last path that a file had before an operation."""
        names: dict[Inode, tuple[Inode, str]] = {
            found: entry for entry, found in self._recording.beginning.entries.items()
        }
        for operation in self._recording.operations[:number]:
            if isinstance(operation, EntryChange):
                names.update({found: e for e, found in operation.changes if found is not None})
        parts = []
        while inode in names:
            inode, part = names[inode]
            parts.append(part)
        return "/".join(reversed(parts)) or "."
