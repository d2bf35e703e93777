"""The numbers of a run at Weights & Biases.

Guarantees: all sessions of a run are one run there, by the run's id, which checkpoints and
`outcome.json` hold. What the run takes back is taken back there by a rewind (`resume_from`); where
the server refuses that, it is told, and the steps that are taken again lie over the others, as
`step` is the axis of every chart. Offline nothing is known of earlier files, so each session's
folder holds the whole run: the newest is the one to sync.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import wandb

from keepstep.config.quantities import seconds
from keepstep.config.resolved import track_folder
from keepstep.errors import UsageError
from keepstep.report.trackers import Record, ended
from keepstep.run.outcome import Ending
from keepstep.store.disk import Disk

if TYPE_CHECKING:
    from keepstep.run.outcome import Outcome
    from keepstep.run.run import Run


def build(run: "Run", tell: Callable[[str], None]) -> "WeightsAndBiases":
    """Return the tracker of a run."""
    return WeightsAndBiases(run, tell)


class WeightsAndBiases:
    """A tracker that continues one run of W&B."""

    def __init__(self, run: "Run", tell: Callable[[str], None]) -> None:
        track, folder = run.config.track, track_folder(run.config)
        Disk().make_folders(folder)
        self._tell = tell
        self._id = run.store.run_id
        self._run: Any = None
        self._row = 0
        self._lies_over = False
        self._facts: dict[str, Any] = {
            "project": track.project,
            "entity": track.entity or None,
            "group": track.group or None,
            "name": run.config.run.name,
            "mode": "offline" if track.offline else None,
            "dir": str(folder),
            "config": dataclasses.asdict(run.config),
        }
        self._wait_seconds = seconds(track.wait)

    def rewind(self, step: int) -> int:
        """Continue the run behind `step`; return the first step that it does not hold."""
        run = self._begun(resume="allow")
        self._lies_over, self._row = False, 0
        if run.offline:
            return 0
        held = int(run.starting_step) - 1
        if held > step:
            try:
                self._begun(resume_from=f"{self._id}?_step={step}")
            except wandb.Error as error:
                self._tell(f"steps that are taken again lie over the others: {str(error).strip()}")
                self._lies_over = True
                self._begun(resume="allow")
        return min(held, step) + 1

    def write(self, records: Sequence[Record]) -> None:
        """Hand the records to W&B's own process, which keeps them in its file and sends them."""
        for record in records:
            shown = {**record.numbers, "_timestamp": record.time}
            if self._lies_over:
                self._run.log({**shown, "step": record.step})
            else:
                # W&B takes no row behind its newest: what was committed late is shown there.
                self._row = max(self._row, record.step)
                self._run.log({**shown, "step": self._row}, step=self._row)

    def close(self, outcome: "Outcome") -> None:
        """Say how the session ended; return when all is sent, TimeoutError after `track.wait`."""
        self._run.summary.update(ended(outcome).texts)
        if outcome.ending is Ending.STOPPED:
            self._run.mark_preempting()
        self._run.finish(exit_code=outcome.exit_code)

    def _begun(self, **how: Any) -> Any:
        """Begin a run of W&B's, after ending the one that is open."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()
        else:
            # W&B's process takes the id of a run that it could not begin for one that is open.
            wandb.teardown()
        online = self._facts["mode"] is None and wandb.setup().settings.mode == "online"
        # Without a key it would ask for one on the terminal of the run.
        if online and not wandb.login(prompt=False, verify=False):
            raise UsageError("W&B knows no API key: set WANDB_API_KEY, or use `wandb login`")
        # Made anew, as wandb.init writes into them. Its own words would stand between the run's.
        settings = wandb.Settings(
            console="off",
            silent=True,
            finish_timeout=self._wait_seconds,
            finish_timeout_raises=True,
        )
        self._run = wandb.init(id=self._id, settings=settings, **self._facts, **how)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        return self._run
