"""The examples and the commands of the documentation, run as they stand."""

import re
import subprocess
import sys

import pytest

from keepstep.store import list_checkpoints, verify
from tests.helpers.command import ROOT, environment, keepstep


def test_the_plain_loop_survives_a_kill_and_ends_where_an_untouched_one_ends(tmp_path):
    # Its first weights are drawn at random; two runs are compared here.
    code = "import torch\ntorch.manual_seed(0)\n" + (ROOT / "examples/plain_loop.py").read_text()
    zero = "        optimizer.zero_grad()"
    kill = "        if step == 57: os.kill(os.getpid(), signal.SIGKILL)\n"
    killed = "import os, signal\n" + code.replace(zero, kill + zero)

    def run(text, folder):
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-c", text]
        return subprocess.run(command, cwd=folder, env=environment()).returncode

    assert run(killed, tmp_path / "a") == -9
    assert [e.step for e in list_checkpoints(tmp_path / "a/runs/plain-loop")] == [30, 40, 50]
    assert run(code, tmp_path / "a") == 0
    assert run(code, tmp_path / "b") == 0
    one, other = (list_checkpoints(tmp_path / n / "runs/plain-loop")[-1] for n in "ab")
    assert verify(one) == []
    assert one.step == 100
    assert one.manifest.content_digest() == other.manifest.content_digest()


def test_ten_steps_of_the_debug_config_leave_exactly_one_checkpoint(tmp_path):
    done = keepstep(
        "train",
        ROOT / "configs/language/debug.toml",
        "--train.max_steps=10",
        "--checkpoint.interval=1000",
        f"--checkpoint.dir={tmp_path}",
        "--data.megabytes=1",
    )
    assert done.returncode == 0, done.stdout
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [10]
    assert (tmp_path / "latest").resolve().name == "step_10"


def test_every_keepstep_command_in_the_documentation_is_one_that_parses():
    """Each is asked for its help: the words must exist, as must the flags of `train`."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    commands = set()
    for page in pages:
        for block in re.findall(r"```(?:console|bash)?\n(.*?)```", page.read_text(), re.S):
            commands |= set(re.findall(r"^\$? ?keepstep ([^#\n]+)", block, re.M))
    assert len(commands) > 8
    seen = set()
    for command in sorted(commands):
        words = command.split()
        if words[0] == "train" and words[1] != "--help":
            flags = [word for word in words[2:] if word.startswith("--")]
            # Shown, not checked: the folders that a page names need not be here.
            done = keepstep("config", "show", ROOT / words[1], *flags, cwd=ROOT)
        else:
            name = tuple(words[:2])
            if name in seen:
                continue
            seen.add(name)
            done = keepstep(*name, "--help", cwd=ROOT)
        assert done.returncode == 0, f"{command}: {done.stdout}"


@pytest.mark.parametrize("page", ["async", "single-files"])
def test_the_program_of_a_page_runs_and_runs_again(tmp_path, page):
    text = (ROOT / f"docs/how-to/{page}.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    found = sorted(path.name for path in (tmp_path / "runs").glob("*/*"))
    expected = {
        "async": ["latest", "lock", "pins.lock", "step_100", "step_80", "step_90"],
        "single-files": ["best.pth", "latest.pth"],
    }
    assert found == expected[page]
