"""The toy: a tiny Qwen3 model with a character tokenizer, so that the whole system runs on any machine.

`init_model` writes a complete Hugging Face folder (configuration, safetensors, tokenizer, chat template,
generation configuration) that loads offline in transformers and the engines; head_dim is 32, the smallest
that vLLM's CPU attention takes. `examples` turns an environment's demonstrations into supervised rows,
`warm_start` trains on them, and `default_model` does all of it once per machine and keeps the result.
The supervised training itself is `asyncrl.learner.sft`. Called by the command line; torch and transformers
are imported only when a model is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl import __version__
from asyncrl.chat import ChatFormat
from asyncrl.config import Config, Env, Learner
from asyncrl.datasets import Conversation
from asyncrl.envs.base import Demonstrates, Environment
from asyncrl.envs.opening import start_of
from asyncrl.envs.registry import load
from asyncrl.learner.examples import Example, encode
from asyncrl.messages import Task
from asyncrl.settings import UsageError

RECIPE = 1
"""Raised whenever the making of the default model changes in a way that no setting shows."""
HEAD_DIM = 32
ROLES = ("system", "user", "assistant", "tool")
SPECIAL_TOKENS = (
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    *(f"<|im_start|>{role}\n" for role in ROLES),
)
BYTES = 256
VOCAB_SIZE = BYTES + len(SPECIAL_TOKENS)
PAD_ID = BYTES + SPECIAL_TOKENS.index("<|pad|>")
END_ID = BYTES + SPECIAL_TOKENS.index("<|im_end|>")

CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}\
{%- for tool in tools %}{% set function = tool.function %}\
{{ function.name + '(' + function.parameters.properties | join(', ') + ')\\n' }}{% endfor %}\
{{ '<|im_end|>' }}{% endif %}\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}\
{%- for call in message.tool_calls or [] %}\
{%- set function = call.function or call %}\
{{ '<tool_call>' + {'name': function.name, 'arguments': function.arguments} | tojson + '</tool_call>' }}\
{%- endfor %}{{ '<|im_end|>' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""ChatML, as Qwen's, without line breaks between messages. Each role's header is one token. A tool is shown by its
name and parameters alone, for each character of its schema would be a token."""


# ---- the model -----------------------------------------------------------------------------------


def init_model(
    path: str | Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int | None = None,
    kv_heads: int | None = None,
    intermediate: int | None = None,
    context: int = 4096,
    seed: int = 0,
) -> Path:
    """Writes a randomly initialised model, complete with tokenizer, to a folder.

    Args:
        path: the folder; made if needed.
        hidden: width, a multiple of 32.
        layers: number of layers.
        heads: attention heads of 32 dimensions; default `hidden / 16`, twice the usual number: with few
            heads it is a matter of luck when a small model finds out how to add.
        kv_heads: key-value heads, a divisor of `heads` (grouped-query attention); default `heads`.
        intermediate: width of the feed-forward part; default three times `hidden`.
        context: longest sequence.
        seed: seeds the weights; torch's own random state is left alone.

    Returns:
        The folder.

    Raises:
        ValueError: a size is not possible.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    if hidden < HEAD_DIM or hidden % HEAD_DIM:
        raise ValueError(f"hidden = {hidden}: must be a positive multiple of {HEAD_DIM}, the size of a head")
    heads = heads or 2 * hidden // HEAD_DIM
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise ValueError(f"kv_heads = {kv_heads} must divide heads = {heads}")
    if layers < 1:
        raise ValueError(f"layers = {layers}: must be at least 1")
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=intermediate or 3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        # Grows as the width shrinks: with the usual 0.02 a model this small learns several times slower.
        initializer_range=hidden**-0.5,
        pad_token_id=PAD_ID,
        eos_token_id=END_ID,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]), _without_progress_bars():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        model.generation_config = GenerationConfig(pad_token_id=PAD_ID, eos_token_id=END_ID)
        model.save_pretrained(path)
    write_tokenizer(path)
    return Path(path)


def write_tokenizer(path: str | Path) -> None:
    """Writes the tokenizer: one token per byte, so one per printable ASCII character, and no merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)


# ---- the warm start ------------------------------------------------------------------------------


def examples(
    environment: Environment, chat: ChatFormat, seed: int, limit_s: float = Env().timeout_s
) -> Iterator[Example]:
    """Supervised rows without end: ideal episodes of training tasks, all assistant turns trained on.

    Tasks are drawn at random from the first 2**31 of the training split; an environment with fewer is cycled.
    `limit_s`: time limit of its `reset` and `close`.

    Raises:
        UsageError: the environment has no demonstrations, or the chat template cannot append their turns.
    """
    if not isinstance(environment, Demonstrates):
        raise UsageError(
            "the environment has no demonstration(task), so there is nothing to warm-start on; start from a model "
            "that is able to solve some of its tasks: --model.path FOLDER"
        )
    shows: Demonstrates = environment
    with asyncio.Runner() as runner:
        for task in _tasks(environment, seed):
            start = runner.run(start_of(environment, task, limit_s))
            shown = shows.demonstration(task)
            answers = [{"role": "assistant", "content": shown}] if isinstance(shown, str) else shown
            messages = [*start.messages, *answers]
            trained = [i >= len(start.messages) and m["role"] == "assistant" for i, m in enumerate(messages)]
            yield encode(chat, Conversation(f"the demonstration of {task.id}", messages, start.tools, trained))


def warm_start(config: Config, model: str | Path, out: str | Path, progress: Callable[[str], object]) -> None:
    """Trains a model on its environment's demonstrations and writes it to `out`.

    It ends once the loss is below `toy.warm_loss`, at the latest after `toy.warm_steps`. How many steps a model
    needs until it suddenly finds out how to add is a matter of luck; the loss says how skilled it is.

    Args:
        config: `[toy]` says how long and how fast, `[env]` on what, `[learner]` the rest.
        model: Hugging Face folder to start from.
        out: folder to make.
        progress: called with a line of text, now and then.

    Raises:
        UsageError: the environment has no demonstrations.
    """
    from asyncrl.learner.sft import train_sft

    environment, chat = load(config.env.name, config.env.args), ChatFormat(model, config.model.renderer)
    rows = examples(environment, chat, config.run.seed, config.env.timeout_s)
    steps, started = config.toy.warm_steps, time.monotonic()
    recent: deque[float] = deque(maxlen=LOSS_WINDOW)

    def on_step(step: int, loss: float) -> bool:
        recent.append(loss)
        mean = sum(recent) / len(recent)
        reached = len(recent) == LOSS_WINDOW and mean < config.toy.warm_loss
        if reached or step == steps or step % 50 == 0:
            progress(f"warm start: step {step}, loss {mean:.3f}, {time.monotonic() - started:.0f} s")
        return reached

    with _without_progress_bars():
        train_sft(config, model, out, rows, steps, config.toy.warm_rows, config.toy.warm_lr, on_step)


def default_model(config: Config, progress: Callable[[str], object]) -> Path:
    """The warm-started toy model for this configuration: from the cache, or made now.

    The cache key covers everything that influences the weights. The folder appears in one rename, so two runs
    that make it at the same time both get a complete one, and a killed run leaves none.

    Raises:
        UsageError: the cache folder cannot be written, or the environment has no demonstrations.
    """
    config = config.model_copy(update={"learner": Learner(betas=WARM_BETAS, threads=config.learner.threads)})
    cache = Path(config.toy.cache_dir).expanduser()
    folder = cache / f"toy-{config.toy.hidden}x{config.toy.layers}-{_key(config)}"
    if folder.is_dir():
        return folder
    progress(f"making the toy model, once: at most {config.toy.warm_steps} supervised steps on {config.env.name}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=cache))
    except OSError as error:
        raise UsageError(f"toy.cache_dir = {cache} cannot be written: {error}; choose another one") from error
    try:
        raw = init_model(scratch / "raw", hidden=config.toy.hidden, layers=config.toy.layers, seed=config.run.seed)
        if config.toy.warm_steps:
            warm_start(config, raw, scratch / "warm", progress)
        _publish(scratch / "warm" if config.toy.warm_steps else raw, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress(f"toy model: {folder}")
    return folder


# ---- machinery -----------------------------------------------------------------------------------

LOSS_WINDOW = 10
"""Steps over which the loss is averaged before it is compared with `toy.warm_loss`."""
WARM_BETAS = (0.9, 0.99)
"""AdamW's betas of the warm start; with 0.95 its accuracy jumps about from step to step."""


def _key(config: Config) -> str:
    """A hash of all that the default model depends on."""
    parts: Sequence[Any] = (
        config.model.dtype,
        RECIPE,
        __version__,
        config.toy.model_dump(mode="json", exclude={"cache_dir"}),
        config.env.model_dump(mode="json", include={"name", "args"}),
        config.learner.model_dump(mode="json", exclude={"threads", "cores"}),
        config.run.seed,
        SPECIAL_TOKENS,
        CHAT_TEMPLATE,
    )
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _publish(made: Path, folder: Path) -> None:
    """Moves a complete model to its place; if another run was faster, its model stands."""
    try:
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():
            raise


def _tasks(environment: Environment, seed: int) -> Iterator[Task]:
    """Random training tasks without end."""
    draw = random.Random(seed)
    limit = 2**31
    while True:
        index = draw.randrange(limit)
        try:
            yield environment.task("train", index)
        except IndexError:
            # The split is finite and shorter than the draw; halving finds a limit that it can serve.
            if index == 0:
                raise UsageError(
                    "the environment has no training task, so there is nothing to learn from"
                ) from None
            limit = index


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Keeps transformers from drawing bars for models that load in no time."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
