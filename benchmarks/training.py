"""What the trainer costs over a plain PyTorch loop: ratios within one run of this file.

    .venv/bin/python benchmarks/training.py [--pairs 5] [--turns 20]

1. Tokens a second of `keepstep train` against a plain loop on the same model, data and batch. Both
   run at once and take turns of some fifty steps, of which one of ours holds a save.
2. From process start to the first finished step, against importing torch and transformers and
   building the model: fresh, and resumed.
3. A resume at step 100,000 against one at step 10.

The machine's speed drifts, so the two sides take turns and each pair gives one ratio.

    .venv/bin/python benchmarks/training.py --only throughput [--data.workers=0 ...]

measures the first with other settings.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs/language/debug.toml"
KEEPSTEP = Path(sys.executable).with_name("keepstep")
UNCOUNTED_STEPS, COUNTED_STEPS = 4, 50
TURNS_HOOK = "--run.hooks=['benchmarks.training:Turns']"
ADAMW = ("--optimizer.name=adamw", "--optimizer.rate=1e-3")
NO_EVALUATION = ("--evaluation.interval=0", "--evaluation.at_end=false")

PLAIN_LOOP = """
import sys
import torch
from benchmarks.training import Turns
from transformers import AutoConfig, AutoModelForCausalLM
from keepstep.tasks.registry import load_task_config
from keepstep.tasks.language.task import data_folder
from keepstep.tasks.language.tokens import open_tokens

config = load_task_config(sys.argv[1], []).config
length, batch = config.data.sequence_length, config.train.global_batch
tokens = open_tokens(data_folder(config.data))
torch.manual_seed(1)
model = AutoModelForCausalLM.from_config(
    AutoConfig.for_model(
        config.model.architecture, vocab_size=tokens.vocab_size, **config.model.settings
    ),
    attn_implementation=config.model.attention,
)
model.train()
if sys.argv[2] == "build":
    sys.exit()
turns = Turns()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
text = torch.from_numpy(tokens.parts["train"].astype("int64"))
while True:
    starts = torch.randint(0, len(text) - length - 1, (batch,)).tolist()
    samples = torch.stack([text[s : s + length + 1] for s in starts])
    logits = model(input_ids=samples[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), samples[:, 1:].flatten()
    )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss.item()
    turns.step()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--only", choices=["throughput", "start"])
    given, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if given.only != "start":
            throughput(place, turns=given.turns, flags=flags)
        if given.only != "throughput":
            start_up(place, pairs=given.pairs)
            late_resume(place, pairs=given.pairs)


def throughput(place: Path, *, turns: int, flags: list[str]) -> None:
    run = [f"--run.dir={place / 'throughput'}", "--train.max_steps=100000", TURNS_HOOK]
    ours = Side([str(KEEPSTEP), "train", str(CONFIG), *run, *ADAMW, *NO_EVALUATION, *flags])
    plain = Side([sys.executable, "-c", PLAIN_LOOP, str(CONFIG), "train"])
    with ours, plain:
        compare(ours, plain, turns=turns)


def compare(ours: "Side", plain: "Side", *, turns: int) -> None:
    """Have both take turns, and report the ratio of their rates."""
    for side in (plain, ours):
        side.turn()
    # Each of ours stands between two of the other's, whose mean it is compared with.
    seconds_of = [plain.turn()]
    ratios = []
    for _ in range(turns):
        mine = ours.turn()
        seconds_of.append(plain.turn())
        ratios.append((seconds_of[-2] + seconds_of[-1]) / 2 / mine)
    report("tokens a second: keepstep / plain loop", ratios)
    middle = statistics.mean(ratios)
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    print(f"    mean {middle:.3f}, standard error {error:.3f}", flush=True)


class Side:
    """One of two processes that take turns; each says how long its steps took."""

    def __init__(self, command: list[str], extra: Mapping[str, str] | None = None) -> None:
        go_read, self._go = os.pipe()
        self._done, done_write = os.pipe()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment(), **(extra or {}), "TURNS": f"{go_read},{done_write}"},
            pass_fds=(go_read, done_write),
            stdout=subprocess.DEVNULL,
        )
        os.close(go_read)
        os.close(done_write)

    def turn(self) -> float:
        """Let it take its steps; return their seconds."""
        os.write(self._go, b"1")
        said = os.read(self._done, 100)
        if not said:
            raise SystemExit(f"{self._process.args} ended with code {self._process.wait()}")
        return float(said)

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, *error: object) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


class Turns:
    """In such a process: counts steps, and waits for the next turn after enough of them.

    The first steps of a turn do not count: batches were loaded ahead while the other side ran.
    """

    def __init__(self) -> None:
        self._go, self._done = map(int, os.environ["TURNS"].split(","))
        self._step = 0

    def step(self) -> None:
        """Count a step; returns when the next may begin."""
        if self._step == UNCOUNTED_STEPS:
            self._started = time.perf_counter()
        if self._step == UNCOUNTED_STEPS + COUNTED_STEPS:
            os.write(self._done, str(time.perf_counter() - self._started).encode())
            self._step = 0
        if self._step == 0:
            os.read(self._go, 1)
        self._step += 1

    def on_step_end(self, *_: object) -> None:
        """Be a hook of the run: count its step."""
        self.step()


def start_up(place: Path, *, pairs: int) -> None:
    fresh, resumed = [], []
    for pair in range(pairs):
        run = place / f"start{pair}"
        base = seconds(lambda: python(PLAIN_LOOP, CONFIG, "build"))
        fresh.append(first_step_seconds(run, 1) - base)
        resumed.append(first_step_seconds(run, 2) - base)
    report("seconds to the first step over import and build, fresh", fresh)
    report("seconds to the first step over import and build, resumed", resumed)


def late_resume(place: Path, *, pairs: int) -> None:
    """Resume a run whose counters and journal say 100,000 steps: the same state, moved forward."""
    early, late = place / "early", place / "late"
    train(early, "--train.max_steps=10", *ADAMW)
    train(late, "--train.max_steps=10", *ADAMW)
    move_to_step(late, 100_000)
    ratios = []
    for _ in range(pairs):
        runs = []
        for run, step in ((early, 11), (late, 100_001)):
            copy = place / "copy"
            shutil.copytree(run, copy, symlinks=True)
            runs.append(first_step_seconds(copy, step))
            shutil.rmtree(copy)
        ratios.append(runs[1] / runs[0])
    report("seconds to the first resumed step: at step 100,000 / at step 10", ratios)


def move_to_step(run: Path, step: int) -> None:
    from keepstep.store import Store, list_checkpoints

    manifest = list_checkpoints(run)[-1].manifest
    assert manifest is not None, "the run was just made"
    with Store(run / "checkpoints") as store:
        restored = store.restore()
        assert restored is not None, "the run was just made"
        samples = manifest.samples // manifest.step * step
        restored.state["counters"].update(step=step, updates=step, samples=samples)
        store.save(
            restored.state,
            step=step,
            updates=step,
            samples=samples,
            must_match=manifest.must_match,
            environment=manifest.environment,
        )
    with (run / "journal.jsonl").open("a") as journal:
        for number in range(11, step + 1):
            line = {"kind": "step", "time": 0.0, "step": number, "loss": 1 / 3, "rate": 1e-3}
            journal.write(json.dumps(line) + "\n")


def first_step_seconds(run: Path, step: int) -> float:
    started = time.time()
    train(run, f"--train.max_steps={max(step, 10)}", *ADAMW, *NO_EVALUATION, stop_at=step)
    times = step_times(run)
    return times[-1] - started


def train(run: Path, *flags: str, stop_at: int = 0) -> None:
    command = [str(KEEPSTEP), "train", str(CONFIG), f"--run.dir={run}", *flags]
    if stop_at:
        command += ["--train.log_interval=1", "--run.hooks=['benchmarks.training:StopAfterOne']"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment())
    if done.returncode not in (0, 75):
        raise SystemExit(done.stdout + done.stderr)


class StopAfterOne:
    """Stops a session before its second step."""

    def on_run_start(self, run) -> None:
        run.position.model.register_forward_hook(lambda *_: run.request_stop("benchmark"))


def step_times(run: Path) -> list[float]:
    from keepstep.run.journal import read_journal

    return [e["time"] for e in read_journal(run / "journal.jsonl") if e["kind"] == "step"]


def python(code: str, *words: object) -> str:
    command = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    return done.stdout


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def seconds(work) -> float:
    started = time.time()
    work()
    return time.time() - started


def report(what: str, values: list[float]) -> None:
    low, middle, high = min(values), statistics.median(values), max(values)
    print(
        f"{what}: median {middle:.3f} (min {low:.3f}, max {high:.3f}, n = {len(values)})",
        flush=True,
    )


if __name__ == "__main__":
    main()
