"""The config that every task shares: one frozen dataclass a section.

The docstring under a field is its help text, on the command line and in the reference.
A field made with ``must_match()`` is part of what a run *is*: it cannot change when a run is
continued. Every other field may change, and takes effect from the first resumed step.
Cross-checks between fields live in ``checks.py``. A task adds its sections by subclassing `Config`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from keepstep.config.quantities import Duration, DurationOrNone, StepOrWord

MUST_MATCH = "must_match"
SCHEDULE_FREE = "schedulefree_adamw"
TRACKERS = ("tensorboard", "wandb", "trackio")
"""What `track.to` may name; each is also the name of its package."""


def must_match(default: Any = ...) -> Any:
    """Declare a field that is part of the run's identity; without a default it is required."""
    metadata = {MUST_MATCH: True}
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Who the run is and where it lives."""

    name: str = "run"
    """Name of the run, shown on the terminal and used for the default folder."""
    dir: str = ""
    """Folder of the run. Empty: `checkpoint.dir` if that is given, else `runs/<name>`."""
    seed: int = must_match(0)
    """Seed of every random number: initial weights, data order, dropout."""
    grace: Duration = "180s"
    """Time between the first signal and the moment the process leaves whatever it is doing."""
    time_limit: DurationOrNone = ""
    """Time from the start of the command after which it has saved and stopped; empty: none."""
    slurm_end_time: bool = True
    """Stop before the end of the Slurm job too, where SLURM_JOB_END_TIME tells of it."""
    hooks: tuple[str, ...] = ()
    """Hooks to call during the run, each as `module:Class`."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How steps are taken."""

    max_steps: int = 1000
    """Number of steps (batches taken) after which the run is finished."""
    global_batch: int = 16
    """Samples in one step, over all ranks and micro-batches."""
    micro_batch: int = 0
    """Samples in one forward pass; 0 takes the whole batch at once."""
    grad_clip: float = 1.0
    """Largest norm of the gradient; larger ones are scaled down to it. 0 does not clip."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward pass: float32, or bfloat16 under autocast."""
    compile: bool = False
    """Compile the model with torch.compile."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    deterministic: bool = True
    """Use only deterministic kernels, without which a resumed run is not exact on a GPU."""
    deterministic_reduction: bool = False
    """Sum gradients, losses and norms in one order, so that 1, 2, 4, ... ranks give the same bits;
    needs `micro_batch`, and costs time. `distributed.dp_replicate` is 2 at most."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto takes CUDA where there is one."""
    log_interval: int = 10
    """Steps between two lines of progress. The journal holds every step."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The rule that turns gradients into updates."""

    name: Literal["adamw", "sgd", "muon", "lion", "schedulefree_adamw"] = must_match("adamw")
    """Optimizer: adamw (fused), sgd, muon (matrices by Muon, everything else by AdamW), lion, or
    schedulefree_adamw (evaluates an average; wants a constant schedule). The last two need
    `pip install keepstep[optim]`."""
    rate: float = 1e-3
    """Peak learning rate; the schedule multiplies it."""
    weight_decay: float = 0.1
    """Weight decay of matrices, decoupled (sgd adds it to the gradient); vectors have none."""
    beta1: float = 0.9
    """AdamW and Lion: decay of the first moment. schedulefree_adamw: share of the average in the
    weights that are trained."""
    beta2: float = 0.95
    """AdamW: decay of the second moment; its authors' 0.999 for schedulefree_adamw. Lion: decay of
    its one moment, its authors' 0.99."""
    eps: float = 1e-8
    """AdamW: term added to the denominator."""
    momentum: float = 0.95
    """SGD and Muon: momentum."""
    nesterov: bool = True
    """SGD and Muon: Nesterov momentum."""
    adamw_rate: float = 1e-3
    """Muon: peak learning rate of the parameters that AdamW updates."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate as a pure function of the number of updates."""

    name: Literal["constant", "linear", "cosine", "wsd", "rex", "cosine_restarts"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: int = 0
    """Updates over which the rate rises linearly from 0 to its peak."""
    decay_steps: int = 0
    """wsd: updates of the decay at the end; the stable part is what remains."""
    decay: Literal["cosine", "linear", "sqrt"] = "linear"
    """wsd: shape of the decay."""
    floor: float = 0.1
    """Rate at the end, as a share of the peak; the last update really uses it."""
    cycles: int = 1
    """cosine_restarts: number of cycles."""
    damping: float = 1.0
    """cosine_restarts: factor on the peak of each next cycle."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation on held-out data, and what "best" means."""

    interval: int = 0
    """Steps between evaluations; 0 evaluates only at the end of the run."""
    at_end: bool = True
    """Evaluate at the last step as well."""
    batches: int = 16
    """Batches of held-out data in one evaluation."""
    metric: str = "valid_loss"
    """Metric that decides which checkpoint is the best."""
    mode: Literal["min", "max"] = "min"
    """Whether the smallest or the largest value of the metric is the best."""


@dataclass(frozen=True, kw_only=True)
class DenseWindowConfig:
    """A window of steps in which a strategy decides the saves in place of the interval."""

    start: int
    """First step of the window, always saved; 0 saves the initial weights before training."""
    stop: int
    """Last step of the window."""
    strategy: str = "power2"
    """Which steps are saved: power2 saves start and start + 2^k. Others by registration."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved, where, and which are kept."""

    dir: str = ""
    """Folder of the checkpoints. Empty: `checkpoints` in the run's folder."""
    layout: Literal["folders", "files"] = "folders"
    """files: one `.pth` a checkpoint, beside `latest.pth` and `best.pth`; ranks gather it whole."""
    interval: int = 100
    """Steps between scheduled saves; 0 makes none by the number of steps."""
    interval_time: DurationOrNone = ""
    """Time after which a save is due, at the next step, whatever its number; empty: none."""
    keep_last_n: int = 2
    """Number of newest checkpoints to keep; 0 keeps all."""
    keep_best_n: int = 1
    """Number of best checkpoints to keep."""
    keep_every: int = 0
    """Keep every checkpoint whose step is a multiple of this for ever; 0 keeps none so."""
    keep_hourly: int = 0
    """Keep the newest checkpoint of each of the last so many hours (UTC); 0 keeps none so."""
    keep_daily: int = 0
    """Keep the newest checkpoint of each of the last so many days (UTC); 0 keeps none so."""
    async_mode: Literal["disabled", "async", "bounded"] = "disabled"
    """async: a save returns at once and is written while training goes on; costs host memory, once
    the state. bounded: without the copy, and the next update waits until it is durable."""
    save_retries: int = 2
    """Further attempts, with back-off, when a save fails; then the run stops."""
    commit_method: Literal["auto", "rename", "manifest-last"] = "auto"
    """How a save becomes visible: auto renames its folder, and where the file system cannot, keeps
    it hidden until its manifest is there. manifest-last: say it where a rename is a copy."""
    verify_after_write: bool = False
    """Read each checkpoint back from the disk, before older ones are deleted; twice the time."""
    remote: str = ""
    """URL of an object store, as `s3://bucket/prefix`, where each checkpoint is put as well."""
    remote_timeout: Duration = "300s"
    """Time without progress after which a request to the remote has failed."""
    save_after_skipped_end: bool = False
    """Save at the last step even where its update was skipped as not finite."""
    on_resume: StepOrWord = "newest"
    """Where to continue: `newest`, `fresh` (needs an empty folder), or a step number."""
    dyn_ckpt_window: DenseWindowConfig | None = None
    """A window of dense saves, exempt from `keep_last_n`."""


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How the ranks share the work. Their number comes from the launcher."""

    dp_shard: int = 0
    """Ranks over which parameters, gradients and optimizer state are sharded; 0: all others."""
    dp_replicate: int = 1
    """Groups of ranks that each hold the whole model (HSDP)."""
    tp: int = 1
    """Ranks over which each matrix is split (tensor parallel), by the model's plan in transformers.
    They take the same samples."""
    join_within: Duration = "10min"
    """Time in which all ranks have to come when a session starts; then the missing are named."""
    lost_after: Duration = "8s"
    """Time without a sign of life after which a rank is taken for lost and all others end."""


@dataclass(frozen=True, kw_only=True)
class NonfiniteConfig:
    """What happens when the loss or the gradient norm is not finite."""

    policy: Literal["skip", "rollback", "stop"] = "skip"
    """skip: no update, the batch counts. rollback: go back to the newest whole checkpoint and past
    the batches that led there. stop: end the run at once."""
    max_consecutive: int = 10
    """skip: skipped steps in a row after which the run ends as diverged."""
    max_rollbacks: int = 3
    """rollback: how often a run goes back, all its sessions together; then it ends as diverged."""
    rollback_rate_factor: float = 1.0
    """Each rollback multiplies the learning rate by this, from there on; 1 leaves it as it is."""


@dataclass(frozen=True, kw_only=True)
class TrackConfig:
    """Where else the numbers of the journal go, for people to look at."""

    to: tuple[str, ...] = ()
    """Trackers: tensorboard, wandb, trackio. They need `pip install keepstep[trackers]`."""
    project: str = "keepstep"
    """W&B and trackio: project that the run belongs to; there it has the name `run.name`."""
    entity: str = ""
    """W&B: user or team. Empty: the one that W&B takes by itself."""
    group: str = ""
    """W&B: group of runs that it shows as one."""
    offline: bool = False
    """W&B: keep all in `track.dir`, for `wandb sync` to send; WANDB_MODE=offline does so too."""
    dir: str = ""
    """Folder of the files of TensorBoard and W&B, this run's own. Empty: the run's folder."""
    wait: Duration = "15s"
    """Time that trackers have at the end of the run for what they have not written yet; half of
    what is left of `run.grace` at the most."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a run is told. A task's config adds its own sections."""

    task: str = must_match("language")
    """What is trained."""
    run: RunConfig = RunConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    nonfinite: NonfiniteConfig = NonfiniteConfig()
    distributed: DistributedConfig = DistributedConfig()
    track: TrackConfig = TrackConfig()
