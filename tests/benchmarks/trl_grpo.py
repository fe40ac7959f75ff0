"""Against TRL's GRPOTrainer: the same tiny model, task, batch, group size, token limits, and both cores.

TRL runs in an environment of its own (`--python`, with trl 1.16 and asyncrl installed), one process with two
threads. asyncrl runs its usual processes, one generator and one learner rank, with max_lag 4. Two tasks: short
sums, and answers of log-normal length (8 to 240 tokens). The learning rate is tiny, so that neither model changes
what it is measured on. The first third of the steps is warm-up. TRL's loss is its default, without a KL term;
both train once on each episode.

    python -m venv trl-venv && trl-venv/bin/pip install -c constraints.txt trl==1.16.0 .
    python tests/benchmarks/trl_grpo.py --python trl-venv/bin/python [--json FILE] [--steps 30]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

GROUPS, GROUP_SIZE, LR = 16, 8, 1e-7
LONG_TAIL = str(Path(__file__).with_name("long_tail.py").resolve()) + ":make"
TASKS = {
    "short sums": {"env": "arithmetic", "max_tokens": 8, "context": 48},
    "long-tailed": {"env": LONG_TAIL, "max_tokens": 256, "context": 288},
}
ASYNCRL = [sys.executable, "-P", "-m", "asyncrl"]


def ours(model: Path, task: dict, steps: int, folder: Path, extra: list[str]) -> dict[str, float]:
    """`asyncrl train` on the model; steps per minute after the warm-up."""
    from asyncrl.metrics.reader import RunReader

    command = [*ASYNCRL, "train", "--plain", "--model", str(model), "--run.dir", str(folder), "--name", "ours"]
    command += ["--env", task["env"], "--steps", str(steps), "--learner.lr", str(LR), "--algo.filter", "none"]
    command += ["--train.groups_per_step", str(GROUPS), "--train.group_size", str(GROUP_SIZE)]
    command += ["--sampling.max_tokens", str(task["max_tokens"]), "--checkpoint.every", str(10 * steps)]
    command += ["--generator.count", "1", "--staleness.max_lag", "4"]
    command += ["--generator.max_model_len", str(task["context"]), *extra]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=1800)
    with RunReader(folder / "ours") as reader:
        rows = reader.steps()[steps // 3 :]
    seconds = rows[-1].ended - rows[0].ended
    length = statistics.fmean(row.metrics["length_sampled"] for row in rows)
    return {"steps_per_min": 60 * (len(rows) - 1) / seconds, "mean_tokens": length}


def theirs(model: str, environment: str, max_tokens: int, steps: int) -> dict[str, float]:
    """TRL's trainer in this process; steps per minute after the warm-up."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from asyncrl.envs.registry import load

    torch.set_num_threads(2)
    source = load(environment, {})
    tasks = [source.task("train", i) for i in range(GROUPS * (steps + 1))]
    data = Dataset.from_list([{"prompt": task.prompt, "answer": str(task.answer)} for task in tasks])
    ended: list[float] = []
    lengths: list[float] = []

    def reward(completions: list, answer: list[str], completion_ids: list, **_: object) -> list[float]:
        lengths.append(statistics.fmean(map(len, completion_ids)))
        texts = [completion[0]["content"] for completion in completions]
        # The value hardly matters here; what matters is that it is cheap, and not the same within a group.
        return [float(text.strip() == gold) + len(text) * 1e-3 for text, gold in zip(texts, answer, strict=True)]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ended.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            out,
            per_device_train_batch_size=GROUPS * GROUP_SIZE,
            num_generations=GROUP_SIZE,
            max_completion_length=max_tokens,
            max_steps=steps,
            learning_rate=LR,
            lr_scheduler_type="constant",
            temperature=1.0,
            beta=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_steps=steps,
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
        )
        GRPOTrainer(model, reward, config, data, callbacks=[Clock()]).train()
    rows = ended[steps // 3 :]
    return {
        "steps_per_min": 60 * (len(rows) - 1) / (rows[-1] - rows[0]),
        "mean_tokens": statistics.fmean(lengths[steps // 3 :]),
    }


def make_model(folder: Path, environment: str, hidden: int, layers: int) -> Path:
    """A model of about 3 M parameters, warm-started so that its lengths are the task's."""
    raw, warm = folder / "raw", folder / "warm"
    size = ["--hidden", str(hidden), "--layers", str(layers)]
    subprocess.run([*ASYNCRL, "init-model", str(raw), *size], check=True)
    limits = ["--generator.max_model_len", "512", "--toy.warm_steps", "150", "--env", environment]
    subprocess.run([*ASYNCRL, "sft", str(raw), str(warm), *limits], check=True, stdout=subprocess.DEVNULL)
    return warm


def compare(name: str, options: argparse.Namespace) -> dict[str, float | str]:
    """Both systems on one task, one after the other."""
    task = TASKS[name]
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), task["env"], options.hidden, options.layers)
        mine = ours(model, task, options.steps, Path(folder), options.extra)
        command = [options.python, __file__, "--child", str(model), task["env"], str(task["max_tokens"])]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        command.append(str(options.steps))
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=3600, env=environment)
    other = json.loads(done.stdout.strip().splitlines()[-1])
    return {
        "task": name,
        "asyncrl_steps_per_min": round(mine["steps_per_min"], 1),
        "trl_steps_per_min": round(other["steps_per_min"], 1),
        "ratio": round(mine["steps_per_min"] / other["steps_per_min"], 2),
        "asyncrl_mean_tokens": round(mine["mean_tokens"], 1),
        "trl_mean_tokens": round(other["mean_tokens"], 1),
    }


def main() -> None:
    """Prints a table; writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", help="interpreter of an environment with trl 1.16 and asyncrl")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--task", choices=TASKS, action="append")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options, options.extra = parser.parse_known_args()
    if options.child:
        model, environment, max_tokens, steps = options.child
        print(json.dumps(theirs(model, environment, int(max_tokens), int(steps))))
        return
    if not options.python:
        parser.error("--python is needed; see the top of this file")
    rows = []
    for name in options.task or TASKS:
        rows.append(compare(name, options))
        print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    if options.json:
        import torch
        import transformers

        about = {"date": str(date.today()), "python": platform.python_version(), "torch": torch.__version__}
        about |= {"transformers": transformers.__version__, "trl": "1.16.0", "batch": f"{GROUPS} x {GROUP_SIZE}"}
        options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
