"""Folders of prepared tokens: whole or absent, and never read as what they are not."""

import json

import numpy as np
import pytest

from keepstep.errors import DataError
from keepstep.store.disk import Disk
from keepstep.tasks.language.tokens import open_tokens, write_tokens
from tests.helpers.language import make_tokens


def write(folder, tokens, *, vocab_size, disk=None):
    tokens = np.asarray(tokens)
    parts = {"train": tokens, "valid": tokens[:2]}
    write_tokens(
        folder, parts, vocab_size=vocab_size, tokenizer="{}", disk=disk if disk else Disk()
    )


def edit(folder, **changes):
    path = folder / "tokens.json"
    about = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(about))


@pytest.mark.parametrize(("vocab_size", "type_name"), [(65536, "uint16"), (65537, "uint32")])
def test_tokens_come_back_as_they_went_in_the_smallest_type_that_holds_them(
    tmp_path, vocab_size, type_name
):
    tokens = [0, 1, 255, 256, vocab_size - 1]
    write(tmp_path / "t", tokens, vocab_size=vocab_size)
    opened = open_tokens(tmp_path / "t")
    assert opened.parts["train"].tolist() == tokens
    assert opened.parts["train"].dtype == np.dtype(type_name)
    assert isinstance(opened.parts["train"], np.memmap)
    assert json.loads((tmp_path / "t" / "tokens.json").read_text())["type"] == type_name


def test_a_token_beyond_the_vocabulary_is_refused_with_its_place_before_anything_is_written(
    tmp_path,
):
    with pytest.raises(DataError, match="token 2 is 300, beyond the vocabulary of 300"):
        write(tmp_path / "t", [1, 2, 300], vocab_size=300)
    assert not any(tmp_path.iterdir())


def test_another_type_in_the_description_is_found_by_the_size(tmp_path):
    folder = make_tokens(tmp_path / "t")
    edit(folder, type="uint32")
    with pytest.raises(DataError, match=r"train\.bin is 322 bytes; 161 tokens of type uint32"):
        open_tokens(folder)


@pytest.mark.parametrize("name", ["train.bin", "valid.bin"])
def test_a_file_that_was_cut_short_is_found(tmp_path, name):
    folder = make_tokens(tmp_path / "t")
    path = folder / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=f"{name} is .* bytes"):
        open_tokens(folder)


@pytest.mark.parametrize("name", ["train.bin", "valid.bin"])
def test_a_flipped_bit_is_found(tmp_path, name):
    folder = make_tokens(tmp_path / "t")
    data = bytearray((folder / name).read_bytes())
    data[40] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(DataError, match=f"{name} is not what was written"):
        open_tokens(folder)


def test_a_missing_file_and_a_missing_folder_are_named(tmp_path):
    folder = make_tokens(tmp_path / "t")
    (folder / "valid.bin").unlink()
    with pytest.raises(DataError, match=r"valid\.bin is missing"):
        open_tokens(folder)
    with pytest.raises(DataError, match="nowhere is not a folder of prepared tokens"):
        open_tokens(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", "{", '{"format": "other"}', '{"format": "keepstep-tokens-1"}', "\xff"],
)
def test_a_malformed_description_is_a_data_error(tmp_path, text):
    folder = make_tokens(tmp_path / "t")
    (folder / "tokens.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"tokens\.json"):
        open_tokens(folder)


@pytest.mark.parametrize(
    "change",
    [{"type": "float16"}, {"type": ["uint16"]}, {"vocab_size": "many"}, {"parts": []},
     {"parts": {"train": {"count": -1}, "valid": {}}}],
)  # fmt: skip
def test_a_description_that_says_something_impossible_is_a_data_error(tmp_path, change):
    folder = make_tokens(tmp_path / "t")
    edit(folder, **change)
    with pytest.raises(DataError, match=r"tokens\.json|train\.bin"):
        open_tokens(folder)


def test_the_digest_depends_on_every_token_of_both_parts(tmp_path):
    digests = set()
    for number, (train, valid) in enumerate([(161, 57), (160, 57), (161, 56)]):
        folder = make_tokens(tmp_path / str(number), train=train, valid=valid)
        digests.add(open_tokens(folder).digest)
    assert len(digests) == 3


def test_what_another_process_made_first_stays_and_nothing_is_left_over(tmp_path):
    write(tmp_path / "t", [1, 2, 3], vocab_size=10)
    write(tmp_path / "t", [4, 5, 6, 7], vocab_size=10)
    assert open_tokens(tmp_path / "t").parts["train"].tolist() == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


class FailingDisk(Disk):
    """A disk that is full from its n-th write or sync on, but still deletes."""

    def __init__(self, at):
        self.left = at

    def operation(self, name, path):
        if name in ("create", "write", "sync", "sync_folder", "rename"):
            self.left -= 1
            if self.left < 0:
                raise OSError(28, "No space left on device", str(path))


def test_a_full_disk_at_any_operation_leaves_the_whole_folder_or_nothing(tmp_path):
    for at in range(60):
        folder = tmp_path / str(at) / "t"
        folder.parent.mkdir()
        try:
            write(folder, [1, 2, 3], vocab_size=10, disk=FailingDisk(at))
        except OSError as error:
            assert error.errno == 28
        else:
            break
        assert not list(folder.parent.iterdir()) or open_tokens(folder).vocab_size == 10
    assert 10 < at < 59
    assert open_tokens(folder).parts["train"].tolist() == [1, 2, 3]
