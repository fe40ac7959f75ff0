"""The plug-in keeps the promises of an environment, and its reward function is what its docstring says."""

from asyncrl_phonebook.rewards import terse

from asyncrl.envs.check import check_env


def test_it_keeps_the_promises_of_an_environment() -> None:
    """As `asyncrl envs check phonebook`."""
    report = check_env("phonebook")
    assert not report.problems, report.text()


def test_short_answers_earn_more() -> None:
    """From one to none."""
    assert [terse("4711"), terse("x" * 24), terse("x" * 99)] == [1.0, 0.5, 0.0]
