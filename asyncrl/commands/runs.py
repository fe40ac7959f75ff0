"""Commands that make, judge and list runs. Each parses its options; what it does is a module's of its own.

Nothing heavy is imported before the command runs. Called by `asyncrl.cli`.
"""

from __future__ import annotations

import os
from pathlib import Path

from asyncrl.commands.options import (
    Parser,
    add_key,
    add_parent,
    adopt,
    options_of,
    run_folder,
    settings_of,
    take_key,
    typed,
)


def train(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl train`."""
    from asyncrl import settings
    from asyncrl.train import resume, train

    more = "go on with a run; settings that are given too may say where and how long it runs, not what is trained"
    parser.add_argument("--resume", metavar="RUN", help=more)
    parser.add_argument("--dry-run", action="store_true", help="explain the run, start nothing")
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live view")
    add_key(parser)
    options = options_of(parser, arguments)
    take_key(parser, options)
    how = {"dry_run": options.dry_run, "plain": options.plain}
    if options.resume is not None:
        if options.key:
            parser.error("--resume takes no --key: a run goes on with its own")
        return resume(run_folder(options.resume), options.files, typed(options), **how)
    return train(settings.read(options.files, typed(options)), **how)


def evaluate(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl eval`."""
    parser.add_argument("target", metavar="RUN_OR_MODEL", help="a run's folder or name, or a model folder")
    parser.add_argument("--tasks", type=int, metavar="INT", help="held-out tasks [eval.tasks]")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_key(parser)
    options, config = settings_of(parser, arguments)
    take_key(parser, options)
    from asyncrl import keys
    from asyncrl.evaluate import report
    from asyncrl.launch import check_model, resolved, stored

    target = Path(options.target).expanduser()
    if (target / "config.json").is_file():
        model = target
    else:
        if typed(options) or options.files:
            parser.error("a run is evaluated with its own settings; to change them give its model folder instead")
        run_dir = run_folder(options.target)
        config, model = stored(run_dir), run_dir / "model"
        keys.use_run(run_dir, config.hub)
    check_model(model)
    tasks = config.eval.tasks if options.tasks is None else options.tasks
    if tasks < 1:
        parser.error(f"--tasks {tasks}: at least 1 task is needed")
    one = config.generator.model_copy(update={"count": 1, "gpus": []})
    config = resolved(config.model_copy(update={"generator": one}))
    text, status = report(config, str(model), tasks, as_json=options.json)
    print(text)
    return status


def runs(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl runs`."""
    from asyncrl.metrics.runs import list_runs

    parser.add_argument("--dir", default="runs", help="folder that holds the runs [runs]")
    print(list_runs(Path(parser.parse_args(arguments).dir)))
    return 0


def episodes(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl episodes`."""
    from asyncrl.metrics.summary import episodes_summary, list_episodes

    parser.add_argument("run", metavar="RUN", help="a run's folder or name")
    parser.add_argument("--summary", action="store_true", help="account for every admitted episode")
    parser.add_argument("--state", help="only episodes in this state, for example failed")
    parser.add_argument("--limit", type=int, default=20, metavar="INT", help="most rows [20]")
    options = parser.parse_args(arguments)
    run_dir = run_folder(options.run)
    if options.summary:
        text = episodes_summary(run_dir)
        print(text)
        return 0 if "\nadds up" in text else 1
    else:
        print(list_episodes(run_dir, state=options.state, limit=options.limit))
    return 0


def replay(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl replay`."""
    from asyncrl import replay, settings

    parser.add_argument("run", metavar="RUN", help="a run's folder or name; it may be going on")
    parser.add_argument("--steps", required=True, metavar="A..B", help="steps to train again, for example 5..12")
    parser.add_argument("--out", metavar="FOLDER", help="write the policy at the end, a Hugging Face folder")
    parser.add_argument("--json", action="store_true", help="print JSON, with all metrics")
    add_parent(parser)
    settings.add_flags(parser, replay.SETTINGS)
    rest, entries = settings.split_entries(arguments)
    options, unknown = parser.parse_known_args(rest)
    if unknown:
        only = "a replay has the run's settings; only --algo, --algo.* and --learner.ranks can be changed"
        parser.error(f"{unknown[0]}: {only}")
    vars(options).update(entries)
    adopt(options)
    out = Path(options.out).expanduser() if options.out else None
    if out is not None and out.exists() and "RANK" not in os.environ:
        raise settings.UsageError(f"--out {out} exists; choose a folder that does not")
    plan = replay.plan(run_folder(options.run), options.steps, settings.read([], typed(options)))
    return replay.run(plan, out, options.json, arguments)


def diff(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl diff`."""
    from asyncrl.diff import diff

    parser.add_argument("first", metavar="RUN1", help="a run's folder or name")
    parser.add_argument("second", metavar="RUN2", help="another one")
    options = parser.parse_args(arguments)
    text, status = diff(run_folder(options.first), run_folder(options.second))
    print(text)
    return status


def doctor(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl doctor`."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run's folder or name: check it, not the machine")
    parser.add_argument("--dir", default="runs", help="folder that will hold the runs [runs]")
    options = parser.parse_args(arguments)
    if options.run is not None:
        from asyncrl.doctor_run import doctor_run

        text, status = doctor_run(run_folder(options.run))
    else:
        from asyncrl.doctor import doctor

        text, status = doctor(Path(options.dir))
    print(text)
    return status
