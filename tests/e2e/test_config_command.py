"""`keepstep config` as a person types it: through the installed command only."""

import json
import subprocess
import time
import tomllib

import pytest

from tests.helpers.command import KEEPSTEP, ROOT, environment, keepstep

DEBUG = ROOT / "configs/language/debug.toml"


def split(*words):
    """Run the command; the two streams apart, because only one of them is data."""
    return subprocess.run(
        [str(KEEPSTEP), *map(str, words)],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
        timeout=60,
    )


def test_show_prints_toml_that_shows_the_same_again(tmp_path):
    flags = ["--train.max_steps", 50, "--model.hidden_size=64", "--run.hooks=['a:B']",
             "--checkpoint.dyn_ckpt_window.start=0", "--checkpoint.dyn_ckpt_window.stop=8",
             "--model.rope_parameters.rope_theta=1e4"]  # fmt: skip
    shown = split("config", "show", DEBUG, *flags)
    assert shown.returncode == 0, shown.stderr
    tree = tomllib.loads(shown.stdout)
    assert tree["train"]["max_steps"] == 50
    assert tree["model"]["hidden_size"] == 64
    assert tree["model"]["rope_parameters"] == {"rope_theta": 1e4}
    assert tree["checkpoint"]["dyn_ckpt_window"]["stop"] == 8
    (tmp_path / "again.toml").write_text(shown.stdout)
    again = split("config", "show", tmp_path / "again.toml")
    assert again.stdout == shown.stdout
    as_json = json.loads(split("config", "show", DEBUG, *flags, "--json").stdout)
    assert as_json["run"]["hooks"] == ["a:B"]


def test_check_says_everything_that_is_wrong_and_exits_with_2(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(
        "[train]\nmax_stpes = 10\ncompile = 1\n[optimizer]\nrate = nan\n[chekpoint]\nx = 1\n"
    )
    done = split("config", "check", path, "--schedule.floor=2")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.replace(f"{path}", "c.toml").splitlines() == [
        "error: c.toml:2: train.max_stpes: unknown key; did you mean `max_steps`?",
        "c.toml:3: train.compile: must be true or false, not 1",
        "c.toml:5: optimizer.rate: must be a finite number, not nan",
        "c.toml:6: chekpoint: unknown section; did you mean `checkpoint`?",
        "--schedule.floor: must be at most 1, not 2.0",
    ]
    as_json = split("config", "check", path, "--json")
    assert as_json.returncode == 2
    report = json.loads(as_json.stdout)
    assert report["ok"] is False
    assert len(report["problems"]) == 4


def test_check_of_a_config_that_is_right_says_ok():
    done = split("config", "check", DEBUG)
    assert (done.returncode, done.stderr) == (0, "")
    assert "OK" in done.stdout
    assert json.loads(split("config", "check", DEBUG, "--json").stdout)["ok"] is True


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[train\n", "not valid TOML"),
        (b"[train]\nmax_steps = 1\nmax_steps = 2\n", "line 3"),
        (b"\xff\xfe", "cannot be read as text"),
        (b'extends = "other.toml"\n', "there is no config file"),
        (b"extends = 3\n", "must be the name of a file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_without_a_traceback(tmp_path, text, said):
    path = tmp_path / "c.toml"
    path.write_bytes(text)
    done = split("config", "check", path)
    assert done.returncode in (2, 4)
    assert said in done.stderr
    assert "c.toml" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_text_of_a_config_is_utf8_whatever_the_locale(tmp_path):
    path = tmp_path / "c.toml"
    path.write_bytes(b'\xef\xbb\xbf[data]\nsource = "\xc3\xa9"\n')
    latin = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "utf-8",
    }
    assert 'source = "é"' in keepstep("config", "show", path, extra=latin).stdout


def test_train_refuses_a_wrong_config_before_it_makes_a_folder(tmp_path):
    done = keepstep("train", DEBUG, "--train.max_stpes=1", cwd=tmp_path)
    assert done.returncode == 2
    assert "--train.max_stpes: unknown key; did you mean `max_steps`?" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_key_of_the_config_with_its_words():
    done = split("train", "--help")
    assert done.returncode == 0
    config = tomllib.loads(split("config", "show", DEBUG).stdout)
    for section in ("run", "train", "optimizer", "schedule", "evaluation", "checkpoint", "data"):
        for name in config[section]:
            assert f"--{section}.{name} " in done.stdout
    assert "--checkpoint.dyn_ckpt_window.start INT" in done.stdout
    assert "Peak learning rate; the schedule multiplies it." in done.stdout


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["ckpt", "ls", "--help"]])
def test_help_comes_at_once(words):
    # The best of three, because other tests run beside this one; importing torch takes seconds.
    best = min(timed(*words) for _ in range(3))
    assert best < 1.0


def timed(*words):
    before = time.monotonic()
    assert split(*words).returncode == 0
    return time.monotonic() - before
