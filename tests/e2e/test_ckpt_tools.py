"""`ckpt pin|unpin|prune|diff|export|import`, each in a process of its own, on real runs."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from keepstep.store import list_checkpoints, load_state, verify
from tests.helpers.command import Session, environment, injecting, keepstep

DATA = "rank-00000.safetensors"
LOAD_HUGGING_FACE = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from keepstep.store import load_state
out, step = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(out)
saved = load_state(step, only="model")["model"]
found = model.state_dict()
assert found.keys() == saved.keys()
assert all(torch.equal(found[name], saved[name]) for name in saved)
tokenizer = AutoTokenizer.from_pretrained(out)
text = "License of this work"
ids = tokenizer(text, return_tensors="pt").input_ids
assert tokenizer.decode(ids[0]) == text
assert model(input_ids=ids).logits.isfinite().all()
assert model.config.use_cache
"""

# A limit of the system's own, on the size of a file: its errors are those of a full disk.
LITTLE_ROOM = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
from keepstep.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def made(config, tmp_path_factory):
    """A finished run with the checkpoints of steps 3, 4, 6, 8, 9 and 10, the last the best."""
    folder = tmp_path_factory.mktemp("tools") / "run"
    done = keepstep("train", config, f"--run.dir={folder}", "--checkpoint.keep_last_n=0")
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture
def run(made, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(made, folder, symlinks=True)
    return folder


def facts(folder: Path):
    return sorted((str(p), p.lstat().st_mtime_ns, p.lstat().st_size) for p in folder.rglob("*"))


def steps(run: Path) -> list[int]:
    return [entry.step for entry in list_checkpoints(run)]


def said(*words: object, code: int = 0) -> str:
    done = keepstep("ckpt", *words)
    assert done.returncode == code, done.stdout
    assert "Traceback" not in done.stdout
    return done.stdout


def test_prune_shows_a_plan_and_changes_nothing_without_apply(run):
    before = facts(run)
    text = said("prune", run, "--keep-last", 1)
    assert "step_3   goes" in text
    assert "step_10  stays  last 1, best, newest, newest whole" in text
    assert "nothing was changed (--apply does it)" in text
    assert facts(run) == before
    plan = json.loads(said("prune", run, "--keep-last", 1, "--json"))
    assert plan["applied"] is False
    assert facts(run) == before


def test_prune_with_apply_deletes_what_the_plan_said_and_frees_what_it_said(run):
    def size():
        return sum(p.stat().st_size for p in run.rglob("*") if p.is_file() and not p.is_symlink())

    said("pin", run, 3)
    words = ("prune", run, "--keep-last", 1, "--keep-every", 4, "--json")
    plan = json.loads(said(*words))
    before = size()
    done = json.loads(said(*words, "--apply"))
    assert steps(run) == [3, 4, 8, 10]
    assert done["bytes_freed"] == plan["bytes_freed"]
    words_in_locks = sum((run / "checkpoints" / n).stat().st_size for n in ("lock",))
    assert abs(before - size() - done["bytes_freed"]) <= words_in_locks
    assert [r["name"] for r in done["checkpoints"] if r["deleted"]] == ["step_6", "step_9"]
    assert all(verify(entry) == [] for entry in list_checkpoints(run))
    assert not list(run.rglob(".trash-*"))


def test_prune_takes_the_policy_of_the_run_and_another_where_it_is_given(run):
    assert "nothing would go" in said("prune", run)
    assert "step_9   stays  last 2" in said("prune", run, "--keep-last", 2)
    (run / "run.toml").unlink()
    assert "records no policy" in said("prune", run, code=2)
    assert "cannot be negative" in said("prune", run, "--keep-last", "-1", code=2)


def test_prune_removes_what_was_set_aside_only_if_asked(config, run):
    words = ["--checkpoint.keep_last_n=0", "--checkpoint.on_resume=6", "--train.max_steps=7"]
    done = keepstep("train", config, f"--run.dir={run}", *words, "--schedule.warmup_steps=1")
    assert done.returncode == 0, done.stdout
    aside = run / "checkpoints/aside"
    assert len(list(aside.iterdir())) == 3
    said("prune", run, "--apply")
    assert len(list(aside.iterdir())) == 3
    said("pin", run, "aside/step_9")
    said("prune", run, "--aside", "--apply")
    assert [p.name for p in aside.iterdir()] == ["step_9"]
    assert steps(run) == [3, 4, 6, 7]


def test_prune_keeps_an_older_whole_one_where_the_newest_is_damaged_inside(run):
    path = run / "checkpoints/step_10" / DATA
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    said("prune", run, "--keep-last", 1, "--apply")
    assert steps(run) == [9, 10]


def test_a_pin_names_what_is_missing_and_comes_off_again(run):
    assert "holds no checkpoint 'step_5'" in said("pin", run, "step_5", code=4)
    assert "is not pinned" in said("unpin", run, 3, code=4)
    assert said("pin", run, "best") == "step_10 is pinned\n"
    assert said("pin", run, "10") == "step_10 is pinned already\n"
    assert json.loads(said("unpin", run, "latest", "--json")) == {
        "name": "step_10",
        "pinned": False,
    }
    said("pin", run, 4)
    shutil.rmtree(run / "checkpoints/step_4")
    assert "it was gone" in said("unpin", run, "step_4")
    (run / "checkpoints/step_3/manifest.json").unlink()
    assert "cannot be pinned" in said("pin", run, 3, code=3)


def test_a_pin_and_a_locked_prune_beside_a_live_session(config, tmp_path):
    run = tmp_path / "run"
    words = ["--checkpoint.interval=1", "--checkpoint.keep_last_n=40", "--train.max_steps=100000"]
    with Session("train", config, f"--run.dir={run}", *words) as session:
        session.wait_for("save     step 2 ")
        pinned = json.loads(said("pin", run, "latest", "--json"))["name"]
        step = int(pinned.removeprefix("step_"))
        text = said("prune", run, "--keep-last", 1, "--apply", code=5)
        assert "is held by another session" in text
        # Far enough for retention to have met the pinned one and to have gone on.
        session.wait_for(f"save     step {step + 60} ")
        session.kill_group()
        session.process.wait()
    left = steps(run)
    assert step in left
    assert step + 1 not in left
    assert f"{pinned} " in said("ls", run)
    said("unpin", run, pinned)
    said("prune", run, "--keep-last", 1, "--keep-best", 1, "--apply")
    assert step not in steps(run)


def test_ls_says_why_each_is_kept(run):
    text = (run / "run.toml").read_text()
    (run / "run.toml").write_text(
        text.replace("keep_last_n = 0", "keep_last_n = 2")
        .replace("keep_every = 0", "keep_every = 4")
        .replace("keep_daily = 0", "keep_daily = 36500")
    )
    said("pin", run, 3)
    rows = {row["name"]: row["kept_because"] for row in json.loads(said("ls", run, "--json"))}
    assert rows == {
        "step_3": ["pinned"],
        "step_4": ["every 4"],
        "step_6": [],
        "step_8": ["every 4"],
        "step_9": ["last 2"],
        "step_10": ["last 2", "daily", "best", "newest"],
    }
    assert "last 2, daily, best, newest" in said("ls", run)


class TellPolicy:
    """A hook that prints by which policy the run's store keeps."""

    def on_run_start(self, run):
        print("policy", json.dumps(asdict(run.store.policy)), flush=True)


def test_the_run_keeps_by_what_its_config_says(config, tmp_path):
    policy = {
        "keep_last_n": 3,
        "keep_best_n": 4,
        "keep_every": 5,
        "keep_hourly": 6,
        "keep_daily": 7,
    }
    words = [f"--checkpoint.{name}={value}" for name, value in policy.items()]
    words += ["--run.hooks=tests.e2e.test_ckpt_tools:TellPolicy", "--train.max_steps=4"]
    done = keepstep("train", config, f"--run.dir={tmp_path / 'run'}", *words)
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("policy ")]
    assert json.loads(line.removeprefix("policy ")) == policy
    for name in ("keep_hourly", "keep_daily"):
        done = keepstep("config", "check", config, f"--checkpoint.{name}=-1")
        assert done.returncode == 2
        assert f"checkpoint.{name}" in done.stdout


def test_diff_of_equal_and_of_different_checkpoints(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run, other, symlinks=True)
    assert "the same state" in said("diff", run, 10, other / "step_10")
    assert "the same state" in said("diff", run, "latest", other / "checkpoints/best")
    text = said("diff", run, 9, 10, "--values", code=1)
    assert "model.model.norm.weight: values  at most" in text
    assert "counters.step: 9 -> 10" in text
    found = json.loads(said("diff", run, 9, 10, "--json", code=1))
    assert found["equal"] is False
    assert {t["max_abs"] for t in found["tensors"]} == {None}
    assert ["counters.step", 9, 10] in found["plain"]
    assert "holds no checkpoint 'step_5'" in said("diff", run, 9, other / "step_5", code=4)


def test_transformers_loads_the_exported_model_by_itself(run, tmp_path):
    out = tmp_path / "out"
    text = said("export", run, "best", out, "--format", "huggingface")
    assert "with the tokenizer of" in text
    modes = {oct(p.stat().st_mode & 0o777) for p in out.iterdir()}
    assert modes == {oct((run / "run.toml").stat().st_mode & 0o777)}
    words = [sys.executable, "-c", LOAD_HUGGING_FACE, out, run / "checkpoints/step_10"]
    done = subprocess.run(map(str, words), env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "is there already" in said("export", run, 9, out, "--format", "huggingface", code=2)


def test_a_model_is_exported_without_its_data(run, tmp_path):
    text = (run / "run.toml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("source = ")]
    lines.insert(lines.index("[data]") + 1, f'source = "{tmp_path}/gone"')
    (run / "run.toml").write_text("\n".join(lines))
    text = said("export", run, 10, tmp_path / "out", "--format", "huggingface")
    assert "without a tokenizer" in text
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 300
    assert not (tmp_path / "out/tokenizer.json").exists()


def test_training_starts_from_an_exported_model(config, run, tmp_path):
    out = tmp_path / "out"
    said("export", run, "best", out, "--format", "huggingface")
    new = tmp_path / "new"
    words = [f"--run.dir={new}", f"--model.pretrained={out}", "--train.max_steps=3"]
    done = keepstep("train", config, *words, "--evaluation.interval=1")
    assert done.returncode == 0, done.stdout
    first = float(done.stdout.split("valid_loss ")[1].split()[0])
    best = next(r for r in json.loads(said("ls", run, "--json")) if "best" in r["roles"])
    assert abs(first - best["metrics"]["valid_loss"]) < 0.1, "it began anew, near log(300) = 5.7"


@pytest.mark.parametrize("format", ["huggingface", "dcp", "pth", "safetensors"])
def test_weights_go_out_and_come_back_as_a_checkpoint(run, tmp_path, format):
    import torch

    out, back = tmp_path / f"out.{format}", tmp_path / "back"
    before = facts(run)
    said("export", run, 10, out, "--format", format)
    assert facts(run) == before
    text = said("import", out, back, "--step", 5)
    assert "weights only: no optimizer state" in text
    assert ("not taken over: optimizer" in text) == (format in ("dcp", "pth"))
    assert said("verify", back) == "step_5: whole, every byte\n"
    found = load_state(back / "checkpoints/step_5")
    saved = load_state(run / "checkpoints/step_10", only="model")["model"]
    assert list(found) == ["model"]
    assert found["model"].keys() == saved.keys()
    assert all(torch.equal(found["model"][name], saved[name]) for name in saved)


def test_training_refuses_to_continue_from_imported_weights_and_says_what_they_are(
    config, run, tmp_path
):
    out, back = tmp_path / "w.safetensors", tmp_path / "back"
    said("export", run, 10, out, "--format", "safetensors")
    said("import", out, back)
    before = facts(back / "checkpoints/step_0")
    done = keepstep("train", config, f"--run.dir={back}")
    assert done.returncode == 2, done.stdout
    assert "weights only, imported from" in done.stdout
    assert facts(back / "checkpoints/step_0") == before
    assert "model.pretrained" in said("import", "--help")
    assert "is a run already" in said("import", out, run, code=2)
    assert "is a run already" in said("import", out, back, code=2)
    assert "there is no" in said("import", tmp_path / "nothing.pth", tmp_path / "x", code=4)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("format", ["huggingface", "dcp", "pth", "safetensors"])
def test_nothing_is_exported_of_what_is_damaged_or_into_the_checkpoints(run, tmp_path, format):
    inside = run / "checkpoints/step_11"
    assert "only the store writes to" in said("export", run, 10, inside, "--format", format, code=2)
    path = run / "checkpoints/step_10" / DATA
    content = bytearray(path.read_bytes())
    names = {t.name: t for t in list_checkpoints(run)[-1].manifest.tensors}
    content[names["model.model.norm.weight"].pieces[0].start] ^= 1
    path.write_bytes(content)
    text = said("export", run, 10, tmp_path / "out", "--format", format, code=3)
    assert "model.model.norm.weight" in text
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_kill_in_the_middle_of_an_export_leaves_no_name(run, tmp_path):
    out = tmp_path / "place/out.pth"
    extra = injecting(at=1, action="kill", only=f"write {out.parent}")
    done = keepstep("ckpt", "export", run, 10, out, "--format", "pth", extra=extra)
    assert done.returncode == -9, done.stdout
    assert not out.exists()
    assert [p.name[:9] for p in out.parent.iterdir()] == [".out.pth-"]
    said("export", run, 10, out, "--format", "pth")
    assert out.exists()


@pytest.mark.parametrize("format", ["huggingface", "dcp", "pth", "safetensors"])
def test_a_disk_that_takes_no_more_is_a_plain_error_and_leaves_nothing(run, tmp_path, format):
    (tmp_path / "place").mkdir()
    words = ["ckpt", "export", run, 10, tmp_path / "place/out", "--format", format]
    command = [sys.executable, "-c", LITTLE_ROOM, *map(str, words)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "error: " in done.stderr
    assert "too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "place").iterdir()) == []
