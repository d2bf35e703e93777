"""What must hold between the fields of a config, beyond their types. Pure; needs no torch."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from keepstep.config.explain import Problem, suggestion
from keepstep.config.quantities import seconds
from keepstep.config.schema import SCHEDULE_FREE, TRACKERS, Config
from keepstep.config.strategies import strategy_names

_HOOK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://[^@?#\s]+")
_PROJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NAME_BYTES_MAX = 255
_YEAR_SECONDS = 366 * 86400
_Found = Iterator[tuple[str, str]]


def cross_checks(config: Config) -> list[Problem]:
    """Return everything that cannot be meant, each at the path where it is to be mended."""
    return _problems(config, [_ranges, _names, _hooks, _track, _train, _schedule, _checkpoint])


def single_checks(config: Config) -> list[Problem]:
    """Return what of single fields cannot be meant, whatever the others are."""
    return _problems(config, [_ranges, _names, _hooks, _track])


def _problems(config: Config, checks: list[Callable[[Config], _Found]]) -> list[Problem]:
    return [
        Problem(path=path, message=message) for check in checks for path, message in check(config)
    ]


def _ranges(config: Config) -> _Found:
    """Hold single numbers to their bounds."""
    bounds: list[tuple[str, Any, float, float]] = [
        ("run.seed", config.run.seed, 0, 2**63 - 1),
        ("train.max_steps", config.train.max_steps, 1, 2**53),
        ("train.global_batch", config.train.global_batch, 1, 2**31),
        ("train.micro_batch", config.train.micro_batch, 0, 2**31),
        ("train.grad_clip", config.train.grad_clip, 0, float("inf")),
        ("train.log_interval", config.train.log_interval, 1, 2**53),
        ("optimizer.weight_decay", config.optimizer.weight_decay, 0, 10),
        ("schedule.warmup_steps", config.schedule.warmup_steps, 0, 2**53),
        ("schedule.decay_steps", config.schedule.decay_steps, 0, 2**53),
        ("schedule.floor", config.schedule.floor, 0, 1),
        ("schedule.cycles", config.schedule.cycles, 1, 2**31),
        ("schedule.damping", config.schedule.damping, 0, 1),
        ("evaluation.interval", config.evaluation.interval, 0, 2**53),
        ("evaluation.batches", config.evaluation.batches, 1, 2**53),
        ("checkpoint.interval", config.checkpoint.interval, 0, 2**53),
        ("checkpoint.keep_last_n", config.checkpoint.keep_last_n, 0, 2**31),
        ("checkpoint.keep_best_n", config.checkpoint.keep_best_n, 0, 2**31),
        ("checkpoint.keep_every", config.checkpoint.keep_every, 0, 2**53),
        ("checkpoint.keep_hourly", config.checkpoint.keep_hourly, 0, 2**31),
        ("checkpoint.keep_daily", config.checkpoint.keep_daily, 0, 2**31),
        ("checkpoint.save_retries", config.checkpoint.save_retries, 0, 100),
        ("distributed.dp_shard", config.distributed.dp_shard, 0, 2**31),
        ("distributed.dp_replicate", config.distributed.dp_replicate, 1, 2**31),
        ("distributed.tp", config.distributed.tp, 1, 2**31),
        ("nonfinite.max_consecutive", config.nonfinite.max_consecutive, 1, 2**53),
        ("nonfinite.max_rollbacks", config.nonfinite.max_rollbacks, 1, 2**53),
    ]
    for path, value, low, high in bounds:
        if not low <= value <= high:
            limit = f"at least {low}" if value < low else f"at most {high:,}"
            yield path, f"must be {limit}, not {value}"
    for name in ("rate", "adamw_rate", "eps"):
        value = getattr(config.optimizer, name)
        if not value > 0:
            yield f"optimizer.{name}", f"must be greater than 0, not {value}"
    factor = config.nonfinite.rollback_rate_factor
    if not 0 < factor <= 1:
        message = f"must be greater than 0 and at most 1, not {factor}"
        yield "nonfinite.rollback_rate_factor", message
    for name in ("beta1", "beta2", "momentum"):
        value = getattr(config.optimizer, name)
        if not 0 <= value < 1:
            yield f"optimizer.{name}", f"must be at least 0 and less than 1, not {value}"


def _train(config: Config) -> _Found:
    train = config.train
    if train.micro_batch > 0 and train.global_batch % train.micro_batch:
        yield (
            "train.micro_batch",
            f"{train.micro_batch} does not divide train.global_batch ({train.global_batch})",
        )
    if train.deterministic_reduction:
        yield from _reduction(config)
    if train.compile and config.distributed.tp > 1:
        yield (
            "train.compile",
            "does not work with distributed.tp above 1 yet: torch cannot compile a vocabulary that"
            " is split over ranks",
        )
    if config.optimizer.name == SCHEDULE_FREE and config.optimizer.beta1 == 0:
        yield "optimizer.beta1", f"must be greater than 0 for {SCHEDULE_FREE}, which divides by it"
    nesterov_needs = config.optimizer.name == "sgd" and config.optimizer.nesterov
    if nesterov_needs and config.optimizer.momentum == 0:
        yield "optimizer.nesterov", "needs a momentum greater than 0; set it to false"


def _reduction(config: Config) -> _Found:
    """What rounds otherwise on other ranks cannot be had with a fixed order of sums."""
    needs = "train.deterministic_reduction needs"
    if config.train.micro_batch == 0:
        yield "train.micro_batch", f"{needs} a size that does not depend on the ranks, not 0"
    if not config.train.deterministic:
        yield "train.deterministic", f"{needs} deterministic kernels; leave it on"
    if config.train.compile:
        yield "train.compile", f"{needs} kernels that are the same on any ranks; turn it off"
    if config.distributed.tp > 1:
        yield "distributed.tp", f"{needs} whole matrices; leave it at 1"
    if config.distributed.dp_replicate > 2:
        yield "distributed.dp_replicate", f"{needs} at most 2 groups, whose sum has no order"


def _schedule(config: Config) -> _Found:
    """A schedule that cannot do what its numbers say is an error."""
    schedule, steps = config.schedule, config.train.max_steps
    if config.optimizer.name == SCHEDULE_FREE and schedule.name != "constant":
        yield (
            "schedule.name",
            f"must be 'constant' for {SCHEDULE_FREE}, not {schedule.name!r}: its average takes the"
            " place of a decay (schedule.warmup_steps is as ever)",
        )
    if schedule.decay_steps and schedule.name != "wsd":
        yield (
            "schedule.decay_steps",
            f"means nothing for {schedule.name!r}; it is the length of wsd's decay",
        )
    if schedule.name == "wsd" and schedule.decay_steps == 0:
        yield "schedule.decay_steps", "wsd needs the length of its decay"
    if steps < 1:
        return  # `_ranges` says so; no schedule fits into no steps.
    tail = schedule.decay_steps if schedule.name == "wsd" else 1
    if schedule.name != "constant" and schedule.warmup_steps + tail > steps:
        # The longer of the two is the one that is more likely meant otherwise.
        if tail > schedule.warmup_steps:
            yield (
                "schedule.decay_steps",
                f"{tail} steps of decay and {schedule.warmup_steps} of warm-up leave no room"
                f" within train.max_steps ({steps})",
            )
        else:
            yield (
                "schedule.warmup_steps",
                f"{schedule.warmup_steps} steps of warm-up leave no room for the decay"
                f" ({tail}) within train.max_steps ({steps})",
            )
    if schedule.name == "constant" and schedule.warmup_steps > steps:
        yield "schedule.warmup_steps", f"is longer than train.max_steps ({steps})"
    if schedule.name == "cosine_restarts" and schedule.cycles > steps - schedule.warmup_steps:
        yield "schedule.cycles", f"{schedule.cycles} cycles do not fit into the steps after warm-up"
    last_peak = schedule.damping ** (schedule.cycles - 1) if schedule.cycles >= 1 else 1.0
    if schedule.name == "cosine_restarts" and last_peak < schedule.floor:
        yield (
            "schedule.damping",
            f"the peak of the last cycle ({last_peak:g}) lies below schedule.floor"
            f" ({schedule.floor:g})",
        )


def _checkpoint(config: Config) -> _Found:
    checkpoint = config.checkpoint
    wish = checkpoint.on_resume
    if wish not in ("newest", "fresh") and not (wish.isascii() and wish.isdecimal()):
        yield "checkpoint.on_resume", f"must be newest, fresh or a step number, not {wish!r}"
    if checkpoint.layout == "files" and checkpoint.async_mode != "disabled":
        yield (
            "checkpoint.async_mode",
            f"{checkpoint.async_mode!r} needs checkpoint.layout = 'folders': one file is written"
            " while training waits",
        )
    if checkpoint.layout == "files" and checkpoint.commit_method == "manifest-last":
        yield (
            "checkpoint.commit_method",
            "'manifest-last' is for checkpoint.layout = 'folders': one file has no manifest beside"
            " it, and gets its name by a rename",
        )
    yield from _remote(config)
    window = checkpoint.dyn_ckpt_window
    if window is None:
        return
    names = strategy_names()
    if window.strategy not in names:
        yield (
            "checkpoint.dyn_ckpt_window.strategy",
            f"must be {' or '.join(names)}, not {window.strategy!r}"
            f"{suggestion(window.strategy, names)}",
        )
    if window.start < 0:
        yield "checkpoint.dyn_ckpt_window.start", f"must be at least 0, not {window.start}"
    if window.stop < window.start:
        yield (
            "checkpoint.dyn_ckpt_window.stop",
            f"{window.stop} lies before the window's start ({window.start})",
        )


def _remote(config: Config) -> _Found:
    """A remote is an address, and no more: what it may hold of credentials is not shown."""
    remote = config.checkpoint.remote
    if remote and not _REMOTE.fullmatch(remote):
        yield (
            "checkpoint.remote",
            "must be a URL such as s3://bucket/prefix, with no user, password, query or white"
            " space in it: credentials belong in the environment",
        )
    if remote and config.checkpoint.layout == "files":
        yield "checkpoint.remote", "needs checkpoint.layout = 'folders'"


def _names(config: Config) -> _Found:
    """Names and folders can be shown on one line, and lead where they seem to."""
    name = config.run.name
    if not name or name in (".", "..") or "/" in name or not name.isprintable():
        message = f"must be a plain name, not {name!r}; `run.dir` places the run anywhere"
        yield "run.name", message
    if len(name.encode("utf-8", "surrogatepass")) > _NAME_BYTES_MAX:
        yield "run.name", f"must be at most {_NAME_BYTES_MAX} bytes long: a folder is named so"
    for section in ("run", "checkpoint", "track"):
        path, folder = f"{section}.dir", getattr(config, section).dir
        if not folder.isprintable():
            yield path, f"must be the name of a folder, not {folder!r}"
    for path, duration in (
        ("run.grace", config.run.grace),
        ("run.time_limit", config.run.time_limit),
        ("checkpoint.interval_time", config.checkpoint.interval_time),
        ("checkpoint.remote_timeout", config.checkpoint.remote_timeout),
    ):
        if duration and not 0 < seconds(duration) <= _YEAR_SECONDS:
            yield path, f"must be more than 0 and at most a year, not {duration!r}"


def _hooks(config: Config) -> _Found:
    for name in config.run.hooks:
        if not _HOOK.fullmatch(name):
            yield "run.hooks", f"{name!r} is not of the form module:Class"


def _track(config: Config) -> _Found:
    track = config.track
    for number, name in enumerate(track.to):
        if name not in TRACKERS:
            known = " or ".join(TRACKERS)
            yield "track.to", f"must name {known}, not {name!r}{suggestion(name, list(TRACKERS))}"
        if name in track.to[:number]:
            yield "track.to", f"names {name!r} twice"
    if not _PROJECT.fullmatch(track.project):
        yield "track.project", f"must be letters, digits, `.`, `_` and `-`, not {track.project!r}"
    if not 0 < seconds(track.wait) <= _YEAR_SECONDS:
        yield "track.wait", f"must be more than 0 and at most a year, not {track.wait!r}"
