"""Commands that make, judge and list runs. Each parses its options; what it does is a module's of its own.

Nothing heavy is imported before the command runs. Called by `asyncrl.cli`.
"""

from __future__ import annotations

from pathlib import Path

from asyncrl.commands.options import Parser, run_folder, settings_of, typed


def train(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl train`."""
    from asyncrl.train import resume, train

    parser.add_argument("--resume", metavar="RUN", help="go on with a run; its own settings apply")
    parser.add_argument("--dry-run", action="store_true", help="explain the run, start nothing")
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live view")
    options, config = settings_of(parser, arguments)
    if options.resume is not None:
        if typed(options) or options.files:
            parser.error("--resume takes no settings: a run goes on with those it was started with")
        return resume(run_folder(options.resume), options.plain)
    return train(config, dry_run=options.dry_run, plain=options.plain)


def evaluate(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl eval`."""
    parser.add_argument("target", metavar="RUN_OR_MODEL", help="a run's folder or name, or a model folder")
    parser.add_argument("--tasks", type=int, metavar="INT", help="held-out tasks [eval.tasks]")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options, config = settings_of(parser, arguments)
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


def doctor(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl doctor`."""
    from asyncrl.doctor import doctor

    parser.add_argument("--dir", default="runs", help="folder that will hold the runs [runs]")
    text, status = doctor(Path(parser.parse_args(arguments).dir))
    print(text)
    return status
