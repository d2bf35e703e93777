"""`keepstep ckpt export|import`: checkpoints in the formats of others, and weights from them."""

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from keepstep.cli.ckpt_text import Name, Run, folder_of, place_of, print_json, run_folder_of
from keepstep.config.resolved import RUN_TOML
from keepstep.errors import NotFound, UsageError
from keepstep.store import list_checkpoints
from keepstep.store.disk import Disk
from keepstep.store.layout import CHECKPOINTS_NAME, JOURNAL_NAME
from keepstep.store.roles import find_checkpoint, label_of

_WEIGHTS = "model"


def export(
    run: Run,
    checkpoint: Name,
    output: Annotated[Path, tyro.conf.Positional],
    *,
    format: Literal["huggingface", "dcp", "pth", "safetensors"],
    only: str = "",
    json: bool = False,
) -> int:
    """Write a checkpoint in another format; every byte is verified on the way.

    huggingface: a folder that `transformers` loads: weights, config.json, the tokenizer if the run
    has one. safetensors: one file of the weights. dcp: a folder for
    `torch.distributed.checkpoint.load`. pth: one file for `torch.load(weights_only=True)`. dcp and
    pth hold the whole state. OUT appears when all of it is there, and is never overwritten. Weights
    are those that were evaluated: of schedulefree_adamw the average.

    Args:
        run: Folder of the run, or of its checkpoints.
        checkpoint: Name (step_10), step (10), `latest` or `best`.
        output: File or folder to make; it must not be there yet.
        format: Format to write.
        only: One key at the top of the state, such as `model`; empty is as said above.
        json: Print JSON.
    """
    entry = find_checkpoint(place_of(run), checkpoint)
    _require_outside(output, folder_of(run))
    # Before the first import of torch, and before gigabytes are read.
    from keepstep.optim.averaged import load_averaged
    from keepstep.store.export import WRITERS, require_free, write_out

    require_free(output)
    notes: list[str] = []
    if format == "huggingface":
        if only:
            raise UsageError("--only means nothing for huggingface: it holds the model's weights")
        from keepstep.tasks.registry import export_model

        weights = load_averaged(entry, only=_WEIGHTS)[_WEIGHTS]
        config = _run_config(run)

        def write(staging: Path) -> None:
            notes.extend(export_model(config, weights, entry, staging))

        write_out(output, write, disk=Disk())
    else:
        part = only or (_WEIGHTS if format == "safetensors" else "")
        state = load_averaged(entry, only=part or None)
        content = state[part] if format == "safetensors" else state
        if not isinstance(content, dict):
            raise UsageError(f"{part} is no table of tensors; choose another part with --only")
        writer = WRITERS[format]
        write_out(output, lambda staging: writer(content, staging, Disk()), disk=Disk())
    if json:
        facts = {"checkpoint": label_of(entry), "output": str(output), "format": format}
        print_json({**facts, "notes": notes})
    else:
        print(f"{output}: {label_of(entry)} as {format}")
        for note in notes:
            print(f"  {note}")
    return 0


def import_weights(
    source: Annotated[Path, tyro.conf.Positional],
    run: Run,
    *,
    step: int = 0,
    key: str = "",
    json: bool = False,
) -> int:
    """Make a checkpoint of the weights in a .pth or safetensors file, a DCP or Hugging Face folder.

    It holds weights only, under `model`: no optimizer state, no counters, no position in the data.
    `keepstep.store.load_state` reads it, and `ckpt show|verify|diff|export` take it; `keepstep
    train` cannot continue from it, and refuses. To train from weights, set `model.pretrained` in
    the config to a Hugging Face folder. No source can run code; `.pth` is read with weights_only.

    Args:
        source: File or folder to read.
        run: Folder to make, or one without checkpoints: those of two runs are not mixed.
        step: Step that the checkpoint is named after.
        key: Where the weights are in a file that holds more; `model` or `state_dict` if empty.
        json: Print JSON.
    """
    if step < 0:
        raise UsageError(f"--step must be at least 0, not {step}")
    _require_empty(run)
    from keepstep.store import Store
    from keepstep.store.bring_in import read_weights

    weights, others = read_weights(source, key=key)
    with Store(run / CHECKPOINTS_NAME) as store:
        saved = store.save(
            {_WEIGHTS: weights},
            step=step,
            updates=0,
            # What `train` shows where it refuses, since no config has this.
            must_match={"weights only, imported from": str(source)},
        )
    if json:
        facts = {"path": str(saved.path), "tensors": len(weights), "left_out": others}
        print_json(facts)
        return 0
    print(f"{saved.path}: {len(weights):,} tensors, under `{_WEIGHTS}`")
    if others:
        print(f"  not taken over: {', '.join(others)}")
    print("  weights only: no optimizer state, no counters, no position in the data")
    return 0


def _require_outside(output: Path, folder: Path) -> None:
    if folder.resolve() in output.resolve().parents:
        raise UsageError(
            f"{output} lies in the folder of the checkpoints, which only the store writes to",
            hint="Choose a place outside it.",
        )


def _require_empty(run: Path) -> None:
    if run.exists() and not run.is_dir():
        raise UsageError(f"{run} is not a folder")
    used = [name for name in (RUN_TOML, JOURNAL_NAME) if (run / name).exists()]
    if used or (run.is_dir() and list_checkpoints(run, aside=True)):
        raise UsageError(
            f"{run} is a run already; imported weights are a run of their own",
            hint="Choose a new folder.",
        )


def _run_config(run: Path) -> Any:
    from keepstep.tasks.registry import load_task_config

    path = run_folder_of(run) / RUN_TOML
    if not path.is_file():
        raise NotFound(
            f"{run} has no {RUN_TOML}, so what its model is is not known",
            hint="Weights alone can be written with --format safetensors.",
        )
    return load_task_config(path, []).config
