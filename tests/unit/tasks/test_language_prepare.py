"""Text to tokens: the tokenizer, the split, the built-in source."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from keepstep.errors import DataError
from keepstep.tasks.language.prepare import prepare, prepare_python_stdlib, read_texts
from keepstep.tasks.language.tokens import open_tokens
from tests.helpers.command import ROOT, environment

TEXT = "".join(f"def f{n}(x):\n    return x + {n}  # größer, 数字 {n}\n" for n in range(400))
END = "<|endoftext|>"


def decoded(folder: Path, part: str) -> str:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.decode(open_tokens(folder).parts[part].tolist(), skip_special_tokens=False)


def make(folder: Path, texts=(TEXT,), **settings) -> Path:
    prepare(texts, folder, **({"vocab_size": 300, "valid_share": 0.1} | settings))
    return folder


def test_every_character_of_the_text_is_in_one_of_the_parts(tmp_path):
    folder = make(tmp_path / "t")
    together = decoded(folder, "train") + decoded(folder, "valid")
    assert sorted(together) == sorted(TEXT + END)


def test_the_held_out_share_is_what_was_asked_for_and_comes_from_all_over_the_text(tmp_path):
    folder = make(tmp_path / "t")
    valid = decoded(folder, "valid")
    assert len(valid) / len(TEXT) == pytest.approx(0.1, abs=0.01)
    quarters = [
        TEXT[start : start + len(TEXT) // 4] for start in range(0, len(TEXT), len(TEXT) // 4)
    ]
    blocks = [valid[start : start + 30] for start in range(0, len(valid) - 30, 30)]
    assert all(any(block in quarter for block in blocks) for quarter in quarters[:4])


def test_the_same_text_gives_the_same_tokens(tmp_path):
    one, two = (open_tokens(make(tmp_path / name)) for name in ("one", "two"))
    assert one.digest == two.digest
    other = open_tokens(make(tmp_path / "other", texts=(TEXT + " ",)))
    assert other.digest != one.digest


def test_each_text_ends_with_the_end_token(tmp_path):
    folder = make(tmp_path / "t", texts=("one text", "another"), valid_share=0.001)
    assert decoded(folder, "train") == f"one text{END}another{END}"


def test_the_vocabulary_has_the_size_that_was_asked_for(tmp_path):
    assert open_tokens(make(tmp_path / "t", vocab_size=290)).vocab_size == 290


def test_a_tokenizer_can_be_loaded_from_a_folder_or_a_file(tmp_path):
    first = make(tmp_path / "first")
    for number, tokenizer in enumerate((first, first / "tokenizer.json")):
        again = make(tmp_path / str(number), tokenizer=tokenizer)
        assert open_tokens(again).digest == open_tokens(first).digest
    with pytest.raises(DataError, match="no tokenizer in"):
        make(tmp_path / "none", tokenizer=tmp_path)


def test_a_tokenizer_that_cuts_and_pads_loses_no_text(tmp_path):
    first = make(tmp_path / "first")
    tokenizer = Tokenizer.from_file(str(first / "tokenizer.json"))
    tokenizer.enable_truncation(max_length=5)
    tokenizer.enable_padding(length=100)
    (tmp_path / "cutting").mkdir()
    tokenizer.save(str(tmp_path / "cutting" / "tokenizer.json"))
    again = make(tmp_path / "again", tokenizer=tmp_path / "cutting")
    assert open_tokens(again).digest == open_tokens(first).digest


def test_a_tokenizer_that_is_not_one_is_a_data_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        make(tmp_path / "t", tokenizer=tmp_path)


def test_no_text_and_a_vocabulary_below_the_bytes_are_refused(tmp_path):
    with pytest.raises(DataError, match="no text"):
        make(tmp_path / "t", texts=("", ""))
    with pytest.raises(DataError, match="at least 257 tokens, not 256"):
        make(tmp_path / "t", vocab_size=256)


def test_a_file_that_is_missing_or_not_text_is_named(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="binary cannot be read as UTF-8"):
        read_texts([binary])
    with pytest.raises(DataError, match="nowhere"):
        read_texts([tmp_path / "nowhere"])


STDLIB = """
import pathlib, sys
from keepstep.tasks.language.prepare import prepare_python_stdlib
cache = pathlib.Path(sys.argv[1])
print(prepare_python_stdlib(cache, vocab_size=300, valid_share=0.05, megabytes=1))
"""


def test_two_processes_prepare_the_built_in_source_at_once_and_a_third_reuses_it(tmp_path):
    command = [sys.executable, "-c", STDLIB, str(tmp_path)]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT)
        for _ in range(2)
    ]
    folders = {process.communicate(timeout=90)[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0]
    (folder,) = map(Path, folders)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    made = (folder / "train.bin").stat()
    again = prepare_python_stdlib(tmp_path, vocab_size=300, valid_share=0.05, megabytes=1)
    assert again == folder
    assert (folder / "train.bin").stat() == made
    assert len(open_tokens(folder).parts["train"]) > 300_000
    # Another size or share is another folder: a run never trains on what an earlier one made.
    assert json.loads((folder / "tokens.json").read_text())["vocab_size"] == 300
    other = prepare_python_stdlib(tmp_path, vocab_size=300, valid_share=0.2, megabytes=1)
    assert other != folder
