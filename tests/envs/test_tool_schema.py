"""Schemas of plain functions: equal to those written by hand, and refused where they would mislead."""

from typing import Annotated, Any, Literal, Optional

import msgspec
import pytest

from asyncrl.envs.tool_schema import describe


def weather(
    city: str,
    days: int = 1,
    unit: Literal["celsius", "kelvin"] = "celsius",
    near: Optional[list[float]] = None,  # noqa: UP045 - the older spelling is what is tested
    limits: dict[str, int] | None = None,
    place: int | str = "here",
    *,
    exact: bool = False,
    more: Any = None,
) -> str:
    """Forecasts the weather.

    It knows large cities only.

    Args:
        city: the city's name,
            in English: no abbreviation.
        days (int, optional): how many.

        unit: of the temperature.
        exact: say it exactly.

    Returns:
        A sentence: not a number.
    """
    return city


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Forecasts the weather.\n\nIt knows large cities only.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "the city's name, in English: no abbreviation."},
                "days": {"type": "integer", "description": "how many.", "default": 1},
                "unit": {
                    "type": "string",
                    "enum": ["celsius", "kelvin"],
                    "description": "of the temperature.",
                    "default": "celsius",
                },
                "near": {"type": "array", "items": {"type": "number"}, "nullable": True},
                "limits": {"type": "object", "additionalProperties": {"type": "integer"}, "nullable": True},
                "place": {"type": ["integer", "string"], "default": "here"},
                "exact": {"type": "boolean", "description": "say it exactly.", "default": False},
                "more": {},
            },
            "required": ["city"],
        },
    },
}


def test_the_schema_of_a_function_is_the_one_that_is_written_by_hand() -> None:
    assert describe(weather)[0] == WEATHER


def test_a_method_is_described_without_its_self_and_a_function_without_parameters_has_none() -> None:
    class Clock:
        def now(self) -> str:
            """Tells the time."""
            return "noon"

    assert describe(Clock().now)[0]["function"] == {
        "name": "now",
        "description": "Tells the time.",
        "parameters": {"type": "object", "properties": {}},
    }


def test_limits_and_inner_types_are_kept() -> None:
    def fill(
        rows: list[list[int | None]],
        level: Annotated[int, msgspec.Meta(ge=1, le=9)],
        either: list[int] | str,
        mixed: Literal["a", 1],
    ) -> None:
        """Fills."""

    assert describe(fill)[0]["function"]["parameters"]["properties"] == {
        "rows": {"type": "array", "items": {"type": "array", "items": {"type": "integer", "nullable": True}}},
        "level": {"type": "integer", "minimum": 1, "maximum": 9},
        "either": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string"}]},
        "mixed": {"enum": [1, "a"]},
    }


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"city": "Bern"}, {"city": "Bern"}),
        ({"city": "Bern", "days": "3"}, {"city": "Bern", "days": 3}),
        ({"city": "Bern", "days": 3.0, "exact": "true"}, {"city": "Bern", "days": 3, "exact": True}),
        ({"city": "Bern", "near": [1, "2.5"]}, {"city": "Bern", "near": [1.0, 2.5]}),
        ({"city": "Bern", "near": None, "place": "5"}, {"city": "Bern", "near": None, "place": "5"}),
        ({"city": "7", "more": [{"a": 1}]}, {"city": "7", "more": [{"a": 1}]}),
    ],
)
def test_arguments_are_converted_where_the_meaning_is_clear(given: Any, taken: Any) -> None:
    assert describe(weather)[1](given) == taken


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "missing required field `city`"),
        ({"city": 7}, "Expected `str`, got `int` - at `$.city`"),
        ({"city": "Bern", "days": 1.5}, r"Expected `int`, got `float` - at `$.days`"),
        ({"city": "Bern", "days": None}, r"Expected `int`, got `null` - at `$.days`"),
        ({"city": "Bern", "unit": "miles"}, "Invalid enum value 'miles' - at `$.unit`"),
        ({"city": "Bern", "land": "CH"}, "unknown field `land`"),
        (["Bern"], "Expected `object`, got `array`"),
        ("Bern", "Expected `object`, got `str`"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_the_reason(given: Any, said: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        describe(weather)[1](given)
    assert said in str(caught.value)


class Other:
    pass


def _bare(city):
    """Something."""


def _wordless(city: str) -> None: ...


def _all(*cities: str) -> None:
    """Something."""


def _positional(city: str, /) -> None:
    """Something."""


def _foreign(other: Other) -> None:
    """Something."""


def _lists(numbers: list[int] | list[str]) -> None:
    """Something."""


def _lost(city: "Nowhere") -> None:  # type: ignore[name-defined] # noqa: F821
    """Something."""


def _typo(city: str) -> None:
    """Something.

    Args:
        town: its name.
    """


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_bare, "tool '_bare': parameter 'city' has no type hint; write for example `city: str`"),
        (_wordless, "tool '_wordless' has no docstring"),
        (_all, r"parameter '\*cities: .*str.*' cannot be given by name"),
        (_positional, "tool '_positional': parameter 'city: .*str.*' cannot be given by name"),
        (_foreign, "tool '_foreign': parameter 'other' has the type hint .*Other.*use int, float, str"),
        (_lists, "tool '_lists': parameter 'numbers' .*not supported.*use int, float, str"),
        (_lost, "tool '_lost': its type hints cannot be evaluated: name 'Nowhere' is not defined"),
        (_typo, "tool '_typo': its docstring describes 'town', which it does not take"),
        (lambda city: city, "has no name that a model can call"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_by_name_and_parameter(function: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        describe(function)
