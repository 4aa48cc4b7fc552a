"""What every section is made of: the base class and the checked types of its fields."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, get_type_hints


class Unset(enum.Enum):
    """The type of `UNSET`: a key that was not given, where null has a meaning of its own."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset.UNSET


@dataclass(frozen=True)
class Check:
    """A condition on a value of the right type; `text` continues the name of that type: "an integer >= 1"."""

    text: str
    accepts: Callable[[Any], bool]


Count = Annotated[int, Check(">= 1", lambda value: value >= 1)]
Natural = Annotated[int, Check(">= 0", lambda value: value >= 0)]
CountOrAll = Annotated[int, Check(">= 1, or -1", lambda value: value >= 1 or value == -1)]
Seed = Annotated[int, Check("from 0 to 2**32 - 1", lambda value: 0 <= value < 2**32)]
PositiveFloat = Annotated[float, Check("> 0", lambda value: value > 0)]
NonNegativeFloat = Annotated[float, Check(">= 0", lambda value: value >= 0)]
Fraction = Annotated[float, Check("from 0 to 1", lambda value: 0 <= value <= 1)]
FractionBelowOne = Annotated[float, Check(">= 0 and < 1", lambda value: 0 <= value < 1)]
Name = Annotated[str, Check("that is not empty", lambda value: bool(value.strip()))]


@dataclass(slots=True, kw_only=True)
class Section:
    """One section of the YAML. `given` holds the names of the keys that the user wrote, defaults excluded."""

    reserved: ClassVar[Mapping[str, str]] = {}  # key that is refused -> what the user should know about it
    given: frozenset[str] = field(default=frozenset(), repr=False, compare=False, metadata={"yaml": False})

    def to_dict(self) -> dict[str, Any]:
        """The section as plain data; free keys stand beside the known ones."""
        return self._to_dict(yaml_fields(type(self)), Section.to_dict)

    def written(self) -> dict[str, Any]:
        """Like `to_dict`, without the defaults that the user did not write."""
        defaults = type(self)()
        names = [
            name
            for name in yaml_fields(type(self))
            if name in self.given or getattr(self, name) != getattr(defaults, name)
        ]
        return self._to_dict(names, Section.written)

    def _to_dict(self, names: Iterable[str], below: Callable[[Section], dict[str, Any]]) -> dict[str, Any]:
        result = {name: _plain(getattr(self, name), below) for name in names} | getattr(self, "extra", {})
        return {key: value for key, value in copy.deepcopy(result).items() if value is not UNSET}


@dataclass(slots=True, kw_only=True)
class OpenSection(Section):
    """A section that also takes keys it does not know; they are kept in `extra`."""

    extra: dict[str, Any] = field(default_factory=dict, metadata={"yaml": False})


def _plain(value: Any, below: Callable[[Section], dict[str, Any]]) -> Any:
    if isinstance(value, Section):
        return below(value)
    return [_plain(item, below) for item in value] if isinstance(value, list) else value


def yaml_fields(section: type[Section]) -> dict[str, Any]:
    """The keys of a section that YAML may set, each with its type."""
    hints = get_type_hints(section, include_extras=True)
    return {item.name: hints[item.name] for item in dataclasses.fields(section) if item.metadata.get("yaml", True)}
