"""What the trainer costs on two gloo ranks over a plain loop of FSDP2: ratios within one run.

    .venv/bin/python -m benchmarks.ranks [--turns 20] [--section.key=value ...]

1. Tokens a second of `keepstep train` on two ranks against a plain loop of `fully_shard` on the
   same model, data and batch. Both run at once and take turns, as in `training.py`.
2. The one agreement a step: seconds of a call, where no rank waits for the other's work.

Each rank has one thread: two ranks fill the two cores that this is meant for.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile

from benchmarks.training import (
    ADAMW,
    CONFIG,
    KEEPSTEP,
    NO_EVALUATION,
    ROOT,
    Side,
    Turns,
    compare,
    environment,
    report,
)

TURNS_HOOK = "--run.hooks=['benchmarks.ranks:TurnsOfFirst']"
STEP_SECONDS = 0.1

PLAIN_LOOP = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from benchmarks.ranks import TurnsOfFirst
from transformers import AutoConfig, AutoModelForCausalLM
from keepstep.tasks.registry import load_task_config
from keepstep.tasks.language.task import data_folder
from keepstep.tasks.language.tokens import open_tokens

config = load_task_config(sys.argv[1], []).config
length = config.data.sequence_length
tokens = open_tokens(data_folder(config.data))
dist.init_process_group("gloo")
batch = config.train.global_batch // dist.get_world_size()
torch.manual_seed(1)
model = AutoModelForCausalLM.from_config(
    AutoConfig.for_model(
        config.model.architecture, vocab_size=tokens.vocab_size, **config.model.settings
    ),
    attn_implementation=config.model.attention,
)
model.train()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for block in model.model.layers:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
turns = TurnsOfFirst()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
text = torch.from_numpy(tokens.parts["train"].astype("int64"))
torch.manual_seed(dist.get_rank())
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

AGREEMENTS = """
import time
from keepstep.config.schema import DistributedConfig
from keepstep.distributed.agree import StepFacts, agree
from keepstep.distributed.group import open_group

with open_group(DistributedConfig(), device="cpu") as group:
    for _ in range(10):
        seconds = []
        for _ in range(200):
            started = time.perf_counter()
            agree(group, StepFacts(loss=1.0))
            seconds.append(time.perf_counter() - started)
        if group.rank == 0:
            print(sum(seconds) / len(seconds), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=20)
    given, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        run = [f"--run.dir={folder}/run", "--train.max_steps=100000", TURNS_HOOK]
        ours = [str(KEEPSTEP), "train", str(CONFIG), *run, *ADAMW, *NO_EVALUATION, *flags]
        plain = [sys.executable, "-c", PLAIN_LOOP, str(CONFIG)]
        with World(ours) as ours_side, World(plain) as plain_side:
            compare(ours_side.first, plain_side.first, turns=given.turns)
    agreements()


def agreements() -> None:
    command = [sys.executable, "-c", AGREEMENTS]
    places = places_of_two()
    with start(command, places[1]):
        done = subprocess.run(
            command, cwd=ROOT, env=environment() | places[0], capture_output=True, text=True
        )
    seconds = [float(line) for line in done.stdout.splitlines()]
    report("milliseconds of an agreement", [1000 * value for value in seconds])
    report(f"share of a step of {STEP_SECONDS} s", [value / STEP_SECONDS for value in seconds])


class World:
    """Two ranks of a command; the first takes turns, and the other waits for it in a collective."""

    def __init__(self, command: list[str]) -> None:
        places = places_of_two()
        self._other = start(command, places[1])
        self.first = Side(command, places[0])

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *error: object) -> None:
        self._other.kill()
        self._other.wait()
        self.first.__exit__(*error)


class TurnsOfFirst(Turns):
    """The turns of the first rank."""

    def __init__(self) -> None:
        self._is_first = os.environ["RANK"] == "0"
        if self._is_first:
            super().__init__()

    def step(self) -> None:
        if self._is_first:
            super().step()


def start(command: list[str], place: dict[str, str]) -> subprocess.Popen[bytes]:
    env = environment() | place
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)


def places_of_two() -> list[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        {**world, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"} for rank in ("0", "1")
    ]


if __name__ == "__main__":
    main()
