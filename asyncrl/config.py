"""Every setting of a run, typed: one small model per section, and `Config` that holds them.

It is not a parser (`asyncrl.settings` reads files and flags into it), holds no derived state beyond the
properties that state a formula, and imports neither torch nor an engine. Each field's docstring is the
help text of its flag: `learner.lr` is `--learner.lr` on the command line and `lr` under `[learner]` in TOML.
Called by the command line, and by every process, which gets the resolved configuration from the hub.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PositiveFloat, PositiveInt, model_validator

from asyncrl import contradictions

Dtype = Literal["float32", "bfloat16"]
NonNegative = Field(ge=0)


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys are errors, field docstrings are the help."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Run(Section):
    """The run and its folder."""

    name: str | None = None
    """Name of the run; default: algorithm, environment and the time of the start."""
    dir: str = "runs"
    """Folder that holds the runs' folders."""
    seed: int = 0
    """Seeds task order, sampling and initialisation."""
    deterministic: bool = False
    """Synchronous, every draw seeded and every sum in a fixed order: on a CPU two runs are bitwise equal, and so
    are an interrupted and an uninterrupted one. Also `--deterministic`."""


class Model(Section):
    """The policy."""

    path: str | None = None
    """Hugging Face folder of the initial model; default: the toy model, made and warm-started once."""
    dtype: Dtype = "float32"
    """Precision of the forward pass, in learner and engine; master weights are always float32. float16 is not
    offered: gradients of a batch's mean underflow in it."""
    renderer: str = "auto"
    """Who reads tool calls and appends turns. auto: asyncrl by the chat template, and for formats that it does not
    know the library `renderers`, if installed; template: never the library; or the name of one of its families."""


class Algo(Section):
    """The algorithm. `name` is a preset; every other key replaces one part of it (default: the preset's).

    `asyncrl algos` lists presets, parts and parameters. Parameters of a part: `--algo.loss_args.clip_high 0.3`."""

    name: str = "dapo"
    """Preset, or a plug-in of the entry-point group `asyncrl.algorithms`."""
    advantage: str | None = None
    """Advantage estimator."""
    advantage_args: dict[str, Any] = {}
    """Its parameters."""
    greedy_baseline: bool | None = None
    """Each group has one greedy episode besides, whose reward is the baseline; default: what the advantage
    estimator needs."""
    loss: str | None = None
    """Policy loss, as a function of log-probs and their ratios."""
    loss_args: dict[str, Any] = {}
    """Its parameters."""
    aggregation: str | None = None
    """How token losses become one number."""
    aggregation_args: dict[str, Any] = {}
    """Its parameters."""
    proximal: Literal["current", "recomputed", "behaviour", "loglinear"] | None = None
    """Denominator of the loss's ratio: the policy now, the policy before the batch's first minibatch, the engine's
    log-probs, or between now and those by lag."""
    correction: str | None = None
    """Off-policy correction: weight of each token; `none` switches it off."""
    correction_args: dict[str, Any] = {}
    """Its parameters."""
    rejection: str | None = None
    """Off-policy masks, separated by commas: which tokens or sequences are not trained; `none`: all are."""
    rejection_args: dict[str, Any] = {}
    """Their parameters."""
    filter: str | None = None
    """Group filter (dynamic sampling); `none` keeps every group."""
    filter_args: dict[str, Any] = {}
    """Its parameters."""
    shaping: str | None = None
    """Reward shaping, separated by commas, in order; `none`: the environment's rewards as they are."""
    shaping_args: dict[str, Any] = {}
    """Their parameters."""
    kl: str | None = None
    """Divergence from the reference model (the initial one); `none`: no such term, and no reference model."""
    kl_in: Literal["loss", "reward"] | None = None
    """Whether the divergence is added to the loss or taken from the reward, token by token."""
    kl_coef: float | None = Field(None, ge=0)
    """Its coefficient; with `kl_target` the first one."""
    kl_target: float | None = Field(None, ge=0)
    """Adaptive coefficient: the divergence per token that it aims for (Ziegler et al. 2019); 0: fixed."""
    kl_horizon: float | None = Field(None, gt=0)
    """Episodes over which the adaptive coefficient moves."""
    reference_every: int | None = Field(None, ge=0)
    """Steps after which the reference becomes a copy of the policy; 0: it stays the initial model."""
    entropy_bonus: float | None = Field(None, ge=0)
    """Coefficient of the entropy bonus."""


class Env(Section):
    """The environment."""

    name: str = "arithmetic"
    """Name of an installed environment (entry point `asyncrl.envs`), or `pkg.mod:make`, `file.py:make`."""
    args: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    max_turns: PositiveInt = 16
    """An episode that needs more turns is truncated."""
    timeout_s: PositiveFloat = 30.0
    """Time limit of each reset and step of the environment."""
    tool_tokens: PositiveInt = 1024
    """Most tokens of one tool's answer; what is longer is cut, and the model is told."""
    pass_rate: tuple[FiniteFloat, FiniteFloat] | None = None
    """Curriculum: a task is drawn again only while the mean reward of its last group lies within these bounds."""
    revisit: float = Field(0.1, ge=0.01, le=1)
    """Share of the other tasks that are drawn all the same, for the policy changes."""


class Reward(Section):
    """Rewards beside the environment's own: functions, a model. An episode's reward is the weighted sum of all."""

    functions: list[str] = []
    """Names of installed functions (entry point `asyncrl.rewards`), or `pkg.mod:function`, `file.py:function`."""
    weights: dict[str, FiniteFloat] = {}
    """Weight of each reward by name, the environment's own included; default 1. {"length": -0.01}"""
    timeout_s: PositiveFloat = 60.0
    """Time limit of each call of a function, and of each score of the model."""
    model: str | None = None
    """Hugging Face folder of a sequence classifier with one output, whose score is the reward named `model`. The
    supervisor starts the scorer that serves it."""
    model_device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """torch device of the scorer: cpu, cuda or cuda:1."""
    model_batch: PositiveInt = 16
    """Most conversations that the scorer computes at once."""
    endpoint: str | None = Field(None, pattern=r"^tcp://[^\s*/:]+:\d+$")
    """Address of the scorer, tcp://host:port. With `model`: where it listens; default: a free port of hub.host.
    Without: where a scorer runs that was started by hand (`asyncrl scorer`)."""


class Sampling(Section):
    """How the policy is sampled. Log-probs are taken after temperature and truncation."""

    temperature: PositiveFloat = 1.0
    """Softmax temperature; the learner divides its logits by the same number."""
    max_tokens: PositiveInt = 16
    """Most tokens of one assistant turn."""


class Train(Section):
    """The amount of training."""

    steps: PositiveInt = 300
    """Optimiser steps."""
    groups_per_step: PositiveInt = 32
    """Groups (tasks) in a batch."""
    group_size: PositiveInt = 8
    """Episodes of each task; they share a baseline."""


class Staleness(Section):
    """How far generation may run ahead, and what happens to tokens that are too old."""

    max_lag: int = Field(1, ge=0)
    """Versions by which admission may run ahead of training; 0 is synchronous on-policy training."""
    over_age: Literal["train", "mask", "wait"] = "train"
    """Tokens older than max_lag: train with importance correction, mask, or wait: seal in order of admission."""
    max_token_age: int = Field(64, ge=0)
    """With `train`: tokens with more lag than this are masked."""


class Replay(Section):
    """The replay buffer."""

    reuse: PositiveInt = 1
    """How many batches an episode may be part of."""
    order: Literal["fifo", "freshest", "priority"] = "fifo"
    """Which complete groups enter a batch first: oldest admitted, newest, or largest reward spread."""


class Generator(Section):
    """The generators: one process and one engine each."""

    count: PositiveInt = 2
    """Number of generator processes that the supervisor starts."""
    engine: str = "auto"
    """Inference engine: transformers (embedded), vllm, sglang, an installed one (entry point `asyncrl.engines`),
    or `pkg.mod:open`, `file.py:open`. auto: on a GPU the first installed of vllm and sglang, else transformers."""
    device: str = "cpu"
    """torch device type of the engine: cpu or cuda."""
    gpus: list[int] = []
    """GPUs of the generators on this machine, shared out in order; empty: all see what this process sees."""
    slots: PositiveInt = 64
    """Requests that the engine decodes at once."""
    ahead: int = Field(32, ge=0)
    """Episodes held beyond the slots, so that a freed slot is refilled without a round trip."""
    max_model_len: PositiveInt = 256
    """Longest sequence, prompt included, that a slot can hold."""
    chunk_tokens: PositiveInt = 128
    """Tokens of an episode after which they are streamed (also: each turn, and twice a second)."""
    stall_s: PositiveFloat = 300.0
    """An engine that owes tokens or an answer for so long is given up; its generator is restarted."""
    threads: PositiveInt = 1
    """Threads of the engine's CPU kernels."""
    cores: list[int] = []
    """CPU cores the generators are pinned to; empty: not pinned."""


class Vllm(Section):
    """The vLLM engine (generator.engine = vllm)."""

    driver: Literal["auto", "inprocess", "async"] = "auto"
    """inprocess: within the generator, one device; async: own processes. auto: async for more than one device."""
    tensor_parallel: PositiveInt = 1
    """GPUs that hold one copy of the model."""
    data_parallel: PositiveInt = 1
    """Copies of the model behind one generator."""
    memory_fraction: float = Field(0.85, gt=0, le=1)
    """Share of the GPU's memory that the engine may use (weights and KV cache), if kv_cache_mb is 0."""
    kv_cache_mb: float = Field(0, ge=0)
    """Size of the KV cache; 0: what memory_fraction leaves on a GPU, and on a CPU what all slots need."""
    eager: bool | None = None
    """No compilation and no CUDA graphs; default: on a CPU only."""
    batched_tokens: PositiveInt = 8192
    """Most tokens that one engine step computes, prompts included."""
    prefix_cache: bool = True
    """Share the KV cache of equal prompts; entries are kept apart by the version of the weights."""
    seeds: bool = True
    """A random stream for each request, which repeats the draws of an equal batch. Off, a GPU samples faster."""
    args: dict[str, Any] = {}
    """Further arguments of vLLM's EngineArgs."""


class Sglang(Section):
    """The SGLang engine (generator.engine = sglang)."""

    urls: list[str] = []
    """Servers that run already, one for each generator; empty: each generator starts its own."""
    python: str = ""
    """Python of the environment that has sglang, which need not be this one; default: this one."""
    tensor_parallel: PositiveInt = 1
    """GPUs that hold one copy of the model."""
    memory_fraction: float = Field(0.85, gt=0, le=1)
    """Share of the GPU's memory that the server may use (its --mem-fraction-static)."""
    args: dict[str, Any] = {}
    """Further flags of the server: {"attention-backend": "fa3"}; true stands for a flag without a value."""
    start_timeout_s: PositiveFloat = 600.0
    """Longest wait for a server to be ready."""


class Learner(Section):
    """The learner: FSDP2 ranks in the torchrun convention."""

    ranks: PositiveInt = 1
    """Learner processes that the supervisor starts."""
    device: str = "cpu"
    """torch device type: cpu (Gloo) or cuda (NCCL)."""
    gpus: list[int] = []
    """GPUs of the ranks on this machine, one each; empty: rank i takes the i-th that this process sees."""
    token_budget: PositiveInt = 8192
    """Most tokens of one packed row (one micro-batch)."""
    minibatches: PositiveInt = 1
    """Optimiser steps for each batch, each on as many of its groups; see `algo.proximal = recomputed`."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up."""
    warmup_steps: int = Field(10, ge=0)
    """Steps over which the learning rate grows linearly from 0."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's betas."""
    grad_clip: PositiveFloat = 1.0
    """Largest global gradient norm."""
    head_workspace_mb: PositiveInt | None = None
    """MiB for the RL head's logits, which exist for a chunk of tokens at a time; default: 1024, on a CPU 256. On a
    GPU, more than about 4000 tokens (4 bytes x vocabulary each) gain nothing, and fewer than 1000 make it slow."""
    threads: PositiveInt = 1
    """CPU threads of each rank."""
    stall_s: PositiveFloat = 600.0
    """A rank that takes longer for a step, its collectives included, is given up, and all ranks start again."""
    batch_s: PositiveFloat = 1800.0
    """Longest wait for a batch: without one nothing is sampled, or far too slowly, and the run fails."""
    cores: list[int] = []
    """CPU cores the ranks are pinned to; empty: not pinned."""


class Critic(Section):
    """The value model, for advantage estimators that need one (`--algo ppo`)."""

    path: str | None = None
    """Hugging Face folder that its backbone starts from; default: the policy's."""
    shared: bool = False
    """A value head on the policy's own hidden states in place of a backbone of its own."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate of a critic with its own backbone."""
    coef: float = Field(0.5, ge=0)
    """Coefficient of the value loss where it is added to the policy's (shared)."""
    clip: float = Field(0.5, ge=0)
    """A value moves at most this far from the one that the advantages were made with; 0: no clipping."""
    warmup_steps: int = Field(0, ge=0)
    """First steps in which the policy's own loss does not count, so that only the critic is trained; a shared one
    still moves the backbone."""


class ProcessReward(Section):
    """The implicit process reward model of PRIME (arXiv:2502.01456), trained on outcomes while the policy
    trains."""

    path: str | None = None
    """Hugging Face folder that it, and its own reference, start from; default: the policy's."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    beta: PositiveFloat = 0.05
    """Scale of the log-ratio: a token's reward is beta (log pi_phi - log ref)."""
    threshold: float = 0.5
    """Rewards above this count as success."""


class Weights(Section):
    """Publishing weights to the running engines."""

    bucket_mb: PositiveFloat = 256.0
    """Size of one broadcast bucket."""
    timeout_s: PositiveFloat = 60.0
    """Time limit of building a group and of each broadcast; on expiry the group is rebuilt."""
    kv: Literal["keep", "recompute"] = "keep"
    """What happens to the KV cache of running requests at an update."""
    backend: Literal["auto", "gloo", "nccl", "shm"] = "auto"
    """Transport. auto: nccl between GPUs, shm (shared memory) where learner and engine share one, else gloo."""


class Hub(Section):
    """The hub."""

    host: str = "127.0.0.1"
    """Address that the sockets bind to."""
    port: int = Field(0, ge=0, le=65534)
    """Control port; chunks use the next one. 0: two free ports are chosen."""
    curve: Literal["auto", "on"] = "auto"
    """ZeroMQ CURVE keys, made per run: encrypt, and refuse peers without them. auto: if `host` is not loopback."""
    lease_s: PositiveFloat = 30.0
    """A lease that is not extended for this long goes to another generator."""
    heartbeat_s: PositiveFloat = 1.0
    """Interval of the generators' heartbeats."""
    sync: Literal["normal", "full"] = "normal"
    """SQLite's `synchronous`: normal survives killed processes, full also a power cut."""
    journal_mb: float = Field(4096, ge=0)
    """Size of run.db above which the tokens that no kept checkpoint needs are removed, oldest first; 0: never."""


class Checkpoint(Section):
    """The learner's checkpoints."""

    every: PositiveInt = 20
    """Steps between checkpoints; the last step always gets one."""
    keep: int = Field(2, ge=2)
    """Newest checkpoints kept. At least 2: after a crash the newest may be ahead of run.db, and is passed over."""
    keep_every: int = Field(0, ge=0)
    """Checkpoints kept besides: those whose step is a multiple of this; 0: none."""
    keep_best: int = Field(0, ge=0)
    """Checkpoints kept besides: those with the highest mean reward (of the batches since the one before)."""
    timeout_s: PositiveFloat = 600.0
    """Time limit of writing one."""


class Supervise(Section):
    """The supervisor."""

    max_restarts: int = Field(5, ge=0)
    """Restarts of one process within `window_s` before the run is given up."""
    window_s: PositiveFloat = 120.0
    """Window over which restarts are counted."""
    backoff_s: PositiveFloat = 0.5
    """Delay before the second restart in a window; doubles each time, at most 10 s."""
    hang_s: float = Field(30.0, ge=2)
    """A process that gives no sign of life for this long, or whose event loop is blocked, is started again; there
    is a sign each second. Under a debugger that stops it, raise this."""
    grace_s: PositiveFloat = 30.0
    """Time that processes get to stop in order before they are killed."""
    start_timeout_s: PositiveFloat = 120.0
    """Longest wait of a process for the hub."""


class Eval(Section):
    """Evaluation on held-out tasks (`asyncrl eval`)."""

    tasks: PositiveInt = 512
    """Held-out tasks."""


class Track(Section):
    """Trackers besides run.db."""

    wandb: Literal["off", "offline", "online"] = "off"
    """Log to Weights & Biases (needs the extra `wandb`)."""
    wandb_project: str = "asyncrl"
    """Project at Weights & Biases."""
    tensorboard: bool = False
    """Write TensorBoard event files into the run's folder (needs the extra `tensorboard`)."""
    plugins: list[str] = []
    """Further trackers: installed ones (entry point `asyncrl.trackers`), or `pkg.mod:Class`, `file.py:Class`."""


class Toy(Section):
    """The toy model that is made when `model.path` is not given."""

    hidden: PositiveInt = 64
    """Width of the model, a multiple of 32."""
    layers: PositiveInt = 2
    """Layers of the model."""
    warm_steps: int = Field(1000, ge=0)
    """Most supervised steps that bring it to partial skill."""
    warm_rows: PositiveInt = 64
    """Demonstrations per supervised step."""
    warm_lr: PositiveFloat = 6e-3
    """Peak learning rate of the supervised steps."""
    warm_loss: float = Field(0.28, ge=0)
    """The supervised steps end once their loss, in nats per token of the answer, is below this; 0: never."""
    cache_dir: str = "~/.cache/asyncrl"
    """Where the made models are kept."""


class Config(Section):
    """A run's whole configuration."""

    run: Run = Run()
    model: Model = Model()
    algo: Algo = Algo()
    env: Env = Env()
    reward: Reward = Reward()
    sampling: Sampling = Sampling()
    train: Train = Train()
    staleness: Staleness = Staleness()
    replay: Replay = Replay()
    generator: Generator = Generator()
    vllm: Vllm = Vllm()
    sglang: Sglang = Sglang()
    learner: Learner = Learner()
    critic: Critic = Critic()
    process_reward: ProcessReward = ProcessReward()
    weights: Weights = Weights()
    hub: Hub = Hub()
    checkpoint: Checkpoint = Checkpoint()
    supervise: Supervise = Supervise()
    eval: Eval = Eval()
    track: Track = Track()
    toy: Toy = Toy()

    @model_validator(mode="after")
    def _check(self) -> Config:
        contradictions.refuse(self)
        return self

    @property
    def episodes_per_step(self) -> int:
        """`train.groups_per_step * train.group_size`."""
        return self.train.groups_per_step * self.train.group_size

    @property
    def max_groups_ahead(self) -> int:
        """Groups that may be admitted and not yet trained: `(max_lag + 1) * groups_per_step`."""
        return (self.staleness.max_lag + 1) * self.train.groups_per_step

    @property
    def capacity(self) -> int:
        """Episodes that one generator holds at once: `slots + ahead`."""
        return self.generator.slots + self.generator.ahead

    @property
    def weights_backend(self) -> str:
        """Transport of weights: `weights.backend`, or what fits both devices.

        A GPU cannot be two ranks of one NCCL group, so sharing one takes shared memory. Without `gpus` on both
        sides nothing says that they are different ones.
        """
        if self.weights.backend != "auto":
            return self.weights.backend
        if not (self.learner.device.startswith("cuda") and self.generator.device.startswith("cuda")):
            return "gloo"
        ours, theirs = set(self.learner.gpus), set(self.generator.gpus)
        return "nccl" if ours and theirs and not ours & theirs else "shm"
