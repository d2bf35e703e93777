"""Loss, gradient or weights that are not finite, wherever they come: nothing of it is committed.

Each run is a whole one, of the tiny language task, within this process.
"""

import math
import os
import shutil
import threading
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch

from keepstep.errors import NotFound, OtherRun
from keepstep.run.journal import read_journal
from keepstep.run.stop import StopRequests
from keepstep.store import list_checkpoints
from keepstep.store.load import read_checkpoint
from keepstep.store.staging import Cut
from keepstep.tasks.registry import load_task_config
from keepstep.train import train
from tests.helpers import hooks
from tests.helpers.command import digests, events, link, losses, steps

BATCH = 4
ROLLBACK = "--nonfinite.policy=rollback"


def run_here(config: Path, folder: Path, *flags: str, acts=(), more=()):
    """Train in this process; return the outcome."""
    words = [
        f"--checkpoint.dir={folder}",
        "--train.deterministic=false",
        "--data.workers=0",
        *flags,
    ]
    loaded = load_task_config(config, words).config
    with mock.patch.dict(os.environ, hooks.acting(*acts)):
        return train(loaded, stop=StopRequests(), hooks=[hooks.Act(), *more])


def tensors_in(tree):
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)


def assert_nothing_is_poisoned(folder: Path):
    """Every checkpoint that stands holds finite numbers, and so does the best."""
    standing = list_checkpoints(folder)
    assert standing
    for entry in standing:
        assert entry.manifest is not None, entry.fault
        for tensor in tensors_in(read_checkpoint(entry.path, entry.manifest)):
            assert torch.isfinite(tensor.double()).all(), entry.name
        best = entry.manifest.best
        assert best is None or math.isfinite(best.value)


PLACES = {"on a scheduled save": 6, "during a stop": 5, "at the last step": 10}
ENDINGS = {
    # What is not finite, the policy: how it ends on a save, during a stop, at the last step.
    ("loss", "skip"): ["finished 10", "stopped 5", "finished_skipped 10"],
    ("gradient", "rollback"): ["finished 10", "stopped 4", "finished 10"],
    ("loss", "rollback"): ["finished 10", "stopped 4", "finished 10"],
    ("loss", "stop"): ["diverged 6", "diverged 5", "diverged 10"],
    ("weight", "skip"): ["diverged 6", "diverged 5", "diverged 10"],
    ("weight", "rollback"): ["finished 10", "stopped 4", "finished 10"],
    ("weight", "stop"): ["diverged 6", "diverged 5", "diverged 10"],
}


@pytest.mark.parametrize(("what", "policy"), ENDINGS)
@pytest.mark.parametrize("place", PLACES)
def test_nothing_that_is_not_finite_is_ever_committed(config, tmp_path, what, policy, place):
    step = PLACES[place]
    bad = {
        "loss": {"samples": BATCH * (step - 1), "do": "nan_loss"},
        "gradient": {"samples": BATCH * (step - 1), "do": "nan"},
        # By the update itself: loss and gradient were finite.
        "weight": {"when": "step", "samples": BATCH * step, "do": "inf_weight"},
    }[what]
    acts = [bad]
    if place == "during a stop":
        acts.append({"when": "forward", "step": step, "do": "stop"})
    policy_flag = f"--nonfinite.policy={policy}"
    found = run_here(config, tmp_path, policy_flag, "--checkpoint.keep_last_n=0", acts=acts)
    assert f"{found.ending} {found.step}" == ENDINGS[what, policy][list(PLACES).index(place)]
    assert_nothing_is_poisoned(tmp_path)
    assert link(tmp_path, "latest") == found.checkpoint
    if policy == "rollback":
        again = run_here(config, tmp_path, policy_flag, acts=[bad])
        assert again.ending in ("finished", "nothing_to_do")
        assert_nothing_is_poisoned(tmp_path)
        # Never twice: each session takes up what an earlier one has decided.
        assert len(events(tmp_path, "rollback")) == 1


def test_a_rollback_skips_the_batches_that_led_there_and_scales_the_rate(config, tmp_path):
    class Batches:
        """Notes where each batch begins, and the rate of its update."""

        def __init__(self):
            self.taken = []

        def on_step_end(self, run, step, metrics):
            self.taken.append((step, run.position.counters.samples - BATCH, metrics["rate"]))

    batches = Batches()
    bad = {"samples": 28, "do": "nan_loss"}
    flags = (ROLLBACK, "--nonfinite.rollback_rate_factor=0.5", "--schedule.name=constant")
    assert run_here(config, tmp_path, *flags, acts=[bad], more=[batches]).updates == 10
    before = [(step, BATCH * (step - 1)) for step in range(1, 9)]
    after = [(step, BATCH * (step + 1)) for step in range(7, 11)]
    assert [(step, samples) for step, samples, _ in batches.taken] == before + after
    assert [rate for _, _, rate in batches.taken][2:] == [0.01] * 6 + [0.005] * 4
    assert [step for step, _, _ in losses(tmp_path)] == list(range(1, 11))
    (told,) = events(tmp_path, "rollback")
    wanted = {"step": 8, "back_to": 6, "samples": 32, "rollbacks": 1}
    assert {name: told[name] for name in wanted} == wanted


def test_rollbacks_are_counted_over_the_whole_run_and_end_as_diverged(config, tmp_path):
    bad = [{"samples": samples, "do": "nan_loss"} for samples in (8, 32, 52)]
    flags = (ROLLBACK, "--nonfinite.max_rollbacks=2")
    found = run_here(config, tmp_path, *flags, acts=bad)
    assert (found.ending, found.exit_code, found.step) == ("diverged", 6, 9)
    assert "2 rollbacks were made (nonfinite.max_rollbacks)" in found.reason
    assert_nothing_is_poisoned(tmp_path)
    # No session begins to count anew.
    again = run_here(config, tmp_path, *flags, acts=bad)
    assert (again.ending, again.step) == ("diverged", 9)
    assert len(events(tmp_path, "rollback")) == 2
    more = run_here(config, tmp_path, ROLLBACK, acts=bad)
    assert more.ending == "finished"
    assert [event["rollbacks"] for event in events(tmp_path, "rollback")] == [1, 2, 3]


def test_what_is_not_finite_at_one_step_with_any_batch_ends_as_diverged(config, tmp_path):
    found = run_here(config, tmp_path, ROLLBACK, acts=[{"step": 5, "do": "nan_loss"}])
    assert (found.ending, found.step, found.checkpoint) == ("diverged", 5, "step_4")
    told = [(e["samples"], e["rollbacks"]) for e in events(tmp_path, "rollback")]
    assert told == [(20, 1), (24, 2), (28, 3)]


def test_before_the_first_save_a_rollback_goes_back_to_the_initial_state(config, tmp_path):
    bad = {"samples": 4, "do": "nan_loss"}
    assert run_here(config, tmp_path, ROLLBACK, acts=[bad]).ending == "finished"
    (told,) = events(tmp_path, "rollback")
    assert (told["back_to"], told["samples"]) == (0, 8)
    assert [step for step, _, _ in losses(tmp_path)] == list(range(1, 11))


def test_hooks_get_their_state_back_and_hear_of_one_start(config, tmp_path):
    class Count:
        def __init__(self):
            self.steps, self.heard = 0, []

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state):
            self.steps = state["steps"]

        def on_run_start(self, run):
            self.heard.append("start")

        def on_step_end(self, run, step, metrics):
            self.steps += 1

        def on_rewound(self, run, step):
            last = losses(run.folder)[-1][0] if step else 0
            self.heard.append(f"rewound to {step}, the journal ends at {last}")

        def on_notice(self, run, word, text):
            if word == "rollback":
                self.heard.append(text)

    count = Count()
    flags = (ROLLBACK, "--nonfinite.rollback_rate_factor=0.5")
    run_here(config, tmp_path, *flags, acts=[{"samples": 28, "do": "nan_loss"}], more=[count])
    assert count.steps == 10
    assert count.heard == [
        "start",
        "rewound to 6, the journal ends at 6",
        "loss nan, gradient norm nan at step 8 (1 in a row not finite); back to step 6 (verified),"
        " skipping samples 24..31, rate x0.5 (1 of 3)",
    ]


def test_an_evaluation_that_was_owed_is_made_again_and_its_best_stands(config, tmp_path):
    # At this rate the loss is large at first and falls: of the largest, the first one is the best.
    flags = (ROLLBACK, "--checkpoint.interval=20", "--optimizer.rate=5", "--evaluation.mode=max")
    cut = run_here(config, tmp_path, *flags, acts=[{"when": "evaluating", "step": 4, "do": "stop"}])
    assert (cut.ending, cut.step) == ("stopped", 4)
    run_here(config, tmp_path, *flags, acts=[{"samples": 20, "do": "nan_loss"}])
    found = {
        event["step"]: event["metrics"]["valid_loss"] for event in events(tmp_path, "evaluation")
    }
    assert len(events(tmp_path, "evaluation")) == len(found) == 3
    assert max(found, key=found.__getitem__) == 4, "choose another rate"
    assert link(tmp_path, "best") == "step_4"


def damage(path: Path):
    data = path / "rank-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-1])


class Damage:
    """Damages the newest checkpoint before a rollback, and looks at the memory of the moments."""

    def __init__(self):
        self.moments, self.alive = [], None

    def on_step_end(self, run, step, metrics):
        if metrics["skipped"]:
            damage(run.store.folder / "step_6")
            (part,) = run.position.optimizer.state_dict().values()
            self.moments = [weakref.ref(m["exp_avg"]) for m in part["state"].values()]

    def on_notice(self, run, word, text):
        if self.moments and "aside" in text:
            self.alive = sum(moment() is not None for moment in self.moments)


@pytest.mark.parametrize("remote", [False, True])
def test_a_damaged_newest_checkpoint_is_passed_over_as_in_a_resume(config, tmp_path, remote):
    more = (f"--checkpoint.remote=memory://{tmp_path}",) if remote else ()
    bad, hook = {"samples": 28, "do": "nan_loss"}, Damage()
    found = run_here(config, tmp_path / "run", ROLLBACK, *more, acts=[bad], more=[hook])
    assert found.ending == "finished"
    (told,) = events(tmp_path / "run", "rollback")
    # Where there is a remote, the whole copy is fetched from there.
    assert told["back_to"] == (6 if remote else 4)
    assert (tmp_path / "run/aside/step_6").is_dir()
    assert_nothing_is_poisoned(tmp_path / "run")
    assert hook.moments
    assert hook.alive == 0, "what is restored needs their memory"


def test_a_session_that_takes_up_another_checkpoint_takes_the_batches_again(config, tmp_path):
    """The newest is damaged after the way back to it: its rollback is none to the one before."""
    bad, stop = {"samples": 28, "do": "nan_loss"}, {"when": "forward", "step": 8, "do": "stop"}
    whole, run = tmp_path / "whole", tmp_path / "run"
    run_here(config, whole, ROLLBACK, acts=[bad])
    assert run_here(config, run, ROLLBACK, acts=[bad, stop]).step == 6
    damage(run / "step_6")
    run_here(config, run, ROLLBACK, acts=[bad])
    assert [event["step"] for event in events(run, "resumed")] == [4]
    assert losses(run) == losses(whole)
    assert digests(run, 10) == digests(whole, 10)


def test_a_run_that_starts_over_beside_an_old_journal_skips_nothing(config, tmp_path):
    """Its first checkpoint has the number that the old run's had."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    run_here(config, whole, ROLLBACK)
    run_here(config, run, ROLLBACK, acts=[{"samples": 4, "do": "nan_loss"}])
    assert [event["sequence"] for event in events(run, "rollback")] == [1]
    for name in steps(run):
        (run / f"step_{name}").rename(tmp_path / f"gone-{name}")
    fresh = (ROLLBACK, "--checkpoint.on_resume=fresh")
    with pytest.raises(ValueError, match="on purpose"):
        run_here(config, run, *fresh, acts=[{"when": "step", "step": 2, "do": "raise"}])
    assert steps(run) == [0]
    run_here(config, run, *fresh)
    assert losses(run) == losses(whole)


class TakeAway:
    """Takes all checkpoints away before a rollback, and may put another run's in their place."""

    def __init__(self, *, into: Path, instead: Path | None = None):
        self.into, self.instead = into, instead

    def on_step_end(self, run, step, metrics):
        if metrics["skipped"]:
            for name in steps(run.folder):
                (run.folder / f"step_{name}").rename(self.into / f"gone-{name}")
            if self.instead is not None:
                shutil.copytree(self.instead, run.folder / self.instead.name)


def test_where_all_checkpoints_were_taken_away_the_error_says_so(config, tmp_path):
    take_away = TakeAway(into=tmp_path)
    bad = {"samples": 28, "do": "nan_loss"}
    with pytest.raises(NotFound, match="holds no checkpoint to go back to"):
        run_here(config, tmp_path / "run", ROLLBACK, acts=[bad], more=[take_away])


def test_another_runs_checkpoint_is_not_gone_back_to(config, tmp_path):
    run_here(config, tmp_path / "other", "--train.max_steps=6")
    take_away = TakeAway(into=tmp_path, instead=tmp_path / "other/step_6")
    bad = {"samples": 28, "do": "nan_loss"}
    with pytest.raises(OtherRun, match="holds checkpoints of another run"):
        run_here(config, tmp_path / "run", ROLLBACK, acts=[bad], more=[take_away])


class HoldTheSaveOfStep6:
    """Has its writer wait until step 7, which is not finite, was taken."""

    def __init__(self):
        self.taken = threading.Event()
        self.taken.set()

    def on_snapshot(self, run, step):
        if step == 6:
            self.taken.clear()

    def on_step_end(self, run, step, metrics):
        if step == 7:
            self.taken.set()


def test_a_save_in_flight_is_finished_first_and_gone_back_to(config, tmp_path, monkeypatch):
    bad, hold, copy = {"samples": 24, "do": "nan_loss"}, HoldTheSaveOfStep6(), Cut.copy
    now, later = tmp_path / "now", tmp_path / "later"
    run_here(config, now, ROLLBACK, acts=[bad])
    monkeypatch.setattr(Cut, "copy", lambda cut: hold.taken.wait(60) and copy(cut))
    mode = "--checkpoint.async_mode=async"
    assert run_here(config, later, ROLLBACK, mode, acts=[bad], more=[hold]).ending == "finished"
    told = [(e["kind"], e["step"]) for e in read_journal(later / "journal.jsonl") if "step" in e]
    saved, back = told.index(("saved", 6)), told.index(("rollback", 7))
    assert saved < back, "it is told before the way back to it"
    assert [event["back_to"] for event in events(later, "rollback")] == [6]
    assert digests(later, 10) == digests(now, 10)
    assert losses(later) == losses(now)


def test_without_a_rollback_its_policy_changes_no_bit(config, tmp_path):
    with_it, without = tmp_path / "with", tmp_path / "without"
    run_here(config, with_it, ROLLBACK, "--nonfinite.rollback_rate_factor=0.5")
    run_here(config, without)
    assert losses(with_it) == losses(without)
    assert digests(with_it, 10) == digests(without, 10)
