"""`keepstep language prepare|generate`, through the installed command."""

import json
import shutil
from pathlib import Path

import pytest

from keepstep.tasks.language.tokens import open_tokens
from tests.helpers.command import ROOT, keepstep, link

TEXT = ROOT / "LICENSE"


def generate(run: Path, *flags: object) -> dict[str, str]:
    done = keepstep("language", "generate", run, "--json", "--max-tokens", 8, *flags)
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout)


def test_prepare_makes_a_folder_and_says_what_is_in_it(tmp_path):
    folder = tmp_path / "deep" / "tokens"
    done = keepstep("language", "prepare", TEXT, TEXT, "-o", folder, "--vocab-size", 300)
    assert done.returncode == 0, done.stdout
    made = open_tokens(folder)
    assert f"{len(made.parts['train']):,} tokens to train" in done.stdout
    assert "vocabulary of 300" in done.stdout
    again = tmp_path / "again"
    done = keepstep("language", "prepare", TEXT, TEXT, "-o", again, "--tokenizer", folder)
    assert done.returncode == 0, done.stdout
    assert open_tokens(again).digest == made.digest


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("nowhere.txt", "-o", "{new}"), 4, "no text file nowhere.txt"),
        ((TEXT, "-o", "{there}"), 2, "is there already"),
        ((TEXT, "-o", "{new}", "--valid-share", "1"), 2, "between 0 and 1"),
        ((TEXT, "-o", "{new}", "--vocab-size", "10"), 2, "at least 257"),
        ((TEXT, "-o", "{new}", "--tokenizer", "{there}"), 4, "no tokenizer"),
        (("-o", "{new}"), 2, ""),
    ],
)
def test_prepare_refuses_what_it_cannot_use_and_leaves_nothing(tmp_path, words, code, said):
    (tmp_path / "there").mkdir()
    names = {"new": tmp_path / "new", "there": tmp_path / "there"}
    done = keepstep("language", "prepare", *(str(word).format(**names) for word in words))
    assert done.returncode == code, done.stdout
    assert said in done.stdout
    assert "Traceback" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_run_writes_text_and_the_same_seed_writes_the_same(untouched):
    first = generate(untouched, "--prompt", "the License")
    assert first["text"].startswith("the License")
    assert len(first["text"]) > len("the License")
    assert first["checkpoint"] == link(untouched, "best")
    assert generate(untouched, "--prompt", "the License") == first
    other = generate(untouched, "--prompt", "the License", "--seed", 5)
    assert other["text"] != first["text"]


def test_temperature_zero_takes_the_likeliest_whatever_the_seed(untouched):
    flags = ("--prompt", "the", "--temperature", 0)
    assert generate(untouched, *flags) == generate(untouched, *flags, "--seed", 5)


@pytest.mark.parametrize("name", ["latest", "step_3"])
def test_any_checkpoint_can_be_named(untouched, name):
    used = generate(untouched, "--prompt", "the", "--checkpoint", name)["checkpoint"]
    assert used == ("step_10" if name == "latest" else name)


def test_without_json_the_text_alone_is_printed(untouched):
    done = keepstep("language", "generate", untouched, "--prompt", "the", "--max-tokens", 8)
    assert done.returncode == 0
    assert done.stdout.rstrip("\n") == generate(untouched, "--prompt", "the")["text"].rstrip("\n")


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--prompt", ""), 2, "prompt is empty"),
        (("--prompt", "x", "--max-tokens", 0), 2, "at least 1"),
        (("--prompt", "x", "--temperature", -1), 2, "at least 0"),
        (("--prompt", "x", "--max-tokens", 3000), 2, "2,048 positions"),
        (("--prompt", "x", "--checkpoint", "step_5"), 4, "step_10"),
    ],
)
def test_generate_refuses_what_makes_no_sense(untouched, flags, code, said):
    done = keepstep("language", "generate", untouched, *flags)
    assert done.returncode == code, done.stdout
    assert said in done.stdout
    assert "Traceback" not in done.stdout


def test_a_damaged_checkpoint_writes_no_text(untouched, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(untouched, run, symlinks=True)
    (path,) = (run / "step_10").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    done = keepstep("language", "generate", run, "--prompt", "x", "--checkpoint", "step_10")
    assert done.returncode == 3, done.stdout
    assert path.name in done.stdout


def test_tokens_of_another_text_write_no_text(untouched, tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(untouched, run, symlinks=True)
    done = keepstep(
        "language", "prepare", ROOT / "pyproject.toml", "-o", other, "--vocab-size", 300
    )
    assert done.returncode == 0, done.stdout
    config = run / "run.toml"
    lines = [
        f'source = "{other}"' if line.startswith("source = ") else line
        for line in config.read_text().splitlines()
    ]
    config.write_text("\n".join(lines))
    done = keepstep("language", "generate", run, "--prompt", "x")
    assert done.returncode == 2, done.stdout
    assert "does not hold the tokens" in done.stdout


def test_a_folder_that_is_not_a_run_is_said_to_be_none(tmp_path):
    done = keepstep("language", "generate", tmp_path, "--prompt", "x")
    assert done.returncode == 4, done.stdout
    assert "not the folder of a run" in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--prompt", "\udcff\udcfe"), "the prompt is not valid UTF-8 text"),
        (("--prompt", "a", "--seed", "9" * 23), "--seed must be at least 0 and less than 2^63"),
        (("--prompt", "a", "--temperature", "nan"), "--temperature must be a number"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_in_a_line(untouched, flags, words):
    done = keepstep("language", "generate", untouched, *flags)
    assert done.returncode == 2, done.stdout
    assert words in done.stdout
    assert "Traceback" not in done.stdout
