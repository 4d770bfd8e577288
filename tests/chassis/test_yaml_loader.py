"""YAML that people write, and YAML that is written to hurt."""

import pytest
import yaml

from chassis.yaml_loader import MOST_VALUES, YamlLoader


def load(text: str) -> object:
    return yaml.load(text, Loader=YamlLoader)


def test_numbers_are_those_that_people_mean() -> None:
    assert load("a: 1e-3\nb: [2E6, 1.5e3, 7, x1e3]") == {"a": 1e-3, "b": [2e6, 1.5e3, 7, "x1e3"]}


def test_aliases_are_taken() -> None:
    text = "a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}"
    assert load(text) == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}


def test_what_aliases_stand_for_is_bounded() -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for name, last in zip("bcdef", "abcde", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{last}'] * 10)}]")
    load("\n".join(lines[:4]))
    with pytest.raises(yaml.YAMLError, match=f"more than {MOST_VALUES} values"):
        load("\n".join(lines))


@pytest.mark.parametrize("text", ["a: &a [*a]", "&a {b: [*a]}", "&a [[*a]]"])
def test_what_holds_itself_is_refused(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="an alias of what it is in"):
        load(text)


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? "])
def test_nesting_is_bounded(opening: str) -> None:
    with pytest.raises(yaml.YAMLError, match="values nested beyond 100"):
        load(opening * 5000)
    load("[" * 90 + "]" * 90)
