"""`keepstep language prepare|generate`: token files from text, and text from a model."""

import json as json_format
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from keepstep.cli.parse import dispatch
from keepstep.errors import UsageError

_VOCABULARY_MAX = 2**31 - 1
_TOKENS_MAX = 2**31 - 1
_TEMPERATURES = (1e-3, 1e3)
"""Beyond these, a probability is not a number, or all are the same."""


def run_language(argv: Sequence[str]) -> int:
    """Prepare or generate; return the exit code."""
    return dispatch("language", {"prepare": prepare, "generate": generate}, argv)


def prepare(
    files: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="FILE [FILE ...]", help_behavior_hint="(at least one)"),
    ],
    *,
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])],
    vocab_size: int = 2048,
    tokenizer: Path | None = None,
    valid_share: float = 0.05,
) -> int:
    """Make a folder of token files from text files, for `data.source`.

    Args:
        files: Text files, in UTF-8.
        output: Folder to make; it must not be there yet.
        vocab_size: Size of the vocabulary of the tokenizer that is trained on the text.
        tokenizer: Folder with a tokenizer.json to use in place of a trained one.
        valid_share: Share of the text that is held out for evaluation.
    """
    from keepstep.tasks.language.prepare import prepare as prepare_texts
    from keepstep.tasks.language.prepare import read_texts
    from keepstep.tasks.language.tokens import open_tokens

    if not files:
        raise UsageError("`keepstep language prepare` needs text files")
    if not 0 < vocab_size <= _VOCABULARY_MAX:
        raise UsageError(f"--vocab-size must be from 257 to {_VOCABULARY_MAX:,}, not {vocab_size}")
    if not 0 < valid_share < 1:
        raise UsageError(f"--valid-share must be between 0 and 1, not {valid_share}")
    if output.exists():
        raise UsageError(f"{output} is there already", hint="Choose another folder.")
    prepare_texts(
        read_texts(files),
        output,
        vocab_size=vocab_size,
        valid_share=valid_share,
        tokenizer=tokenizer,
    )
    made = open_tokens(output)
    counts = ", ".join(f"{len(part):,} tokens to {name}" for name, part in made.parts.items())
    print(f"{output}: {counts}; vocabulary of {made.vocab_size:,}")
    return 0


def generate(
    run: Annotated[Path, tyro.conf.Positional],
    *,
    prompt: str,
    max_tokens: int = 64,
    temperature: float = 0.8,
    seed: int = 0,
    checkpoint: str = "best",
    json: bool = False,
) -> int:
    """Write text with a run's model.

    Args:
        run: Folder of the run.
        prompt: Text to begin with.
        max_tokens: Number of tokens to add at most.
        temperature: Randomness of the choice; 0 takes the likeliest token.
        seed: Seed of the choice.
        checkpoint: Which one: best (latest where there is none), latest, or a step.
        json: Print JSON.
    """
    from keepstep.tasks.language.generate import generate_text

    low, high = _TEMPERATURES
    if not 1 <= max_tokens <= _TOKENS_MAX:
        raise UsageError(f"--max-tokens must be from 1 to {_TOKENS_MAX:,}, not {max_tokens}")
    # Also where it is not a number: every comparison with that is false.
    if not (temperature == 0 or low <= temperature <= high):
        raise UsageError(f"--temperature must be 0, or from {low:g} to {high:g}, not {temperature}")
    if not 0 <= seed < 2**63:
        raise UsageError(f"--seed must be at least 0 and less than 2^63, not {seed}")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            "the prompt is not valid UTF-8 text", hint="Give it in the encoding of this terminal."
        ) from error
    text, used = generate_text(
        run,
        checkpoint=checkpoint,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
    )
    if json:
        found = {"prompt": prompt, "text": text, "checkpoint": used}
        print(json_format.dumps(found, indent=2))
    else:
        print(text)
    return 0
