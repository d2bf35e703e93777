"""What the process has imported from which those of `warm.py` are forked.

The optimizers of torch import its compiler at their first use, and `transformers` a model's module
at its first; a config's types are looked at once a process. What is here
is not looked through again by each fork's collections of garbage.
"""

import gc

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import transformers.models.llama.modeling_llama  # noqa: F401

import keepstep.cli.ckpt
import keepstep.cli.main
import keepstep.cli.train
import keepstep.report.console
import keepstep.store.rehearsal
import keepstep.store.writer
import keepstep.tasks.language.task
import keepstep.train  # noqa: F401
from keepstep.tasks.registry import load_task_config
from tests.helpers.command import ROOT

torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
load_task_config(ROOT / "configs/language/debug.toml", [])
gc.collect()
gc.freeze()
