"""What follows from a config: its text, its identity, its folders."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.config.resolved import dump_toml, must_match, recorded_checkpoint_folder
from keepstep.config.schema import CheckpointConfig, DenseWindowConfig, RunConfig, TrainConfig
from keepstep.config.validate import validate
from keepstep.errors import UsageError
from keepstep.tasks.language.config import DataConfig, LanguageConfig, ModelConfig

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
OWN_KEYS = ("architecture", "pretrained", "attention", "settings")
FREE_KEYS = TEXT.filter(lambda name: name not in OWN_KEYS)


@settings(max_examples=200, deadline=None)
@given(
    free=st.dictionaries(FREE_KEYS, VALUES, max_size=4),
    source=TEXT,
    rate=st.floats(1e-300, 1e300),
    window=st.none() | st.builds(DenseWindowConfig, start=st.integers(), stop=st.integers()),
    hooks=st.lists(TEXT, max_size=3).map(tuple),
)
def test_any_config_is_equal_to_what_its_text_loads_to(free, source, rate, window, hooks):
    config = LanguageConfig(
        run=RunConfig(name=source, hooks=hooks),
        train=TrainConfig(grad_clip=rate),
        checkpoint=CheckpointConfig(dyn_ckpt_window=window),
        model=ModelConfig(settings=free),
        data=DataConfig(source=source),
    )
    loaded, problems = validate(LanguageConfig, tomllib.loads(dump_toml(config)))
    assert problems == []
    assert loaded == config
    assert isinstance(loaded.train.grad_clip, float)


def test_what_toml_cannot_hold_is_refused_and_not_written():
    config = LanguageConfig(model=ModelConfig(settings={"pad": None}))
    with pytest.raises(UsageError, match="cannot hold None"):
        dump_toml(config)


def test_the_identity_names_every_free_key_of_the_model():
    config = LanguageConfig(model=ModelConfig(settings={"hidden_size": 64}))
    identity = must_match(config)
    assert identity["model.hidden_size"] == 64
    assert identity["model.architecture"] == "llama"
    assert "model.settings" not in identity
    moved = replace(
        config, run=replace(config.run, dir="elsewhere"), train=TrainConfig(max_steps=9)
    )
    assert must_match(moved) == identity
    reseeded = replace(config, run=replace(config.run, seed=9))
    assert must_match(reseeded) != identity


def test_the_checkpoint_folder_of_a_run_is_read_from_its_text(tmp_path):
    assert recorded_checkpoint_folder(tmp_path) is None
    path = tmp_path / "run.toml"
    path.write_text(dump_toml(LanguageConfig()))
    assert recorded_checkpoint_folder(tmp_path) is None
    path.write_text(dump_toml(LanguageConfig(checkpoint=CheckpointConfig(dir="/far/away"))))
    assert recorded_checkpoint_folder(tmp_path) == Path("/far/away")
    path.write_text("[checkpoint")
    with pytest.raises(UsageError, match=r"run\.toml: this is not valid TOML"):
        recorded_checkpoint_folder(tmp_path)
