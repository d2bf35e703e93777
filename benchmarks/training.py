"""What the trainer costs over a plain PyTorch loop: ratios within one run of this file.

    .venv/bin/python benchmarks/training.py [--pairs 5] [--steps 120]

1. Tokens a second of `keepstep train` against a plain loop on the same model, data and batch.
2. From process start to the first finished step, against importing torch and transformers and
   building the model: fresh, and resumed.
3. A resume at step 100,000 against one at step 10.

The machine's speed drifts, so the two sides take turns and each pair gives one ratio.
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
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs/language/debug.toml"
KEEPSTEP = Path(sys.executable).with_name("keepstep")
WARM_UP_STEPS = 20
ADAMW = ("--optimizer.name=adamw", "--optimizer.rate=1e-3")
NO_EVALUATION = ("--evaluation.interval=0", "--evaluation.at_end=false")

PLAIN_LOOP = """
import sys, time
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from keepstep.tasks.registry import load_task_config
from keepstep.tasks.language.task import data_folder
from keepstep.tasks.language.tokens import open_tokens

config = load_task_config(sys.argv[1], []).config
steps, length, batch = int(sys.argv[2]), config.data.sequence_length, config.train.global_batch
tokens = open_tokens(data_folder(config.data))
torch.manual_seed(1)
model = AutoModelForCausalLM.from_config(
    AutoConfig.for_model(
        config.model.architecture, vocab_size=tokens.vocab_size, **config.model.settings
    ),
    attn_implementation=config.model.attention,
)
model.train()
if sys.argv[3] == "build":
    sys.exit()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
text = torch.from_numpy(tokens.parts["train"].astype("int64"))
times = []
for step in range(steps):
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
    times.append(time.time())
print(times[-1] - times[int(sys.argv[4])])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        throughput(place, pairs=given.pairs, steps=given.steps)
        start_up(place, pairs=given.pairs)
        late_resume(place, pairs=given.pairs)


def throughput(place: Path, *, pairs: int, steps: int) -> None:
    ratios = []
    for pair in range(pairs):
        plain = float(python(PLAIN_LOOP, CONFIG, steps, "train", WARM_UP_STEPS))
        run = place / f"throughput{pair}"
        train(
            run,
            f"--train.max_steps={steps}",
            *ADAMW,
            *NO_EVALUATION,
        )
        ours = step_times(run)
        ratios.append(plain / (ours[-1] - ours[WARM_UP_STEPS]))
    report("tokens a second: keepstep / plain loop", ratios)


def start_up(place: Path, *, pairs: int) -> None:
    fresh, resumed = [], []
    for pair in range(pairs):
        run = place / f"start{pair}"
        base = seconds(lambda: python(PLAIN_LOOP, CONFIG, 0, "build", 0))
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
