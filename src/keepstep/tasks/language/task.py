"""The language task: next-token prediction."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from keepstep.errors import UsageError
from keepstep.state.data_position import sample_indices
from keepstep.tasks.language.config import METRICS, DataConfig, LanguageConfig
from keepstep.tasks.language.data import BatchDataset, Windows, iterate_batches
from keepstep.tasks.language.model import build_decoder, router_loss_weight
from keepstep.tasks.language.prepare import prepare_python_stdlib
from keepstep.tasks.language.tokens import check_vocabulary, open_tokens
from keepstep.tasks.task import Batch, DataShare

_TOKENS_TO_CHECK_AT_START = 1 << 26
_ALL = DataShare()


class LanguageTask:
    """See `keepstep.tasks.task.Task`."""

    def __init__(self, config: LanguageConfig, share: DataShare = _ALL) -> None:
        self._config = config
        self._share = share
        samples = _samples_of_a_rank(config, share)
        self._micro_batch = config.train.micro_batch or samples
        # Of the global batch's micro-batches, each `share.count`-th is this rank's.
        taken = np.arange(0, config.train.global_batch, self._micro_batch)[
            share.index :: share.count
        ]
        self._places = (taken[:, None] + np.arange(self._micro_batch)).ravel()
        self.tokens = open_tokens(data_folder(config.data))
        self._train, self._valid = (
            Windows(
                self.tokens.parts[name],
                length=config.data.sequence_length,
                vocab_size=self.tokens.vocab_size,
                name=name,
            )
            for name in ("train", "valid")
        )
        for name, part in self.tokens.parts.items():
            # Every batch is looked at too; all of it here, before anything starts, where it is
            # quick (tenths of a second).
            if len(part) <= _TOKENS_TO_CHECK_AT_START:
                check_vocabulary(part, self.tokens.vocab_size, where=f"data part {name!r}")
        self._train.require(config.train.global_batch)
        self._valid.require(1)
        self.identity: Mapping[str, str | int] = {"digest": self.tokens.digest}

    def build_model(self) -> torch.nn.Module:
        """Build the decoder; see `build_decoder`."""
        return build_decoder(
            self._config.model,
            vocab_size=self.tokens.vocab_size,
            sequence_length=self._config.data.sequence_length,
            activation_checkpointing=self._config.train.activation_checkpointing,
            tp=self._config.distributed.tp,
        )

    def batches(self, position: int) -> Iterator[Batch]:
        """Yield global batches from a position on; each micro-batch is int64 (sample, token)."""
        train, data = self._config.train, self._config.data
        dataset = BatchDataset(
            self._train,
            seed=self._config.run.seed,
            position=position,
            places=self._places,
            stride=train.global_batch,
        )
        pinned = train.device != "cpu" and torch.cuda.is_available()
        start = "fork" if self._share.count == 1 else "spawn"
        for samples in iterate_batches(dataset, workers=data.workers, pinned=pinned, start=start):
            yield Batch(
                micro_batches=torch.split(samples, self._micro_batch),
                samples=train.global_batch,
                tokens=train.global_batch * data.sequence_length,
            )

    def loss(self, model: Any, micro_batch: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy in nats a token, plus the routers' loss if there is one."""
        output = model(input_ids=micro_batch[:, :-1], use_cache=False)
        loss = _cross_entropy(output.logits, micro_batch[:, 1:])
        router_loss = getattr(output, "aux_loss", None)
        return loss if router_loss is None else loss + router_loss_weight(model) * router_loss

    def evaluate(
        self, model: torch.nn.Module, stop_requested: Callable[[], bool]
    ) -> Mapping[str, float] | None:
        """Return `valid_loss` (nats a token) and `valid_perplexity` over held-out samples."""
        train = self._config.train
        size, share = self._micro_batch, self._share
        count = min(self._config.evaluation.batches * train.global_batch, len(self._valid))
        chosen = sample_indices(0, np.arange(count, dtype=np.int64), len(self._valid))
        device = next(model.parameters()).device
        # One place for each micro-batch: their sum has one order on any number of ranks.
        totals = [0.0] * -(-count // size)
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                for start in range(0, count, size * share.count):
                    if stop_requested():
                        return None
                    first = start + share.index * size
                    mine = chosen[first : first + size]
                    # A rank without a sample takes one all the same, and does not count it: the
                    # others wait for it in the sharded model's collectives.
                    samples = self._valid.take(mine if len(mine) else chosen[:1]).to(device)
                    logits = model(input_ids=samples[:, :-1], use_cache=False).logits
                    if len(mine):
                        loss_here = _cross_entropy(logits, samples[:, 1:]).double().item()
                        totals[first // size] = loss_here * len(mine)
        finally:
            model.train(was_training)
        loss = sum(share.sum(totals)) / count
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return dict(zip(METRICS, (loss, perplexity), strict=True))


def _samples_of_a_rank(config: LanguageConfig, share: DataShare) -> int:
    """Return the samples that one rank takes of a batch; UsageError where they do not divide."""
    train = config.train
    samples, rest = divmod(train.global_batch, share.count)
    if rest or samples % (train.micro_batch or 1):
        micro = f" in micro-batches of {train.micro_batch}" if train.micro_batch else ""
        raise UsageError(
            f"train.global_batch ({train.global_batch}) does not divide over the {share.count}"
            f" data-parallel ranks{micro}",
            hint="Change train.global_batch or train.micro_batch, or the number of ranks.",
        )
    return samples


def data_folder(data: DataConfig) -> Path:
    """Return the folder of prepared tokens, making that of a built-in source on first use."""
    if data.source != "python-stdlib":
        return Path(data.source).expanduser()
    cache = Path(data.cache or "~/.cache/keepstep").expanduser()
    return prepare_python_stdlib(
        cache,
        vocab_size=data.vocab_size,
        valid_share=data.valid_share,
        megabytes=data.megabytes,
    )


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over all tokens; logits (sample, token, vocabulary), in float32."""
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten())
