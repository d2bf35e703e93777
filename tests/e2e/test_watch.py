"""`keepstep watch` beside a run that trains, is killed, and is continued."""

import json
import signal

from tests.helpers import hooks
from tests.helpers.command import Session, keepstep

HOOK = f"--run.hooks=['{hooks.CONFIG}']"


def test_a_run_is_followed_until_it_is_killed_and_again_when_it_is_continued(config, tmp_path):
    acts = [
        {"when": "step", "step": 3, "do": "SIGSTOP"},
        {"when": "step", "step": 7, "do": "PAUSE"},
    ]
    words = ("train", config, f"--run.dir={tmp_path}", HOOK)
    with Session(*words, extra=hooks.acting(*acts)) as training:
        training.wait_for("step 2/10")
        with Session("watch", tmp_path) as watching:
            watching.wait_for("loss ")
            training.signal(signal.SIGCONT)
            watching.wait_for("evaluate step 4")
            watching.wait_for("save     step 6")
            training.signal(signal.SIGKILL)
            assert watching.end() == 0
            last = watching.output.splitlines()[-1]
    assert last.startswith("lost at step 7:"), watching.output
    assert "The same command continues it from step_6." in last
    act = {"when": "step", "step": 9, "do": "PAUSE"}
    with Session(*words, extra=hooks.acting(act)) as training:
        training.wait_for("resume")
        training.wait_for("step 8/10")
        with Session("watch", tmp_path, "--json") as watching:
            watching.wait_for('"step": 8')
            training.signal(signal.SIGKILL)
            assert watching.end() == 0
    told = [json.loads(line) for line in watching.lines]
    assert (told[0]["kind"], told[-1]["kind"]) == ("status", "ended")
    assert told[-1]["state"] == "lost"
    assert keepstep(*words).returncode == 0
    done = keepstep("watch", tmp_path)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith("finished at step 10"), done.stdout


def test_watching_can_be_ended_and_leaves_the_run_alone(config, tmp_path):
    act = {"when": "step", "step": 3, "do": "PAUSE"}
    with Session("train", config, f"--run.dir={tmp_path}", HOOK, extra=hooks.acting(act)) as run:
        run.wait_for("step 2/10")
        with Session("watch", tmp_path) as watching:
            watching.wait_for("tiny")
            watching.signal(signal.SIGINT)
            assert watching.end() == 130
        assert run.process.poll() is None
