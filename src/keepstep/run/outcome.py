"""Every way out of a run, as a value, and the one decision of what it leaves.

`decides_to_save` is pure and tested over all combinations: no other place decides whether an
ending writes a checkpoint. See ``docs/concepts/endings.md``.
"""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from keepstep.errors import KeepstepError, Unhealthy


class Ending(StrEnum):
    """How a run ends."""

    FINISHED = "finished"
    FINISHED_SKIPPED = "finished_skipped"
    NOTHING_TO_DO = "nothing_to_do"
    STOPPED = "stopped"
    DIVERGED = "diverged"
    UNHEALTHY = "unhealthy"
    FAILED = "failed"


EXIT_CODES = {
    Ending.FINISHED: 0,
    Ending.FINISHED_SKIPPED: 6,
    Ending.NOTHING_TO_DO: 0,
    Ending.STOPPED: 75,
    Ending.DIVERGED: 6,
    Ending.UNHEALTHY: 7,
    Ending.FAILED: 1,
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended, where, and the newest committed checkpoint that it leaves."""

    ending: Ending
    step: int
    updates: int
    reason: str = ""
    checkpoint: str | None = None
    code: int = -1

    @property
    def exit_code(self) -> int:
        """The code that the process exits with."""
        return self.code if self.code >= 0 else EXIT_CODES[self.ending]

    def as_data(self) -> dict[str, Any]:
        """Return what `outcome.json` holds."""
        data = asdict(self)
        data["outcome"] = str(data.pop("ending"))
        data["code"] = self.exit_code
        return data


class FinalSave(StrEnum):
    """Whether an ending writes a checkpoint, or would, and there is no time for it."""

    MADE = "made"
    NOT_WANTED = "not wanted"
    NO_TIME = "no time"


def decides_to_save(
    ending: Ending,
    *,
    step: int,
    saved_step: int | None,
    save_after_skipped_end: bool,
    fits: bool,
) -> FinalSave:
    """Decide whether an ending at `step` writes a checkpoint; `saved_step` is the newest one.

    A step that is saved already is never saved twice. Step 0 is made again from the seed.
    ``fits``: whether a save may end within the grace; one that cannot is not begun.
    """
    if saved_step == step or step == 0:
        return FinalSave.NOT_WANTED
    match ending:
        case Ending.FINISHED | Ending.STOPPED:
            wanted = True
        case Ending.FINISHED_SKIPPED:
            wanted = save_after_skipped_end
        case Ending.NOTHING_TO_DO | Ending.DIVERGED | Ending.UNHEALTHY | Ending.FAILED:
            wanted = False
    if not wanted:
        return FinalSave.NOT_WANTED
    return FinalSave.MADE if fits else FinalSave.NO_TIME


def ending_of(error: BaseException) -> tuple[Ending, int]:
    """Return the ending and the exit code that an exception stands for."""
    if isinstance(error, Unhealthy):
        return Ending.UNHEALTHY, EXIT_CODES[Ending.UNHEALTHY]
    code = error.exit_code if isinstance(error, KeepstepError) else EXIT_CODES[Ending.FAILED]
    return Ending.FAILED, code
