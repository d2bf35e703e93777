"""Configs: everything wrong is said at once, with its place."""

import re
from pathlib import Path

import pytest

from keepstep.config.resolved import checkpoint_folder, dump_toml, must_match, run_folder
from keepstep.config.validate import flatten
from keepstep.errors import ConfigError
from keepstep.tasks.registry import load_task_config

CONFIGS = sorted((Path(__file__).parents[3] / "configs").rglob("*.toml"))


def load(tmp_path, text, *flags):
    path = tmp_path / "c.toml"
    path.write_text(text)
    return load_task_config(path, flags).config


def problems(tmp_path, text, *flags):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text, *flags)
    return [line.replace(f"{tmp_path}/", "") for line in error.value.problems]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_that_comes_along_loads(path):
    load_task_config(path, [])


def test_all_problems_are_said_at_once_with_line_and_suggestion(tmp_path):
    text = """\
[train]
max_stpes = 10
global_batch = "16"
grad_clip = nan

[optimizer]
name = "adam"
rate = 0

[chekpoint]
interval = 1

[model]
hidden_sizee = 3
"""
    found = problems(tmp_path, text, "--schedule.floor=2", "--run.grace=soon")
    assert found == [
        "c.toml:2: train.max_stpes: unknown key; did you mean `max_steps`?",
        "c.toml:3: train.global_batch: must be a whole number, not '16'",
        "c.toml:4: train.grad_clip: must be a finite number, not nan",
        "c.toml:7: optimizer.name: must be 'adamw', 'sgd', 'muon', 'lion' or 'schedulefree_adamw',"
        " not 'adam'; did you mean `adamw`?",
        "c.toml:8: optimizer.rate: must be greater than 0, not 0.0",
        "c.toml:10: chekpoint: unknown section; did you mean `checkpoint`?",
        "c.toml:14: model.hidden_sizee: the config of llama has no such key;"
        " did you mean `hidden_size`?",
        "--schedule.floor: must be at most 1, not 2.0",
        '--run.grace: must be a duration such as "90s", "15min", "2h" or "1d12h", not \'soon\'',
    ]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--train.max_steps=ten",), "must be a whole number, not 'ten'"),
        (("--train.max_steps=1e3",), "must be a whole number, not 1e3; write 1000"),
        (("--train.max_steps", "--run.name=x"), "needs a value, as in --train.max_steps=VALUE"),
        (("--train.compile=1",), "must be true or false, not 1"),
        (("--optimizer.rate=nan",), "must be a finite number, not nan"),
        (("--optimizer.rate=-1",), "must be greater than 0"),
        (("--train=3",), "is a section, not a key"),
        (("max_steps=3",), "is not a flag"),
        (("--checkpoint.keep_last_n=-1",), "must be at least 0, not -1"),
        (("--checkpoint.on_resume=oldest",), "must be newest, fresh or a step number"),
        (("--checkpoint.remote=bucket/run",), "must be a URL such as s3://bucket/prefix"),
        (
            ("--checkpoint.remote=s3://b/run", "--checkpoint.layout=files"),
            "needs checkpoint.layout = 'folders'",
        ),
        (("--checkpoint.remote_timeout=0s",), "must be more than 0 and at most a year"),
        (("--checkpoint.dyn_ckpt_window.start=3",), "is missing, and has no default"),
        (
            ("--checkpoint.dyn_ckpt_window.start=9", "--checkpoint.dyn_ckpt_window.stop=3"),
            "lies before the window's start",
        ),
        (
            ("--checkpoint.dyn_ckpt_window.start=1", "--checkpoint.dyn_ckpt_window.stop=3",
             "--checkpoint.dyn_ckpt_window.strategy=power3"),
            "power2",
        ),
        (("--train.micro_batch=3",), "does not divide"),
        (("--schedule.name=wsd",), "wsd needs the length of its decay"),
        (("--schedule.decay_steps=5",), "means nothing for 'cosine'"),
        (
            ("--schedule.name=wsd", "--schedule.decay_steps=900", "--schedule.warmup_steps=200"),
            "leave no room",
        ),
        (("--schedule.warmup_steps=1000",), "leave no room"),
        (
            ("--schedule.name=cosine_restarts", "--schedule.cycles=9", "--schedule.damping=0.5"),
            "lies below schedule.floor",
        ),
        (("--run.hooks=['x']",), "is not of the form module:Class"),
        (("--run.hooks=x",), "'x' is not of the form module:Class"),
        (("--run.hooks=3",), "must be a list ([] is an empty one), not 3"),
        (("--run.hooks=",), "must be a list ([] is an empty one), not ''"),
        (("--task",), "needs a value, as in --task=VALUE"),
        (("--train",), "is a section, not a key"),
        (("--checkpoint.dyn_ckpt_window",), "is a section, not a key"),
        (("--model.hidden_size",), "needs a value, as in --model.hidden_size=VALUE"),
        (("--train.max_step", "--run.name=x"), "unknown key; did you mean `max_steps`?"),
        (("--run.name=" + 256 * "a",), "must be at most 255 bytes long"),
        (("--model.architecture=lama",), "did you mean `llama`?"),
        (("--model.max_position_embeddings=16",), "is less than data.sequence_length"),
        (("--data.valid_share=1.5",), "must be between 0 and 1"),
        (("--task=wether",), "there is no task 'wether'; there are language"),
        (("--evaluation.metric=accuracy",), "valid_loss"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_an_error_that_names_it(tmp_path, flags, word):
    assert any(word in problem for problem in problems(tmp_path, "", *flags))


@pytest.mark.parametrize("remote", ["s3://key:secret@bucket/run", "s3://bucket/run?key=secret"])
def test_credentials_in_the_address_of_a_remote_are_refused_and_not_shown(tmp_path, remote):
    for found in (
        problems(tmp_path, "", f"--checkpoint.remote={remote}"),
        problems(tmp_path, f'[checkpoint]\nremote = "{remote}"\n'),
    ):
        [problem] = found
        assert "credentials belong in the environment" in problem
        assert "secret" not in problem


def test_overrides_take_both_forms_and_the_last_one_wins(tmp_path):
    config = load(
        tmp_path, "[train]\nmax_steps = 5\n",
        "--train.max_steps", "7", "--train.max_steps=9", "--run.name=007", "--run.seed=7",
        "--checkpoint.on_resume=5", "--model.rms_norm_eps=1e-6", "--run.hooks=['a:B', 'c.d:E']",
        "--checkpoint.dyn-ckpt-window.start=1", "--checkpoint.dyn_ckpt_window.stop=8",
    )  # fmt: skip
    assert (config.train.max_steps, config.run.name, config.run.seed) == (9, "007", 7)
    assert config.checkpoint.on_resume == "5"
    assert config.model.settings == {"rms_norm_eps": 1e-6}
    assert config.run.hooks == ("a:B", "c.d:E")
    assert config.checkpoint.dyn_ckpt_window.stop == 8


def test_a_value_that_is_wrong_is_not_judged_by_its_default(tmp_path):
    # The default of max_steps is 1000, for which this warm-up would be too long.
    text = "[train]\nmax_steps = 'ten'\n[schedule]\nwarmup_steps = 5000\n"
    assert problems(tmp_path, text) == [
        "c.toml:2: train.max_steps: must be a whole number, not 'ten'"
    ]


def test_a_wrong_flag_is_told_apart_from_what_the_file_says(tmp_path):
    text = "[train]\nmax_steps = 5\n"
    assert problems(tmp_path, text, "--train.max_steps=0") == [
        "--train.max_steps: must be at least 1, not 0"
    ]
    assert problems(tmp_path, text, "--train.max_steps.x=0", "--run.seed=-1") == [
        "--train.max_steps.x: train.max_steps is a key, not a section",
        "--run.seed: must be at least 0, not -1",
    ]


def test_an_optional_section_can_be_taken_away(tmp_path):
    text = "[checkpoint.dyn_ckpt_window]\nstart = 1\nstop = 2\n"
    assert load(tmp_path, text).checkpoint.dyn_ckpt_window is not None
    gone = load(tmp_path, text, "--checkpoint.dyn_ckpt_window=none")
    assert gone.checkpoint.dyn_ckpt_window is None


def test_a_config_extends_another_section_by_section(tmp_path):
    (tmp_path / "base.toml").write_text("[train]\nmax_steps = 3\nglobal_batch = 2\n[x]\ny = 1\n")
    text = 'extends = "base.toml"\n[train]\nmax_steps = 4\n'
    assert problems(tmp_path, text) == ["base.toml:4: x: unknown section"]
    (tmp_path / "base.toml").write_text("[train]\nmax_steps = 3\nglobal_batch = 2\n")
    config = load(tmp_path, text)
    assert (config.train.max_steps, config.train.global_batch) == (4, 2)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.toml"):
        load_task_config(tmp_path / "nothing.toml", [])
    (tmp_path / "folder.toml").mkdir()
    for name in ("gone.toml", "folder.toml"):
        with pytest.raises(ConfigError, match=name) as caught:
            load(tmp_path, f'extends = "{name}"')
        assert caught.value.hint.endswith(".toml extends it.")
    assert "circle" in problems(tmp_path, 'extends = "c.toml"')[0]
    assert "circle" in problems(tmp_path, f'extends = "../{tmp_path.name}/c.toml"')[0]
    assert "not valid TOML" in problems(tmp_path, "[train\n")[0]
    assert "line 1" in problems(tmp_path, "[train\n")[0]


def test_the_resolved_config_loads_to_an_equal_one(tmp_path):
    config = load(
        tmp_path,
        '[model]\nrope_parameters = {rope_type = "default", rope_theta = 1e4}\n'
        '[run]\nhooks = ["a:B"]\n[data]\nsource = "quo\\"te\\n\\u007f"\n',
        "--checkpoint.dyn_ckpt_window.start=0", "--checkpoint.dyn_ckpt_window.stop=9",
    )  # fmt: skip
    text = dump_toml(config)
    assert load(tmp_path, text) == config
    assert load(tmp_path, dump_toml(load(tmp_path, ""))) == load(tmp_path, "")


def test_the_folders_follow_from_what_is_given(tmp_path):
    def folders(*flags):
        config = load(tmp_path, '[run]\nname = "n"\n', *flags)
        return str(run_folder(config)), str(checkpoint_folder(config))

    assert folders() == ("runs/n", "runs/n/checkpoints")
    assert folders("--run.dir=a") == ("a", "a/checkpoints")
    assert folders("--checkpoint.dir=b") == ("b", "b")
    assert folders("--run.dir=a", "--checkpoint.dir=b") == ("a", "b")


def test_the_identity_of_a_run_leaves_out_what_may_change(tmp_path):
    names = set(must_match(load(tmp_path, "")))
    assert {"task", "run.seed", "model.architecture", "optimizer.name"} <= names
    assert not {"train.max_steps", "optimizer.rate", "data.workers", "run.dir"} & names


def test_every_field_has_its_help(tmp_path):
    source = "".join(
        (Path(__file__).parents[3] / "src/keepstep" / name).read_text()
        for name in ("config/schema.py", "tasks/language/config.py")
    )
    for path in flatten(load(tmp_path, "")):
        name = path.rpartition(".")[2]
        documented = re.search(
            rf"\n    {name}: [^\n]+\n    \"\"\"|\n    {name}: \w+ = \w+\(\)", source
        )
        assert documented, f"{path} has no docstring"
