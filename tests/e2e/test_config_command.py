"""`keepstep config` as a person types it: through the installed command only."""

import json
import subprocess
import sys
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
    assert done.returncode == 2
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


WRONG_ON_THIS_MACHINE = [
    ("--model.num_attention_heads=3", "3 does not divide model.hidden_size (16)"),
    ("--model.num_key_value_heads=3", "3 does not divide model.num_attention_heads (2)"),
    ("--model.hidden_size=-5", "must be at least 1, not -5"),
    ("--model.vocab_size=5", "5 is less than the data's vocabulary of 300"),
    ("--model.pretrained={here}/nothing", "holds no config.json"),
    ("--run.hooks=nope:No", "there is no module nope"),
    ("--run.hooks=tests.helpers.nope:No", "there is no module tests.helpers.nope"),
    ("--run.hooks=tests.helpers.hooks:Akt", "did you mean `Act`?"),
    ("--data.source={here}/nothing", "is not a folder of prepared tokens"),
    ("--data.source={here}/file", "is not a folder of prepared tokens"),
    ("--data.workers=1000000", "must be at most 4,096"),
    ("--train.global_batch=100000", "at least 100000 are needed"),
    ("--run.dir={here}/file", "file is a file, not a folder"),
    ("--run.dir={here}/file/deeper", "file is a file, not a folder"),
    ("--run.dir={here}/broken", "broken is a link to nothing"),
    ("--run.dir={here}/" + 256 * "x", "longer than 255 bytes"),
    ("--checkpoint.dir={here}/file", "file is a file, not a folder"),
]


@pytest.fixture
def here(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").symlink_to(tmp_path / "gone")
    return tmp_path


@pytest.mark.parametrize(("flag", "said"), WRONG_ON_THIS_MACHINE)
def test_check_finds_what_does_not_fit_this_machine(config, here, flag, said):
    flag = flag.format(here=here)
    done = split("config", "check", config, flag)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    # The key that is to be mended stands there, and nothing else is found wrong.
    assert flag.partition("=")[0] in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_check_says_everything_of_the_machine_at_once_and_train_refuses_it_too(config, here):
    flags = [f"--run.dir={here}/file", "--run.hooks=nope:No", "--data.source=/nowhere"]
    checked = split("config", "check", config, *flags)
    assert len(checked.stderr.splitlines()) == 3
    before = sorted(here.rglob("*"))
    trained = split("train", config, *flags)
    assert (trained.returncode, trained.stderr) == (2, checked.stderr)
    assert sorted(here.rglob("*")) == before


def test_check_finds_a_cache_that_is_a_file(here):
    done = split("config", "check", DEBUG, f"--data.cache={here}/file")
    assert done.returncode == 2
    assert "--data.cache: " in done.stderr
    done = split("config", "check", DEBUG, f"--data.cache={here}/new", "--model.vocab_size=2047")
    assert done.returncode == 2
    assert "less than the data's vocabulary of 2,048" in done.stderr
    # Looking makes nothing.
    assert not (here / "new").exists()


def test_check_says_whether_there_is_a_device_as_train_does(config, tmp_path):
    flags = ("--train.device=cuda", f"--run.dir={tmp_path / 'run'}", "--train.max_steps=4")
    checked = split("config", "check", config, *flags)
    trained = split("train", config, *flags)
    assert checked.returncode == trained.returncode
    assert ("train.device" in checked.stderr) == (trained.returncode == 2)


def test_check_neither_imports_a_hook_nor_torch_and_says_what_it_does_not_look_at(here):
    (here / "loud.py").write_text(
        "print('imported')\nimport torch\ntry:\n    class Loud: ...\nfinally: ...\n"
    )
    code = "import sys\nfrom keepstep.cli.main import main\n"
    code += "status = main(sys.argv[1:])\nassert 'torch' not in sys.modules\nsys.exit(status)"
    words = ["config", "check", str(DEBUG), "--run.hooks=loud:Loud"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=here, env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "imported" not in done.stdout
    assert "not looked at: whether the model can be built" in done.stdout
    assert "what the hooks' code does" in done.stdout
    facts = json.loads(split("config", "check", DEBUG, "--json").stdout)
    assert "the bytes of the data" in facts["not_looked_at"]


def test_a_missing_config_is_a_config_error_in_json_too(tmp_path):
    done = split("config", "check", tmp_path / "nope.toml", "--json")
    assert done.returncode == 2
    report = json.loads(done.stdout)
    assert report["ok"] is False
    assert "there is no config file" in report["problems"][0]


def test_a_hook_that_raises_as_it_is_made_is_one_clear_error_and_leaves_nothing(config, here):
    (here / "bad.py").write_text(
        "class Bad:\n    def __init__(self):\n        raise ValueError(7)\n"
    )
    (here / "worse.py").write_text("1 / 0\nclass Worse: ...\n")
    for hook, said in (("bad:Bad", "ValueError: 7 ("), ("worse:Worse", "ZeroDivisionError")):
        words = ("train", config, f"--run.hooks={hook}", f"--run.dir={here / 'run'}")
        done = keepstep(*words, cwd=here)
        assert done.returncode == 2, done.stdout
        assert f"the hook {hook!r} of run.hooks cannot be made: {said}" in done.stdout
        assert f"{hook.partition(':')[0]}.py:" in done.stdout
        assert "Traceback" not in done.stdout
        assert not (here / "run").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--schedule.name=wsd", "--schedule.decay_steps=500"],
            "--schedule.decay_steps: 500 steps of decay and 0 of warm-up leave no room",
        ),
        (
            ["--checkpoint.dyn_ckpt_window.start=5"],
            "--checkpoint.dyn_ckpt_window.stop: is missing, and has no default"
            " (beside --checkpoint.dyn_ckpt_window.start)",
        ),
        (["--run.hooks="], "--run.hooks: must be a list ([] is an empty one), not ''"),
        (["--train.max-steps=0"], "--train.max-steps: must be at least 1, not 0"),
    ],
)
def test_the_key_that_is_to_be_mended_is_the_one_that_is_named(flags, said):
    done = split("config", "check", DEBUG, *flags)
    assert done.stderr.startswith(f"error: {said}")
    assert len(done.stderr.splitlines()) == 1


WITHOUT = """
import sys
sys.modules["pytorch_optimizer"] = sys.modules["schedulefree"] = None
from keepstep.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("name", "package"), [("lion", "pytorch_optimizer"), ("schedulefree_adamw", "schedulefree")]
)
def test_an_optimizer_whose_package_is_missing_is_told_with_what_to_install(config, name, package):
    flags = [f"--optimizer.name={name}", "--schedule.name=constant"]
    words = [sys.executable, "-c", WITHOUT, "config", "check", str(config), *flags]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stdout
    (line,) = done.stderr.splitlines()
    assert f"--optimizer.name: {name!r} needs the package {package}, which is not" in line
    assert line.endswith("pip install keepstep[optim]")
