"""What people use of a schedule-free run is what was evaluated, and `best` means."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from keepstep.store import list_checkpoints, load_state
from keepstep.tasks.language.generate import _continue, generate_text
from keepstep.tasks.language.model import build_decoder
from keepstep.tasks.registry import build_task, load_task_config
from keepstep.tasks.task import DataShare
from tests.helpers.command import events, keepstep, link


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("averaged") / "run"
    flags = ["--optimizer.name=schedulefree_adamw", "--schedule.name=constant"]
    flags += ["--optimizer.rate=0.1", "--train.max_steps=6", "--evaluation.interval=3"]
    done = keepstep("train", config, f"--run.dir={folder}", *flags)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.mark.parametrize(
    ("format", "name"), [("safetensors", ""), ("huggingface", "model.safetensors")]
)
def test_exported_weights_have_the_loss_that_made_them_the_best(run, tmp_path, format, name):
    out = tmp_path / "out"
    done = keepstep("ckpt", "export", run, "best", out, "--format", format, "--json")
    assert done.returncode == 0, done.stdout
    best = link(run / "checkpoints", "best")
    assert json.loads(done.stdout)["checkpoint"] == best
    task = build_task(load_task_config(str(run / "run.toml"), []).config, DataShare())
    model = task.build_model()
    model.load_state_dict(load_file(out / name))
    (told,) = [e for e in events(run, "evaluation") if best == f"step_{e['step']}"]
    assert task.evaluate(model, lambda: False) == told["metrics"]


def test_text_is_written_with_the_average(run):
    text, used = generate_text(
        run, checkpoint="latest", prompt="License", max_tokens=12, temperature=0, seed=0
    )
    config = load_task_config(str(run / "run.toml"), []).config
    task = build_task(config, DataShare())
    tokenizer = Tokenizer.from_file(str(task.tokens.folder / "tokenizer.json"))
    ids = tokenizer.encode("License", add_special_tokens=False).ids
    (entry,) = [e for e in list_checkpoints(run) if e.path.name == used]
    model = build_decoder(config.model, vocab_size=task.tokens.vocab_size, sequence_length=8)
    model.load_state_dict(load_state(entry.path, only="model")["model"])
    trained = _continue(model, ids, max_tokens=12, temperature=0, seed=0)
    assert text != tokenizer.decode([*ids, *trained])
    z = load_state(entry.path)["optimizer"]["schedulefree_adamw"]["state"]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.lerp_(z[name]["z"], 1 - 1 / 0.9)
    averaged = _continue(model, ids, max_tokens=12, temperature=0, seed=0)
    assert text == tokenizer.decode([*ids, *averaged])
