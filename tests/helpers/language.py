"""Small token folders and tasks for the tests of the language task."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from keepstep.config.schema import EvaluationConfig, RunConfig, TrainConfig
from keepstep.store.disk import Disk
from keepstep.tasks.language.config import DataConfig, LanguageConfig, ModelConfig
from keepstep.tasks.language.task import LanguageTask
from keepstep.tasks.language.tokens import write_tokens

VOCAB_SIZE = 64
SETTINGS: Mapping[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "attention_dropout": 0.2,
}


def make_tokens(folder: Path, *, train: int = 161, valid: int = 57) -> Path:
    """Write a folder of tokens in which every sample of 8 differs from every other."""
    rng = np.random.default_rng(5)
    parts = {
        name: rng.integers(0, VOCAB_SIZE, count)
        for name, count in (("train", train), ("valid", valid))
    }
    write_tokens(folder, parts, vocab_size=VOCAB_SIZE, tokenizer="{}", disk=Disk())
    return folder


def make_config(
    source: Path,
    *,
    workers: int = 0,
    seed: int = 7,
    global_batch: int = 4,
    micro_batch: int = 0,
    batches: int = 2,
    model: ModelConfig | None = None,
    **train: Any,
) -> LanguageConfig:
    return LanguageConfig(
        run=RunConfig(seed=seed),
        train=replace(
            TrainConfig(global_batch=global_batch, micro_batch=micro_batch, device="cpu"), **train
        ),
        evaluation=EvaluationConfig(batches=batches),
        model=model or ModelConfig(settings=dict(SETTINGS)),
        data=DataConfig(source=str(source), sequence_length=8, workers=workers),
    )


def make_task(source: Path, **settings: Any) -> LanguageTask:
    return LanguageTask(make_config(source, **settings))
