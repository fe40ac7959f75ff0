"""What travels between the processes: msgspec structs, and nothing else.

A message is one multipart ZeroMQ message: a msgpack header (one of the structs below, told apart by its
tag) followed by raw frames that carry token arrays in little-endian form. Nothing here opens a socket
(`asyncrl.transport` does), and nothing here imports torch: the hub, the generators, the learner and the
supervisor all import this module.

Arrays in frames: token ids are int32, log-probs are float32, both C-contiguous and unpadded.

What a server (hub, scorer) takes from its peers is bounded here, so that what can be decoded can be journalled:
numbers that SQLite holds, names, lists and tables of a sane length. A message beyond that is malformed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec

PROTOCOL = 4
"""Raised whenever a struct below changes its meaning; a peer with another number is refused."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number, an id, a step."""
Version = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
"""A version of the weights; -1: none."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""A duration; finite."""
Name = Annotated[str, msgspec.Meta(max_length=255)]
Ids = Annotated[list[Count], msgspec.Meta(max_length=65_536)]
Numbers = Annotated[dict[Name, float], msgspec.Meta(max_length=4096)]
"""Metrics, rewards or counts by name; not all need be finite."""


class Task(msgspec.Struct, frozen=True):
    """One problem of an environment. Everything in it must be expressible in JSON."""

    id: str
    prompt: list[dict[str, Any]]
    """Chat messages, `{"role": ..., "content": ...}`."""
    answer: Any = None
    metadata: dict[str, Any] = {}


class EpisodeStatus(StrEnum):
    """How an episode's last turn ended. A failed one has no reward (None), never a reward of 0."""

    COMPLETED = "completed"
    """The environment said that the episode is done."""
    TRUNCATED_LENGTH = "truncated_length"
    """The model ran into `sampling.max_tokens`; the episode is still rewarded and trained."""
    TRUNCATED_CONTEXT = "truncated_context"
    """Nothing more fits into the model's context, or the learner's row; still rewarded and trained."""
    TRUNCATED_TURNS = "truncated_turns"
    """The environment asked for more turns than `env.max_turns`."""
    FAILED_ENVIRONMENT = "failed_environment"
    """The environment raised or gave a malformed answer."""
    FAILED_REWARD = "failed_reward"
    """A reward function raised, or its reward is no number."""
    FAILED_TOOL = "failed_tool"
    """A tool cannot be used at all; one that only answers with an error does not fail the episode."""
    FAILED_PARSE = "failed_parse"
    """Messages and tokens cannot be turned into each other."""
    FAILED_TIME = "failed_time"
    """The environment or a reward did not answer within its time limit."""

    @property
    def is_failed(self) -> bool:
        """Whether the episode is dropped instead of trained."""
        return self.value.startswith("failed")


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A run of consecutive tokens of one branch of an episode that share version and origin."""

    n: int
    """Number of tokens, at least 1."""
    version: int
    """The weights' version that sampled them; -1 for observed tokens."""
    sampled: bool
    """True: sampled by the policy (trained on). False: prompt or environment text (observed only)."""
    fork: bool = False
    """A new branch of the episode begins here: what follows does not see what came before. The chat template
    renders the conversation so far in another way than it was sampled."""


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """What an environment answered, kept so that an episode can go on elsewhere. Turn 0 is its `reset`."""

    lease_id: Count
    episode_id: Count
    turn: Count
    seq: Count
    """Sequence number after the chunks that came before the answer."""
    messages: list[dict[str, Any]]
    """The environment's, without the assistant's."""
    tools: list[dict[str, Any]] = []
    """Turn 0: schemas of the tools."""
    rewards: Numbers = {}
    info: Numbers = {}
    snapshot: bytes | None = None
    """State of the environment after the turn, if it has snapshots."""


class Prefix(msgspec.Struct, frozen=True):
    """What is already durable of an episode. The lease's two frames hold its tokens and log-probs."""

    spans: list[Span] = []
    next_seq: int = 0
    """Sequence number that the episode's next chunk must carry."""
    turns: list[Turn] = []
    """In order; only the last one carries its snapshot."""


class Lease(msgspec.Struct, frozen=True, tag="lease"):
    """Hub to generator: run this episode. Frames: prefix tokens, prefix log-probs (observed: 0.0)."""

    lease_id: int
    episode_id: int
    task: Task
    seed: int
    """Seeds the episode's sampling; with the position in the sequence it fixes every draw."""
    prefix: Prefix = Prefix()
    greedy: bool = False
    """Sample with temperature 0: the episode is the baseline of its group."""


# ---- a peer introduces itself --------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Any process to hub: first message, and again whenever the hub asks (`Rehello`)."""

    role: Name
    """`generator`, `learner`, `publisher` (the learner's weight sender) or `supervisor`."""
    name: Name
    """Stable across restarts, for example `generator-0`."""
    incarnation: Name
    """New for each start of the process; tells a restart from a reconnect."""
    pid: Count = 0
    protocol: int = PROTOCOL
    capacity: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    """Generator: the number of episodes that it is willing to hold at once."""
    version: Version = -1
    """Generator: version of the weights it has loaded, -1 for none. Learner: its optimiser step."""
    leases: Ids = []
    """Generator: leases that it is still running, or whose end is not acked."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Hub to any process: the answer to `Hello`."""

    config: bytes
    """The run's resolved configuration as JSON."""
    run_dir: str
    data_endpoint: str
    """Where a generator sends its chunks."""
    version: int
    """Latest published version."""
    step: int
    """Last learner step that is recorded as done."""


class Rehello(msgspec.Struct, frozen=True, tag="rehello"):
    """Hub to a peer that it does not know (the hub was restarted): say `Hello` again."""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Generator to hub, every `hub.heartbeat_s`: extends the leases that it names."""

    leases: Ids = []
    stats: Numbers = {}
    """Metrics since the last heartbeat, by name (see `asyncrl.metrics`)."""


class Revoke(msgspec.Struct, frozen=True, tag="revoke"):
    """Hub to generator: these leases are no longer yours; abort them and send nothing more of them."""

    leases: list[int]
    reason: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Hub to generator or learner: finish what is in hand, then exit with status 0."""

    reason: str
    restart: bool = False
    """Generator: exit with status 1 instead, so that the supervisor starts it anew."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Hub to any process: what you sent cannot be accepted; exit with status 2 and this text."""

    reason: str


# ---- chunks ------------------------------------------------------------------------------------


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Header of one chunk: consecutive tokens of one episode, one version, one origin."""

    lease_id: Count
    episode_id: Count
    seq: Count
    """0, 1, 2 ... within the episode, across leases."""
    n: Count
    version: Version
    sampled: bool
    fork: bool = False
    """As `Span.fork`."""


class EpisodeEnd(msgspec.Struct, frozen=True, array_like=True):
    """The episode is over; `seq` is the sequence number after its last chunk."""

    lease_id: Count
    episode_id: Count
    seq: Count
    status: Name
    """An `EpisodeStatus` value."""
    reward: float | None
    """Weighted sum of `rewards`; None when it failed or has none."""
    turns: Count
    detail: str = ""
    """The reason, for a failed episode."""
    rewards: Numbers = {}
    """Its parts by name, before their weights: the environment's, summed over turns, and those of the reward
    functions and model. Without those that are missing; empty when it failed."""
    info: Numbers = {}
    """Named counts of the episode: tool_calls, tool_errors, forks, and the environment's own."""


class Chunks(msgspec.Struct, frozen=True, tag="chunks"):
    """Generator to hub. Frames: all chunks' tokens concatenated, all chunks' log-probs concatenated."""

    message_id: Count
    chunks: list[Chunk] = []
    turns: list[Turn] = []
    ends: list[EpisodeEnd] = []


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """Hub to generator: message `message_id` is durable; forget it."""

    message_id: int
    refused: list[int] = []
    """Leases named in the message that have lapsed; nothing of theirs was kept."""


# ---- scorer ------------------------------------------------------------------------------------


class Score(msgspec.Struct, frozen=True, tag="score"):
    """Generator to scorer: what does the reward model think of this conversation?"""

    request: Count
    """Unique among the sender's requests. One may be sent again: while it waits it counts once, and one that was
    answered meanwhile is computed again, to the same score."""
    conversation: list[dict[str, Any]]
    """Chat messages."""


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    """Scorer to generator: the answer to `Score`."""

    request: int
    score: float | None
    """None: this conversation cannot be scored, for `reason`."""
    reason: str = ""


# ---- learner -----------------------------------------------------------------------------------


class NextBatch(msgspec.Struct, frozen=True, tag="next_batch"):
    """Learner rank to hub: give me my share of the batch for `step` (1, 2, ...)."""

    step: Count
    rank: Count
    ranks: Annotated[int, msgspec.Meta(ge=1, le=65_536)]


class EpisodeMeta(msgspec.Struct, frozen=True, array_like=True):
    """One episode of a batch, as every rank sees it."""

    episode_id: int
    group_id: int
    reward: float | None
    status: str
    length: int
    """Tokens in all."""
    sampled: int
    """Tokens that the policy sampled."""
    rewards: dict[str, float] = {}
    """Parts of `reward` by name, before their weights: the environment's, summed over turns, and those of the
    reward functions and model."""
    greedy: bool = False
    """A greedy episode: a baseline of its group, in no row, not trained."""


class Batch(msgspec.Struct, frozen=True, tag="batch"):
    """Hub to learner rank. Frames: tokens, log-probs of this rank's episodes, in the order of `rows`."""

    step: int
    batch_id: int
    episodes: list[EpisodeMeta]
    """All episodes of the batch, on all ranks."""
    rows: list[list[int]]
    """This rank's packed rows, each a list of indices into `episodes`. Every rank gets the same number
    of rows; a row may be empty."""
    spans: list[list[Span]]
    """For each episode of `rows`, in order: its runs of tokens."""


class StepDone(msgspec.Struct, frozen=True, tag="step_done"):
    """Learner rank 0 to hub: the optimiser step was applied."""

    step: Count
    batch_id: Count
    metrics: Numbers
    digest: str = ""
    """Fingerprint of the learner's state (parameters, moments) after the step: equal states, equal digests."""


class StepFailed(msgspec.Struct, frozen=True, tag="step_failed"):
    """Learner rank 0 to hub: the step was not applied (a loss or gradient is not finite)."""

    step: Count
    batch_id: Count
    reason: str


class Checkpointed(msgspec.Struct, frozen=True, tag="checkpointed"):
    """Learner rank 0 to hub: a checkpoint of `step` is complete on disk."""

    step: Count
    path: str
    kept: Ids = []
    """Steps of all complete checkpoints that are there now, this one included."""


class CheckpointFault(msgspec.Struct, frozen=True, tag="checkpoint_fault"):
    """Learner rank 0 to hub: a checkpoint is damaged and was passed over, or could not be written."""

    what: Literal["checkpoint_passed_over", "checkpoint_failed"]
    detail: str
    """Which one, and why."""
    kept: Ids = []
    """Steps of all complete checkpoints that are there now."""


# ---- weights -----------------------------------------------------------------------------------


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """One parameter within a bucket."""

    name: str
    dtype: str
    """torch's name without `torch.`, for example `float32`."""
    shape: list[int]


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """Publisher to hub: I hold weights of `version`; who needs them?"""

    version: Version
    store_host: str
    store_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)]
    """0: no group is built (shared memory)."""
    buckets: list[list[TensorMeta]]
    addresses: list[str] = []
    """Shared memory only: where the buckets lie, and last the trailer that proves them."""


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Hub to generator: get ready to receive `version` as `rank` (1..) of group `epoch`."""

    epoch: int
    version: int
    store_host: str
    store_port: int
    rank: int
    world_size: int
    backend: str
    buckets: list[list[TensorMeta]]
    addresses: list[str] = []
    """See `Offer`."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Generator to hub: my receiver waits for `Go`."""

    epoch: Count
    version: Version


class Go(msgspec.Struct, frozen=True, tag="go"):
    """Hub to publisher and members: build the group of `epoch` if you do not have it, then broadcast.

    `members` names the generators by rank (1..). An empty list means that nobody needs the version."""

    epoch: int
    version: int
    members: list[str] = []


class Applied(msgspec.Struct, frozen=True, tag="applied"):
    """Generator to hub: `version` is in use."""

    epoch: Count
    version: Version
    pause_s: Seconds
    transfer_s: Seconds


class TransferFailed(msgspec.Struct, frozen=True, tag="transfer_failed"):
    """Generator or publisher to hub: the transfer of `version` in group `epoch` failed."""

    epoch: Count
    version: Version
    reason: str
    refused: bool = False
    """The version itself is at fault (damaged, not finite, for another model): do not send it again."""


class Sent(msgspec.Struct, frozen=True, tag="sent"):
    """Publisher to hub: the broadcast of `version` in group `epoch` is complete."""

    epoch: Count
    version: Version
    seconds: Seconds
    nbytes: Count


class Resync(msgspec.Struct, frozen=True, tag="resync"):
    """Hub to publisher: offer your latest weights again (a generator joined or a transfer failed)."""

    reason: str


# ---- supervisor --------------------------------------------------------------------------------


class ProcessEvent(msgspec.Struct, frozen=True, tag="process_event"):
    """Supervisor to hub: a process started, died or was given up. Generator to hub: it leaves."""

    name: Name
    what: Name
    """`started`, `died`, `gave_up`; `left`: stopped in order, all that it had is durable."""
    detail: str = ""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Supervisor to hub: stop the run in order: no new leases, the learner stops after its step."""

    reason: str
    status: str = ""
    """Empty: only begin to stop. `finished`, `stopped` or `failed`: record that and exit; everybody else has."""


Message = (
    Hello | Welcome | Rehello | Heartbeat | Lease | Revoke | Stop | Refused | Chunks | Ack | NextBatch
    | Batch | StepDone | StepFailed | Checkpointed | CheckpointFault | Offer | Prepare | Ready | Go | Applied
    | TransferFailed | Sent | Resync | ProcessEvent | Shutdown | Score | Scored
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Encodes a message's header."""
    return _encoder.encode(message)


def decode(header: bytes | memoryview) -> Message:
    """Decodes a header.

    Raises:
        msgspec.DecodeError: the bytes are not msgpack.
        msgspec.ValidationError: no known message has this shape.
    """
    return _decoder.decode(header)
