"""Weights that a hook freezes, with the installed command: linked, listed, and bit for bit."""

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.command import ROOT, digests, environment, injecting, keepstep, losses, steps

FROZEN = "rank-00000-frozen.safetensors"
FLAGS = (
    "--run.hooks=['tests.helpers.hooks:FreezeAllButTheHead']",
    "--model.hidden_size=256",
    "--checkpoint.interval=1",
    "--checkpoint.keep_last_n=0",
    "--train.max_steps=6",
)


def inodes(run: Path) -> list[int]:
    return [path.stat().st_ino for path in sorted(run.glob(f"step_*/{FROZEN}"))]


def test_a_killed_run_with_frozen_weights_continues_bit_for_bit_and_links(config, tmp_path):
    untouched, run = tmp_path / "untouched", tmp_path / "run"
    done = keepstep("train", config, f"--checkpoint.dir={untouched}", *FLAGS)
    assert done.returncode == 0, done.stdout
    words = ("train", config, f"--checkpoint.dir={run}", *FLAGS)
    killed = keepstep(*words, extra=injecting(at=1, action="kill", only="staging-5"))
    assert killed.returncode == -9, killed.stdout
    again = keepstep(*words)
    assert again.returncode == 0, again.stdout
    assert losses(run) == losses(untouched)
    for step in steps(untouched):
        assert digests(run, step) == digests(untouched, step)
    for folder in (untouched, run):
        assert len(inodes(folder)) == 4
        assert len(set(inodes(folder))) == 1
    for words in (("verify", run), ("diff", run, 5, 5)):
        assert keepstep("ckpt", *words).returncode == 0
    assert " shared)" in keepstep("ckpt", "show", run, "latest").stdout
    listed = keepstep("ckpt", "ls", run).stdout.splitlines()
    assert listed[-1].startswith("on disk: ")
    rows = json.loads(keepstep("ckpt", "ls", run, "--json").stdout)
    size = (run / "step_6" / FROZEN).stat().st_size
    assert [row["shared"] for row in rows] == [0, 0, size, size, size, size]
    pruned = keepstep("ckpt", "prune", run, "--keep-last", 1, "--keep-best", 0, "--apply")
    assert pruned.returncode == 0, pruned.stdout
    assert keepstep("ckpt", "verify", run).returncode == 0
    out = tmp_path / "out"
    exported = keepstep("ckpt", "export", run, "latest", out, "--format", "safetensors")
    assert exported.returncode == 0, exported.stdout


def test_the_program_of_the_page_links_what_it_froze(tmp_path):
    text = (ROOT / "docs/concepts/frozen-weights.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    words = [sys.executable, "-c", code]
    subprocess.run(words, cwd=tmp_path, env=environment(), check=True)
    assert len(inodes(tmp_path / "runs/frozen")) == 2
    assert len(set(inodes(tmp_path / "runs/frozen"))) == 1
