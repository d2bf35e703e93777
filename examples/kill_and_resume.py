"""Train a small language model on real text, kill it, continue it, and check the result.

`make demo` runs this. It trains twice with the installed command: once with a SIGKILL in the
middle, once untouched. Then it compares every tensor and every logged loss of the two.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from keepstep.run.journal import read_journal
from keepstep.store import list_checkpoints

CONFIG = "configs/language/debug.toml"
KILL_AFTER_STEP = 130
KEEPSTEP = Path(sys.executable).with_name("keepstep")


def main() -> int:
    """Run the demo in `runs/demo`; return 0 if the killed run equals the untouched one."""
    folder = Path("runs/demo") / time.strftime("%Y%m%d-%H%M%S")
    killed, untouched = folder / "killed", folder / "untouched"
    print(f"\n1. A run that is killed after step {KILL_AFTER_STEP}, with no warning:\n", flush=True)
    train(killed, kill_after_step=KILL_AFTER_STEP)
    print("\n2. The same command again:\n", flush=True)
    train(killed)
    print("\n3. The same run, never touched:\n", flush=True)
    train(untouched)
    print("\n4. What it learned:\n", flush=True)
    tell_what_it_learned(killed)
    print("\n5. The killed run against the untouched one:\n", flush=True)
    return compare(killed, untouched)


def train(folder: Path, *, kill_after_step: int = 0) -> None:
    """Run the command to its end, or send SIGKILL when its journal reaches a step."""
    command = [str(KEEPSTEP), "train", CONFIG, f"--run.dir={folder}"]
    print("$", " ".join(["keepstep", *command[1:]]), flush=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None, "the output was asked for"
    for line in process.stdout:
        print(line, end="", flush=True)
        if kill_after_step and line.startswith(f"step {kill_after_step}/"):
            os.kill(process.pid, signal.SIGKILL)
            break
    code = process.wait()
    if kill_after_step:
        print(f"(killed: SIGKILL, exit status {code})")
    elif code != 0:
        raise SystemExit(f"the run ended with code {code}")


def tell_what_it_learned(folder: Path) -> None:
    """Print the loss on held-out text and a piece of text that the best model writes."""
    losses = [
        (event["step"], event["metrics"]["valid_loss"])
        for event in read_journal(folder / "journal.jsonl")
        if event["kind"] == "evaluation"
    ]
    print("loss on held-out text: ", ", ".join(f"step {s}: {loss:.3f}" for s, loss in losses))
    command = [str(KEEPSTEP), "language", "generate", str(folder), "--prompt", "def "]
    subprocess.run([*command, "--max-tokens", "64"], check=True)


def compare(killed: Path, untouched: Path) -> int:
    """Print whether weights, optimizer state and losses are the same, bit for bit."""
    tensors = [digests(folder) for folder in (killed, untouched)]
    losses = [step_losses(folder) for folder in (killed, untouched)]
    same = tensors[0] == tensors[1] and losses[0] == losses[1]
    print(f"{len(tensors[0])} tensors, {len(losses[0])} logged losses: ", end="")
    print("all equal, bit for bit." if same else "THEY DIFFER. This should never happen.")
    return 0 if same else 1


def digests(folder: Path) -> dict[str, list[str]]:
    """Return the digests of every tensor of the newest checkpoint, as its manifest has them."""
    manifest = list_checkpoints(folder)[-1].manifest
    if manifest is None:
        raise SystemExit(f"the newest checkpoint of {folder} is damaged")
    return {tensor.name: [piece.digest for piece in tensor.pieces] for tensor in manifest.tensors}


def step_losses(folder: Path) -> list[tuple[int, float]]:
    """Return every logged loss with its step."""
    events = read_journal(folder / "journal.jsonl")
    return [(event["step"], event["loss"]) for event in events if event["kind"] == "step"]


if __name__ == "__main__":
    sys.exit(main())
