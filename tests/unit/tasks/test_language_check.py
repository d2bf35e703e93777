"""What of a language config is wrong is found from the library's source text, without torch."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from keepstep.tasks.language import check, library
from keepstep.tasks.language.config import DataConfig, LanguageConfig, ModelConfig
from keepstep.tasks.registry import load_task_config
from tests.helpers.command import ROOT, environment

CONFIGS = sorted((ROOT / "configs" / "language").glob("*.toml"))


def problems(**sections) -> dict[str, str]:
    config = replace(LanguageConfig(), **sections)
    return {problem.path: problem.message for problem in check(config)}


def test_the_defaults_have_no_problems():
    assert problems() == {}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_of_the_repository_loads_and_is_meant(path: Path):
    config = load_task_config(path, []).config
    assert config.task == "language"
    assert config.run.name == f"language-{path.stem}"


def test_an_unknown_architecture_is_found_with_a_suggestion():
    said = problems(model=ModelConfig(architecture="lama"))["model.architecture"]
    assert "no decoder 'lama'" in said
    assert "llama" in said


def test_unknown_keys_are_found_all_at_once_with_suggestions():
    model = ModelConfig(settings={"hidden_sise": 1, "num_layer": 2, "hidden_size": 16})
    found = problems(model=model)
    assert set(found) == {"model.hidden_sise", "model.num_layer"}
    assert "`hidden_size`" in found["model.hidden_sise"]


def test_a_setting_that_has_a_key_of_its_own_points_to_it():
    said = problems(model=ModelConfig(settings={"attn_implementation": "eager"}))
    assert "it is `model.attention` here" in said["model.attn_implementation"]


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"vocab_size": 256}, "data.vocab_size"),
        ({"megabytes": 0}, "data.megabytes"),
        ({"sequence_length": 0}, "data.sequence_length"),
        ({"workers": -1}, "data.workers"),
        ({"valid_share": 0.0}, "data.valid_share"),
        ({"valid_share": 1.0}, "data.valid_share"),
    ],
)
def test_numbers_that_cannot_be_meant_are_found(data, path):
    assert list(problems(data=DataConfig(**data))) == [path]


def test_samples_longer_than_the_models_positions_are_found():
    model = ModelConfig(settings={"max_position_embeddings": 64})
    assert "64 is less" in problems(model=model)["model.max_position_embeddings"]


@pytest.mark.parametrize(
    "architecture",
    ["llama", "qwen3", "gpt2", "mixtral", "mistral", "gemma2", "olmo2", "phi3", "gpt_neox", "bert"],
)
def test_no_key_that_the_library_takes_is_refused(architecture):
    assert architecture in library.decoder_names()
    keys = library.config_keys(architecture)
    real = AutoConfig.for_model(architecture)
    taken = set(real.to_dict()) | set(type(real).attribute_map)
    if hasattr(real, "rope_parameters"):
        taken |= {"rope_theta", "rope_scaling", "partial_rotary_factor"}
    assert taken - keys - {"model_type", "transformers_version", "_name_or_path"} == set()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_checking_imports_neither_torch_nor_transformers(path: Path):
    code = (
        "import sys; from keepstep.tasks.registry import load_task_config;"
        "load_task_config(sys.argv[1], []);"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "[]"
