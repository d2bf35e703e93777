"""The commands that only read: quick, without torch, and plain about what they find."""

import json
import os
import shutil
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
        (["train", "missing.toml"], 2, "there is no config file missing.toml"),
        (["ckpt"], 2, "usage: keepstep ckpt"),
        (["ckpt", "list"], 2, "there is no command `keepstep ckpt list`"),
        (["ckpt", "ls"], 2, "required"),
        (["ckpt", "ls", "/nowhere"], 4, "there is no folder /nowhere"),
        (["ckpt", "ls", str(ROOT)], 4, "holds no checkpoints"),
        (["train", str(DEBUG), "--quite"], 2, "no flag --quite; did you mean `--quiet`?"),
        (["train", str(DEBUG), "--quiet=1"], 2, "--quiet takes no value"),
        (["train", str(DEBUG), "--bogus"], 2, "--bogus: unknown key"),
        (["train", str(DEBUG), "--hepl"], 2, "did you mean `--help`?"),
        (["train", str(DEBUG), "--train.max_stpes"], 2, "did you mean `max_steps`?"),
        (["train", str(DEBUG), "--train.max_steps"], 2, "needs a value"),
        (["config", "show", str(DEBUG), "--jsn"], 2, "did you mean `--json`?"),
        (["config", "check"], 2, "needs a config file first"),
        (["config", "sow", "x"], 2, "there is no command `keepstep config sow`"),
        (["config", "check", str(DEBUG), "--train.max_stpes=1"], 2, "did you mean `max_steps`?"),
        (["language", "prepare", "/nowhere.txt", "-o", "/tmp/x"], 2, "no text file /nowhere.txt"),
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
    from tests.helpers.tiny import prepared_data

    def train(change, *flags):
        folder = tmp_path / f"data{len(list(tmp_path.iterdir()))}"
        shutil.copytree(prepared_data(), folder)
        change(folder)
        done = keepstep(
            "train", config, f"--data.source={folder}", f"--run.dir={tmp_path / 'run'}", *flags
        )
        assert done.returncode == 2, done.stdout
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
    assert "200 is less than the data's vocabulary of 300" in train(
        edit(), "--model.vocab_size=200"
    )
    assert "at least 100000 are needed" in train(edit(), "--train.global_batch=100000")
    assert "is not a folder of prepared tokens" in train(lambda f: (f / "tokens.json").unlink())
    assert "train.bin is missing" in train(lambda f: (f / "train.bin").unlink())


def test_the_help_of_train_says_how_every_key_is_written():
    shown = keepstep("train", "--help", extra={"COLUMNS": "100"}).stdout
    assert "[model] takes every key of the model library's own config too" in shown
    assert "--run.hooks \"['a:A', 'b:B']\"" in shown
    # What a window must say has no default.
    window = shown[shown.index("--checkpoint.dyn_ckpt_window.start") :]
    window = window[: window.index("nonfinite options")]
    assert window.count("(required)") == 2
    assert "default: 0" not in window
    # Keys of what is shown are keys of the config: each is taken.
    for flag in ("--run.hooks=['keepstep.run.hooks:Hook']", "--model.hidden_size=256"):
        assert keepstep("config", "check", DEBUG, flag).returncode == 0


def test_the_help_of_prepare_wants_at_least_one_file():
    shown = keepstep("language", "prepare", "--help", extra={"COLUMNS": "100"}).stdout
    assert "prepare [-h] [OPTIONS] FILE [FILE ...]" in shown
    assert "(at least one)" in shown
    assert "(default: )" not in shown


@pytest.mark.parametrize("closing", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_closed_terminal_ends_no_command(untouched, closing, tmp_path):
    log = tmp_path / "log"
    for words in ("--help", "train --help", f"ckpt ls {untouched}", f"config show {DEBUG}"):
        # The code is written by the shell: the command itself has nowhere to write.
        script = f"{KEEPSTEP} {words} {closing}; echo $? >> {log}"
        done = subprocess.run(
            ["sh", "-c", script], env=environment(), capture_output=True, text=True, timeout=60
        )
        assert done.stderr == "", words
    assert log.read_text().split() == ["0"] * 4


def test_a_run_whose_terminal_is_closed_writes_nothing_of_it_into_its_files(config, tmp_path):
    script = f"{KEEPSTEP} train {config} --run.dir={tmp_path} --train.max_steps=4 <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", script], env=environment(), timeout=90)
    assert done.returncode == 0
    assert keepstep("ckpt", "verify", tmp_path).returncode == 0
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines].count("step") == 4


def test_a_full_disk_under_the_output_asks_for_room_and_continues_nothing(untouched):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [str(KEEPSTEP), "ckpt", "ls", str(untouched)],
            stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), timeout=60,
        )  # fmt: skip
    assert done.returncode == 1
    assert "Make room, then run the same command again." in done.stderr


def test_a_terminal_that_lacks_a_letter_is_shown_it_escaped(tmp_path):
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    done = keepstep("config", "show", DEBUG, "--run.name=h\u00e9", extra=ascii_only)
    assert done.returncode == 0, done.stdout
    assert 'name = "h\\xe9"' in done.stdout


def test_verify_names_the_file_that_is_at_fault(untouched, tmp_path):
    run = shutil.copytree(untouched, tmp_path / "run", symlinks=True)
    (cut,) = (run / "step_3").glob("*.safetensors")
    cut.write_bytes(cut.read_bytes()[:10])
    (gone,) = (run / "step_6").glob("*.safetensors")
    gone.unlink()
    (run / "step_9" / "manifest.json").unlink()
    done = keepstep("ckpt", "verify", run)
    assert done.returncode == 3
    lines = done.stdout.splitlines()
    of = {name: lines[lines.index(f"{name}: damaged") + 1] for name in ("step_3", "step_6")}
    assert of["step_3"].startswith(f"  {cut.name}: is 10 bytes, not")
    assert of["step_6"] == f"  {gone.name}: is missing"
    assert "  manifest.json: is missing" in lines


def test_more_workers_than_cores_are_no_warning(config, tmp_path):
    workers = (os.cpu_count() or 1) + 1
    flags = (f"--data.workers={workers}", f"--run.dir={tmp_path}", "--train.max_steps=3")
    done = keepstep("train", config, *flags)
    assert done.returncode == 0, done.stdout
    assert "Warning" not in done.stdout
