"""A question changed key by key: another price, another limit, another demand."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from chassis.near import did_you_mean, near_or_all
from scheduler.decision.record import Decision
from scheduler.problem.demands import hours_of
from scheduler.problem.fields import Fields, InputError
from scheduler.problem.workload import MAX_LIMIT, Resources, Workload

# Of a resource type, by the short name that a person types.
_TYPE_KEYS: Final[Mapping[str, str]] = {
    "price": "price_per_hour",
    "limit": "limit",
    "memory": "memory_bytes",
    "interruptions": "interruptions_per_hour",
    "recovery": "recovery_s",
    "restart": "restart_s",
}
_DEMANDS: Final = ("min-throughput", "max-price", "finish-by", "exclude", "allow")
_FULL: Final[Mapping[str, str]] = {"max-price-per-hour": "max-price", "floor": "min-throughput"}


class Question:
    """What a decision answered: workload, resources and demands, to be changed.

    `min_throughput` (samples/s), `max_price_per_hour` (dollars) and `finish_by` (hours) are 0
    where nothing is demanded.
    """

    def __init__(self, decision: Decision) -> None:
        """Take over the question of `decision`.

        Raises:
            InputError: the decision was stored without its inputs.
        """
        if decision.workload is None or decision.resources is None:
            raise InputError("", "decision", "without workload or resources; expected both")
        self.workload: Workload = decision.workload
        self.resources: Resources = decision.resources
        self.min_throughput = decision.min_throughput
        self.max_price_per_hour = decision.max_price_per_hour
        self.finish_by = decision.finish_by
        self.pin = dict(decision.pin)
        self.excluded = list(decision.excluded)

    def change(self, key: str, value: float | str) -> None:
        """Apply one change.

        Raises:
            InputError: an unknown key, or a value that cannot be used, with what was expected.
        """
        name = key.replace("_", "-")
        name = _FULL.get(name, name)
        kind, _, attribute = key.rpartition(".")
        if kind in self.resources.names:
            self._change_type(key, kind, attribute, value)
        elif name == "min-throughput":
            self.min_throughput = _number(key, value)
        elif name == "max-price":
            self.max_price_per_hour = _number(key, value)
        elif name == "finish-by":
            # A deadline takes the place of the floor that the decision was made with.
            self.min_throughput = 0.0
            self.finish_by = 0.0 if value in (0, "0") else hours_of(key, value)
        elif name == "exclude":
            _one_of(key, value, self.resources.names, "a type on offer")
            self.excluded.append(str(value))
        elif name == "allow":
            _one_of(key, value, self.excluded, "an excluded type")
            self.excluded.remove(str(value))
        elif key.startswith("pin."):
            layer = key.removeprefix("pin.")
            _one_of(key, layer, [layer.name for layer in self.workload.layers], "a layer")
            _one_of(key, value, self.resources.names, "a type on offer")
            self.pin[layer] = str(value)
        else:
            raise InputError("", key, f"unknown key{self._hint(key)}")

    def _change_type(self, key: str, kind: str, attribute: str, value: float | str) -> None:
        name = _TYPE_KEYS.get(attribute.replace("-", "_"), attribute.replace("-", "_"))
        if name not in _TYPE_KEYS.values():
            raise InputError("", key, f"unknown key{near_or_all(attribute, _TYPE_KEYS)}")
        fields = Fields({key: _parsed(value)}, "", "", (key,))
        whole = name == "limit"
        new = fields.integer(key, 1, MAX_LIMIT) if whole else fields.number(key)
        index = self.resources.names.index(kind)
        types = list(self.resources.types)
        changed: dict[str, Any] = {name: new}
        types[index] = replace(types[index], **changed)
        self.resources = replace(self.resources, types=tuple(types))

    def _hint(self, key: str) -> str:
        """The key that was meant, else every kind of key that there is."""
        kinds = self.resources.names
        keys = [*_DEMANDS, *(f"{kind}.{short}" for kind in kinds for short in _TYPE_KEYS)]
        if hint := did_you_mean(key, keys):
            return hint
        shorts = ", ".join(f"TYPE.{short}" for short in _TYPE_KEYS)
        return (
            f"; valid: {shorts} with TYPE of {', '.join(kinds)}; {', '.join(_DEMANDS)}, pin.LAYER"
        )


def _parsed(value: float | str) -> float | str:
    """A number where the text is one."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _number(key: str, value: float | str) -> float:
    return Fields({key: _parsed(value)}, "", "", (key,)).number(key)


def _one_of(key: str, value: float | str, names: tuple[str, ...] | list[str], what: str) -> None:
    if value not in names:
        hint = near_or_all(str(value), names) if names else "; there is none"
        raise InputError("", key, f"{value!r}: expected {what}{hint}")
