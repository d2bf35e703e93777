"""Everything that survives a kill, listed in one place.

Guarantees: what `capture` returns is all that a fresh process needs to take the very next step as
this one would have taken it. Random numbers are not in it: they are derived from the seed and the
step. The data position is the number of samples taken or, by a rollback, passed over.

A thing that is not in this list is silently new after every resume: optimizer moments that are
zero, a schedule that starts over, a best value that a worse one can take.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from keepstep.distributed.shard import drop_gathered, own_part
from keepstep.errors import CheckpointDamaged

if TYPE_CHECKING:
    from keepstep.optim.optimizer import Optimizer


@dataclass(kw_only=True)
class Counters:
    """Where the run is. `step` counts batches taken, `updates` optimizer steps applied."""

    step: int = 0
    updates: int = 0
    samples: int = 0
    tokens: int = 0
    skips_in_a_row: int = 0
    rollbacks: int = 0
    """How often the run went back to a checkpoint because a step was not finite."""
    save_owed: str = "no"
    """The save (a `SaveDue`) that was due at a skipped step; it moves to the next applied one."""
    evaluation_owed: bool = False
    """An evaluation was due and was not made: at a skipped step, or cut short by a stop."""


class TrainingState:
    """The state of a run between two steps."""

    def __init__(self, *, model: torch.nn.Module, optimizer: "Optimizer") -> None:
        self.model = model
        self.optimizer = optimizer
        self.counters = Counters()
        self._named: dict[str, torch.Tensor] | None = None

    def like(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return the tensor like which a saved one is sharded; None for one that every rank has.

        A moment is sharded as its parameter is, also in a fresh optimizer, which has none yet.
        """
        parent, _, _ = name.rpartition(".")
        found = self._model_tensors().get(name, self.optimizer.parameter_of(parent))
        return found if found is not None and tuple(found.shape) == shape else None

    def _model_tensors(self) -> dict[str, torch.Tensor]:
        if self._named is None:
            named = {f"model.{name}": value for name, value in self.model.state_dict().items()}
            self._named = {n: value for n, value in named.items() if torch.is_tensor(value)}
        return self._named

    def release(self) -> None:
        """Drop the model and the optimizer; the state cannot be used afterwards."""
        del self.model, self.optimizer
        self._named = None

    def capture(self) -> dict[str, Any]:
        """Return what survives, as a tree of tensors and plain values; nothing is copied."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "counters": asdict(self.counters),
        }

    def moving(self) -> set[str]:
        """Return the names, as captured, of what changes between two updates: the buffers."""
        return {f"model.{name}" for name, _ in self.model.named_buffers()}

    def not_finite(self) -> str:
        """Return the name of a tensor whose part on this rank is not finite; empty if all are.

        A buffer may hold inf, as a mask does, and no nan. Each byte is read once.
        """
        captured = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        alike: dict[tuple[Any, ...], dict[str, torch.Tensor]] = {}
        for name, tensor in _tensors_in(captured, ""):
            part = own_part(tensor).detach()
            if part.is_floating_point() and part.numel() > 0:
                alike.setdefault((part.device, part.dtype), {})[name] = part
        buffers = self.moving()
        for parts in alike.values():
            # One transfer for all: on a GPU each of its own would wait for the device.
            ends = torch.stack([end for part in parts.values() for end in torch.aminmax(part)])
            pairs = ends.view(-1, 2).tolist()
            for name, (low, high) in zip(parts, pairs, strict=True):
                finite = math.isfinite(low) and math.isfinite(high)
                if not finite and not (name in buffers and not math.isnan(low)):
                    return name
        return ""

    @contextmanager
    def averaged(self, *, before: Callable[[], None]) -> Iterator[None]:
        """Have the model hold what is evaluated; afterwards it is bit for bit what it was.

        ``before`` is called before a weight changes.
        """
        with self.optimizer.averaged(before=before):
            yield
        drop_gathered(self.model)

    def load(self, saved: Mapping[str, Any]) -> list[str]:
        """Become the state that was captured; return the optimizer settings that changed since.

        Raises CheckpointDamaged where something saved has no place to go, or the other way round.
        """
        try:
            self.model.load_state_dict(saved["model"], strict=True)
            known = {field.name for field in fields(Counters)}
            if set(saved["counters"]) != known:
                raise KeyError(f"counters are {sorted(saved['counters'])}, not {sorted(known)}")
            self.counters = Counters(**saved["counters"])
        except (KeyError, RuntimeError) as error:
            raise CheckpointDamaged(
                f"the checkpoint does not hold this model's state: {error}",
                hint="It was written by another version, or the model's code has changed.",
            ) from error
        return self.optimizer.load_state_dict(saved["optimizer"])


def _tensors_in(tree: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a captured state by the names that they have in a checkpoint."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping | list | tuple):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _tensors_in(value, f"{path}.{key}" if path else str(key))
