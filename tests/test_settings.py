"""Settings: precedence of files and flags, and errors that teach."""

import argparse
from pathlib import Path

import pytest

from asyncrl import settings
from asyncrl.config import Config
from asyncrl.settings import UsageError


def _error(files: list[str], flags: dict[str, str | None]) -> str:
    with pytest.raises(UsageError) as caught:
        settings.read(files, flags)
    return str(caught.value)


def test_flags_win_over_files_and_later_files_over_earlier_ones(tmp_path: Path) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("[train]\nsteps = 1\ngroup_size = 2\n[learner]\nlr = 0.5\n")
    second.write_text("[train]\nsteps = 3\n")
    config = settings.read([f"@{first}", f"@{second}"], {"learner.lr": "0.25"})
    assert (config.train.steps, config.train.group_size, config.learner.lr) == (3, 2, 0.25)


def test_every_setting_can_be_given_as_a_flag_and_read_back_from_json() -> None:
    config = settings.read([], {"learner.betas": "[0.8, 0.9]", "env.args": '{"digits": 1}', "model.path": "null"})
    assert config.learner.betas == (0.8, 0.9)
    assert config.env.args == {"digits": 1}
    assert settings.from_json(config.model_dump_json()) == config


def _read_line(line: list[str], files: list[str], flags: dict[str, str | None]) -> Config:
    rest, entries = settings.split_entries(line)
    assert rest == []
    return settings.read(files, flags | entries)


@pytest.mark.parametrize("line", [["--algo.loss_args.clip_high", "0.3"], ["--algo.loss_args.clip_high=0.3"]])
def test_an_entry_of_a_table_can_be_given_as_a_flag(line: list[str]) -> None:
    assert _read_line(line, [], {}).algo.loss_args == {"clip_high": 0.3}


def test_an_entry_changes_its_table_and_nothing_else_of_it(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[algo.loss_args]\nclip_low = 0.1\nclip_high = 0.2\n[env.args]\ndigits = 1\n")
    line = ["--algo.loss_args.clip_high", "0.3", "--env.args.hard=true"]
    config = _read_line(line, [f"@{file}"], {})
    assert config.algo.loss_args == {"clip_low": 0.1, "clip_high": 0.3}
    assert config.env.args == {"digits": 1, "hard": True}
    config = _read_line(line, [f"@{file}"], {"algo.loss_args": '{"clip_high": 9, "clip_dual": 3}'})
    assert config.algo.loss_args == {"clip_high": 0.3, "clip_dual": 3}


@pytest.mark.parametrize(
    ("typed", "value"),
    [("3", 3), ("-0.5", -0.5), ("true", True), ("null", None), ("[1, 2]", [1, 2]), ("fa3", "fa3"), ("a=b", "a=b"),
     ("", "")],
)  # fmt: skip
def test_the_value_of_an_entry_is_json_or_else_text(typed: str, value: object) -> None:
    assert _read_line(["--vllm.args.x", typed], [], {}).vllm.args == {"x": value}
    assert _read_line([f"--vllm.args.x={typed}"], [], {}).vllm.args == {"x": value}


def test_an_entry_of_a_table_in_a_table_has_one_more_dot() -> None:
    line = ["--algo.advantage_args.weights.format", "0.5", "--algo.advantage_args.weights.answer", "2"]
    assert _read_line(line, [], {}).algo.advantage_args == {"weights": {"format": 0.5, "answer": 2}}


def test_only_entries_of_tables_are_taken_out_of_a_command_line() -> None:
    line = ["@a.toml", "--algo.loss_argz.x", "1", "--learner.lr", "2", "--env.args", "{}", "--env.args.y", "-z"]
    assert settings.split_entries(line) == (line[:-2], {"env.args.y": "-z"})


def test_an_entry_without_a_value_or_of_what_is_no_table_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--env\.args\.digits needs a value"):
        settings.split_entries(["--env.args.digits"])
    text = _error([], {"env.args": "three", "env.args.digits": "1"})
    assert text == "--env.args.digits 1 cannot be set: env.args = 'three' is no table"


def test_a_flag_is_no_value_of_an_entry_unless_it_is_joined_to_it() -> None:
    with pytest.raises(UsageError, match=r"--algo\.loss_args\.clip_high needs a value, and --steps follows"):
        settings.split_entries(["--algo.loss_args.clip_high", "--steps", "5"])
    assert settings.split_entries(["--env.args.y=--z"]) == ([], {"env.args.y": "--z"})


def test_a_bad_value_of_an_entry_names_the_entry_and_where_it_was_given(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[reward.weights]\na = 'high'\n")
    assert f"{file}, [reward] weights.a = 'high': " in _error([f"@{file}"], {})
    assert "--reward.weights.a = 'hello': " in _error([f"@{file}"], {"reward.weights.a": "hello"})
    assert "--reward.weights.a = 'hello': " in _error([], {"reward.weights": '{"a": "hello"}'})


def test_an_unknown_flag_names_the_nearest_one() -> None:
    assert "Did you mean --learner.lr?" in settings.unknown_flag("--learner.lrr")
    assert "Did you mean --staleness.max_lag?" in settings.unknown_flag("--max_lag")


def test_an_unknown_key_in_a_file_names_the_file_and_the_nearest_key(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nstepz = 5\n")
    text = _error([f"@{file}"], {})
    assert "unknown setting train.stepz" in text
    assert f"{file}, [train] stepz" in text
    assert "Did you mean train.steps?" in text


def test_a_bad_choice_lists_what_is_allowed_and_guesses() -> None:
    text = _error([], {"staleness.over_age": "masq"})
    assert text == (
        "--staleness.over_age = 'masq': not one of the allowed values. Allowed: train, mask, wait. "
        "Did you mean mask?"
    )


def test_a_bad_number_says_which_flag_and_what_it_is_for() -> None:
    assert "--learner.lr = 'fast'" in _error([], {"learner.lr": "fast"})
    assert "Peak learning rate" in _error([], {"learner.lr": "fast"})


def test_settings_that_contradict_each_other_are_refused() -> None:
    assert "generator.max_model_len = 256" in _error([], {"sampling.max_tokens": "600"})
    assert "hub.lease_s = 2.0" in _error([], {"hub.lease_s": "2"})


@pytest.mark.parametrize("content", ["[train", "steps = 3"])
def test_a_broken_file_is_one_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(content)
    assert str(file) in _error([f"@{file}"], {})


def test_a_missing_file_is_one_error() -> None:
    assert "nowhere.toml does not exist" in _error(["@nowhere.toml"], {})


def test_every_setting_has_a_help_text() -> None:
    assert [key for key, field in settings.leaves() if not field.description] == []


def test_derived_numbers_follow_their_formulas() -> None:
    config = Config.model_validate({"train": {"groups_per_step": 3, "group_size": 5}, "staleness": {"max_lag": 2}})
    assert (config.episodes_per_step, config.max_groups_ahead) == (15, 9)


def test_a_switch_needs_no_value_and_is_its_setting() -> None:
    def config_of(*line: str) -> Config:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        settings.add_flags(parser)
        return settings.read([], vars(parser.parse_args(line)))

    for line in (["--deterministic"], ["--run.deterministic", "true"], ["--deterministic", "--steps", "3"]):
        assert config_of(*line).run.deterministic
    assert not config_of("--deterministic", "--run.deterministic", "false").run.deterministic
    assert not config_of().run.deterministic
