"""What the process has imported from which those of `warm.py` are forked.

The optimizers of torch import its compiler at their first use.
"""

import torch

import keepstep.cli.ckpt
import keepstep.cli.main
import keepstep.cli.train
import keepstep.tasks.language.task
import keepstep.train  # noqa: F401

torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
