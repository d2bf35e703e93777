"""Text from a run's model."""

from pathlib import Path
from typing import Any

import torch

from keepstep.config.resolved import RUN_TOML
from keepstep.errors import DataError, NotFound, UsageError
from keepstep.optim.averaged import load_averaged
from keepstep.store.catalog import Checkpoint, list_checkpoints
from keepstep.store.layout import BEST_NAME, LATEST_NAME
from keepstep.store.roles import find_checkpoint, found_checkpoints, label_of, roles_of
from keepstep.tasks.language.config import LanguageConfig
from keepstep.tasks.language.model import build_decoder
from keepstep.tasks.language.prepare import load_tokenizer
from keepstep.tasks.language.task import data_folder
from keepstep.tasks.language.tokens import TokenSet, open_tokens
from keepstep.tasks.registry import load_task_config


def generate_text(
    run: Path, *, checkpoint: str, prompt: str, max_tokens: int, temperature: float, seed: int
) -> tuple[str, str]:
    """Return the prompt with what the model adds to it, and the name of the checkpoint used."""
    config = _config(run)
    wanted = checkpoint
    place = run
    if config.checkpoint.dir and not list_checkpoints(run, aside=True):
        # What the run's folder holds comes first: it may have been moved since.
        place = Path(config.checkpoint.dir).expanduser()
    entries = found_checkpoints(place)
    if checkpoint == BEST_NAME and not any(BEST_NAME in roles_of(e, entries) for e in entries):
        # A run that was never evaluated has no best; its latest is then the best there is.
        wanted = LATEST_NAME
    entry = find_checkpoint(place, wanted)
    tokens = open_tokens(data_folder(config.data))
    _require_same_tokens(entry, tokens)
    tokenizer = load_tokenizer(tokens.folder)
    model = build_decoder(
        config.model,
        vocab_size=tokens.vocab_size,
        sequence_length=config.data.sequence_length,
    )
    model.load_state_dict(load_averaged(entry, only="model")["model"])
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not ids:
        raise UsageError("the prompt is empty")
    _require_room(model, len(ids) + max_tokens)
    added = _continue(model, ids, max_tokens=max_tokens, temperature=temperature, seed=seed)
    return tokenizer.decode([*ids, *added]), label_of(entry)


def _continue(
    model: Any, ids: list[int], *, max_tokens: int, temperature: float, seed: int
) -> list[int]:
    """Return the tokens that the model adds."""
    torch.manual_seed(seed)
    model.eval()
    given = torch.tensor([ids])
    drawn = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
    written = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=max_tokens,
        # A model's own end token means nothing to a tokenizer that was trained elsewhere.
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,
        **({"do_sample": False} | drawn),
    )
    added: list[int] = written[0, len(ids) :].tolist()
    return added


def _require_same_tokens(entry: Checkpoint, tokens: TokenSet) -> None:
    """Raise DataError where the tokens are not the run's: the text would be nonsense.

    The built-in source is the library of the Python that runs, and another Python has another.
    """
    trained_on = entry.manifest.must_match.get("data.digest") if entry.manifest else None
    if trained_on is not None and trained_on != tokens.digest:
        raise DataError(
            f"{tokens.folder} does not hold the tokens that {label_of(entry)} was trained on",
            hint="Use the Python that trained it, or give the folder with data.source in run.toml.",
        )


def _require_room(model: Any, tokens: int) -> None:
    """Raise UsageError where the model has no positions for so many tokens."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and tokens > positions:
        raise UsageError(
            f"prompt and continuation are {tokens:,} tokens; the model has {positions:,} positions",
            hint="Shorten the prompt, or lower --max-tokens.",
        )


def _config(run: Path) -> LanguageConfig:
    path = run / RUN_TOML
    if not path.is_file():
        raise NotFound(f"{run} is not the folder of a run: it has no {RUN_TOML}")
    config = load_task_config(path, []).config
    if not isinstance(config, LanguageConfig):
        raise UsageError(f"{run} is a run of the task {config.task!r}, not of language")
    return config
