"""The commands that only read: quick, without torch, and plain about what they find."""

import json
import subprocess
import sys

import pytest

from tests.helpers.command import KEEPSTEP, ROOT, environment, keepstep

DEBUG = ROOT / "configs/language/debug.toml"


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["train", "--help"],
        ["train", str(DEBUG), "--help"],
        ["ckpt", "--help"],
        ["ckpt", "ls", "RUN"],
        ["ckpt", "ls", "RUN", "--json"],
        ["ckpt", "show", "RUN", "best"],
        ["ckpt", "verify", "RUN"],
        ["ckpt", "prune", "RUN"],
        ["ckpt", "diff", "RUN", "best", "latest"],
        ["ckpt", "export", "--help"],
        ["ckpt", "import", "--help"],
        ["config", "check", str(DEBUG), "--train.max_steps=7"],
        ["config", "show", str(DEBUG)],
        ["language", "--help"],
        ["language", "generate", "--help"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_commands_that_read_import_no_torch(untouched, words):
    code = """
import sys
from keepstep.cli.main import main
code = main(sys.argv[1:])
heavy = [name for name in ("torch", "transformers", "tokenizers") if name in sys.modules]
sys.exit(f"imported {heavy}" if heavy else code)
"""
    given = [str(untouched) if word == "RUN" else word for word in words]
    command = [sys.executable, "-c", code, *given]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "usage: keepstep COMMAND"),
        (["trian"], 2, "did you mean `train`?"),
        (["train"], 2, "needs a config file first"),
        (["train", "missing.toml"], 4, "there is no config file missing.toml"),
        (["ckpt"], 2, "usage: keepstep ckpt"),
        (["ckpt", "list"], 2, "there is no command `keepstep ckpt list`"),
        (["ckpt", "ls"], 2, "required"),
        (["ckpt", "ls", "/nowhere"], 4, "there is no folder /nowhere"),
        (["ckpt", "ls", str(ROOT)], 4, "holds no checkpoints"),
        (["config", "check"], 2, "needs a config file first"),
        (["config", "sow", "x"], 2, "there is no command `keepstep config sow`"),
        (["config", "check", str(DEBUG), "--train.max_stpes=1"], 2, "did you mean `max_steps`?"),
        (["language", "prepare", "/nowhere.txt", "-o", "/tmp/x"], 4, "no text file /nowhere.txt"),
        (["language", "generate", str(ROOT), "--prompt", "x"], 4, "is not the folder of a run"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else None,
)
def test_a_command_that_cannot_be_used_says_what_to_do(words, code, said):
    done = keepstep(*words)
    assert done.returncode == code, done.stdout
    assert said in done.stdout
    assert "Traceback" not in done.stdout


def test_ls_shows_steps_roles_metrics_and_damage(untouched, tmp_path):
    import shutil

    run = tmp_path / "run"
    shutil.copytree(untouched, run, symlinks=True)
    (run / "step_6" / "manifest.json").unlink()
    done = keepstep("ckpt", "ls", run)
    assert done.returncode == 0
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "latest" in lines["step_10"]
    assert "valid_loss" in lines["step_10"]
    assert "damaged: manifest.json is missing" in lines["step_6"]
    rows = {row["name"]: row for row in json.loads(keepstep("ckpt", "ls", run, "--json").stdout)}
    assert rows["step_6"]["complete"] is False
    assert rows["step_10"]["roles"][0] == "latest"
    assert keepstep("ckpt", "verify", run).returncode == 3


def test_show_finds_a_checkpoint_by_name_step_and_role(untouched):
    for name in ("step_10", "10", "latest"):
        done = keepstep("ckpt", "show", untouched, name)
        assert done.returncode == 0, done.stdout
        assert "step         10" in done.stdout
        assert "model.model.embed_tokens.weight" in done.stdout
    manifest = json.loads(keepstep("ckpt", "show", untouched, "10", "--json").stdout)
    assert manifest["samples"] == 40
    missing = keepstep("ckpt", "show", untouched, "step_5")
    assert missing.returncode == 4
    assert "step_3" in missing.stdout


def test_the_output_survives_a_reader_that_goes_away(untouched):
    command = [str(KEEPSTEP), "ckpt", "show", str(untouched), "10", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def test_generate_writes_text_that_depends_on_seed_and_checkpoint(untouched):
    words = ("language", "generate", untouched, "--prompt", "License", "--max-tokens", 12)
    one, again = keepstep(*words), keepstep(*words)
    assert one.returncode == 0, one.stdout
    assert one.stdout.startswith("License")
    assert one.stdout == again.stdout
    other = keepstep(*words, "--seed", 5, "--checkpoint", "3", "--json")
    found = json.loads(other.stdout)
    assert found["checkpoint"] == "step_3"
    assert found["text"].strip() != one.stdout.strip()
    greedy = keepstep(*words, "--temperature", 0)
    assert greedy.returncode == 0, greedy.stdout
    assert keepstep(*words, "--max-tokens", 0).returncode == 2


def test_prepared_data_that_are_wrong_are_clear_errors(config, tmp_path):
    import shutil

    from tests.helpers.tiny import prepared_data

    def train(change, *flags):
        folder = tmp_path / f"data{len(list(tmp_path.iterdir()))}"
        shutil.copytree(prepared_data(), folder)
        change(folder)
        done = keepstep(
            "train", config, f"--data.source={folder}", f"--run.dir={tmp_path / 'run'}", *flags
        )
        assert done.returncode in (2, 4), done.stdout
        assert "Traceback" not in done.stdout
        return done.stdout

    def edit(**changes):
        def change(folder):
            path = folder / "tokens.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

        return change

    assert "the type is 'float32'; it must be one of uint16, uint32" in train(edit(type="float32"))
    assert "tokens of type uint32 are" in train(edit(type="uint32"))
    assert "beyond the vocabulary of 100" in train(edit(vocab_size=100))
    assert "the data's has 300" in train(edit(), "--model.vocab_size=200")
    assert "at least 100000 are needed" in train(edit(), "--train.global_batch=100000")
    assert "is not a folder of prepared tokens" in train(lambda f: (f / "tokens.json").unlink())
    assert "train.bin is missing" in train(lambda f: (f / "train.bin").unlink())


def test_a_command_without_an_output_says_nothing_and_fails_at_nothing():
    command = f"'{KEEPSTEP}' --help >&- 2>/dev/null"
    assert subprocess.run(command, shell=True, env=environment()).returncode == 0


def test_a_flag_without_a_value_that_is_nearly_one_gets_a_suggestion(config):
    done = keepstep("train", config, "--quite")
    assert done.returncode == 2
    assert "did you mean `--quiet`?" in done.stdout
