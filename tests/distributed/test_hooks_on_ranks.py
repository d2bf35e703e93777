"""What hooks hear, and in which order, on one rank and on two; what they ask for on any of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import hooks, warm
from tests.helpers.command import outcome, steps
from tests.helpers.tracking import tensorboard
from tests.helpers.world import train_on

HEAR = "tests.distributed.test_hooks_on_ranks:Hear"
SHORT = ("--train.max_steps=5", "--checkpoint.interval=2", "--evaluation.interval=4")


class Hear:
    """Writes down every event of the design, with what belongs to it, a file for each rank."""

    def _heard(self, run: Any, *words: object) -> None:
        with (run.folder / f"heard-{run.group.rank}.txt").open("a") as file:
            print(*words, file=file)

    def on_rewound(self, run: Any, step: int) -> None:
        self._heard(run, "rewound", step, run.position.counters.step)

    def on_run_start(self, run: Any) -> None:
        self._heard(run, "start")

    def on_step_end(self, run: Any, step: int, metrics: Any) -> None:
        known = {"loss", "grad_norm", "rate", "skipped", "updates", "tokens"}
        assert set(metrics) == known
        self._heard(run, "step", step)

    def on_evaluated(self, run: Any, step: int, metrics: Any) -> None:
        self._heard(run, "evaluated", step, json.dumps(metrics, sort_keys=True))

    def on_snapshot(self, run: Any, step: int) -> None:
        self._heard(run, "snapshot", step)

    def on_committed(self, run: Any, path: Path, manifest: Any) -> None:
        assert (path / "manifest.json").is_file()
        self._heard(run, "committed", manifest.step, path.name)

    def on_run_end(self, run: Any, outcome: Any) -> None:
        self._heard(run, "end", outcome.ending, outcome.checkpoint)


def train(ranks: int, config: Path, run: Path, *flags: str, extra: Any = None) -> list[int]:
    if ranks > 1:
        return train_on(ranks, config, run, *flags, extra=extra)
    done = warm.keepstep("train", config, f"--checkpoint.dir={run}", *flags, extra=extra)
    print(done.stdout)
    return [done.returncode]


def heard(run: Path, rank: int) -> list[str]:
    return (run / f"heard-{rank}.txt").read_text().splitlines()


@pytest.mark.parametrize(("ranks", "mode"), [(1, "disabled"), (1, "async"), (2, "async")])
def test_every_event_is_heard_on_every_rank_in_the_order_of_what_happens(
    config, tmp_path, ranks, mode
):
    flags = (*SHORT, f"--run.hooks=['{HEAR}']", f"--checkpoint.async_mode={mode}")
    flags += ("--track.to=tensorboard",)
    assert train(ranks, config, tmp_path, *flags) == [0] * ranks
    first = [heard(tmp_path, rank) for rank in range(ranks)]
    assert all(lines == first[0] for lines in first)
    metrics = [line.partition("{")[2] for line in first[0] if line.startswith("evaluated")]
    assert len(metrics) == 2
    assert all("valid_loss" in found for found in metrics)
    words = [line.partition(" {")[0] for line in first[0]]
    told = [f"committed {n} step_{n}" for n in (2, 4, 5)]
    others = [word for word in words if word not in told]
    assert others == [
        *("start", "step 1", "step 2", "snapshot 2", "step 3", "step 4", "evaluated 4"),
        *("snapshot 4", "step 5", "evaluated 5", "snapshot 5", "end finished step_5"),
    ]
    at = [words.index(word) for word in told]
    assert at == sorted(at)
    for word, number in zip(told, (2, 4, 5), strict=True):
        soon = words.index(f"snapshot {number}") + 1
        assert words.index(word) == soon if mode == "disabled" else words.index(word) >= soon
    more = (*flags, "--train.max_steps=6")
    assert train(ranks, config, tmp_path, *more) == [0] * ranks
    for rank in range(ranks):
        again = heard(tmp_path, rank)[len(words) :]
        assert again[:3] == ["rewound 5 5", "start", "step 6"]
        assert again[-1] == "end finished step_6"
    # One rank tracks, however many there are: a file for each session.
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    shown = tensorboard(tmp_path / "tensorboard")["train/loss"]
    assert [step for step, _ in shown] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_hook_asks_for_on_one_rank_is_done_by_all(config, tmp_path, rank):
    acts = (
        {"when": "step", "step": 2, "do": "save", "rank": rank},
        {"when": "evaluated", "step": 4, "do": "stop", "rank": rank},
    )
    flags = ("--checkpoint.interval=0", "--checkpoint.keep_last_n=0", "--evaluation.interval=4")
    both = f"--run.hooks=['{hooks.CONFIG}', '{HEAR}']"
    codes = train_on(2, config, tmp_path, both, *flags, extra=hooks.acting(*acts))
    assert codes == [75, 75]
    assert steps(tmp_path) == [3, 4]
    assert outcome(tmp_path)["reason"] == "the hook asks for it"
    assert heard(tmp_path, 0) == heard(tmp_path, 1)
    assert heard(tmp_path, 0)[-1] == "end stopped step_4"


def test_a_session_that_a_kill_left_without_a_checkpoint_is_rewound_to_its_start(config, tmp_path):
    flags = (*SHORT, "--checkpoint.interval=0", f"--run.hooks=['{HEAR}', '{hooks.CONFIG}']")
    act = hooks.acting({"when": "forward", "step": 3, "do": "SIGKILL"})
    assert train(1, config, tmp_path, *flags, extra=act) == [-9]
    run_id = outcome(tmp_path)["run_id"]
    assert train(1, config, tmp_path, *flags) == [0]
    assert heard(tmp_path, 0)[:6] == ["start", "step 1", "step 2", "rewound 0 0", "start", "step 1"]
    # It is the same run, by the id under which trackers know it.
    assert outcome(tmp_path)["run_id"] == run_id
