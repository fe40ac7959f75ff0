"""Commands that make model folders: from nothing, from demonstrations, from preference pairs.

Nothing heavy is imported before the command runs. Called by `asyncrl.cli`.
"""

from __future__ import annotations

from pathlib import Path

from asyncrl.commands.options import Parser, add_passes, made_from, passes


def init_model(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl init-model`."""
    parser.add_argument("folder", help="folder to make; must not exist")
    parser.add_argument("--hidden", type=int, default=64, metavar="INT", help="width, a multiple of 32 [64]")
    parser.add_argument("--layers", type=int, default=2, metavar="INT", help="layers [2]")
    parser.add_argument("--seed", type=int, default=0, metavar="INT", help="seed of the weights [0]")
    options = parser.parse_args(arguments)
    from asyncrl.settings import UsageError
    from asyncrl.toy import init_model

    folder = Path(options.folder).expanduser()
    if folder.exists():
        raise UsageError(f"{folder} exists; choose a folder that does not")
    try:
        init_model(folder, hidden=options.hidden, layers=options.layers, seed=options.seed)
    except (ValueError, OSError) as error:
        raise UsageError(f"cannot make {folder}: {error}") from error
    print(f"made {folder}. Next: asyncrl sft {folder} {folder}-sft")
    return 0


def sft(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl sft`."""
    parser.add_argument("--data", metavar="FILE.jsonl", help="conversations; default: the environment's answers")
    parser.add_argument("--loss", choices=("all", "assistant", "last"), help="what is trained of them [assistant]")
    add_passes(parser)
    options, config, model, out = made_from(parser, arguments)
    if options.data is not None:
        from asyncrl.learner.examples import Loss
        from asyncrl.learner.sft import train_file

        data = Path(options.data).expanduser()
        loss: Loss = options.loss or "assistant"
        train_file(config, model, out, data, loss, *passes(parser, options), print)
    else:
        if (options.loss, options.epochs, options.batch) != (None, None, None):
            parser.error("--loss, --epochs and --batch are for --data; without it the settings of [toy] apply")
        from asyncrl.launch import resolved
        from asyncrl.toy import warm_start

        warm_start(resolved(config), model, out, print)
    print(f"made {out}. Next: asyncrl train --model {out}")
    return 0


def dpo(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl dpo`."""
    parser.add_argument("--pairs", required=True, metavar="FILE.jsonl", help="chosen and rejected answers")
    parser.add_argument("--beta", type=float, default=0.1, metavar="FLOAT", help="pull to the initial model [0.1]")
    add_passes(parser)
    options, config, model, out = made_from(parser, arguments)
    if not 0 < options.beta < float("inf"):
        parser.error(f"--beta {options.beta}: a number above 0 is needed")
    from asyncrl.learner.dpo import train_file

    data = Path(options.pairs).expanduser()
    train_file(config, model, out, data, options.beta, *passes(parser, options), print)
    print(f"made {out}. Next: asyncrl eval {out}")
    return 0


def reward_model(parser: Parser, arguments: list[str]) -> int:
    """`asyncrl reward-model`."""
    parser.add_argument("--pairs", required=True, metavar="FILE.jsonl", help="chosen and rejected answers")
    parser.add_argument(
        "--held-out", type=float, default=0.1, metavar="FLOAT", help="share of the pairs to test on [0.1]"
    )
    add_passes(parser)
    options, config, model, out = made_from(parser, arguments)
    if not 0 <= options.held_out < 1:
        parser.error(f"--held-out {options.held_out}: a share from 0 to below 1 is needed")
    from asyncrl.learner.reward_model import train_file

    data = Path(options.pairs).expanduser()
    train_file(config, model, out, data, options.held_out, *passes(parser, options), print)
    print(f"made {out}")
    return 0
