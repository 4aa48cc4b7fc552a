"""What every section is made of: the base class and the checked types of its fields."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
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

    allow_extra: ClassVar[bool] = False
    reserved: ClassVar[Mapping[str, str]] = {}  # key that is refused -> what the user should know about it
    given: frozenset[str] = field(default=frozenset(), repr=False, compare=False, metadata={"yaml": False})

    def to_dict(self) -> dict[str, Any]:
        """The section as plain data that `load_config` reads back; free keys stand beside the known ones."""
        result = {name: _plain(getattr(self, name)) for name in yaml_fields(type(self))}
        extra = _plain(getattr(self, "extra", {}))
        return {key: value for key, value in (result | extra).items() if value is not UNSET}


@dataclass(slots=True, kw_only=True)
class OpenSection(Section):
    """A section that also takes keys it does not know; they are kept in `extra`."""

    allow_extra: ClassVar[bool] = True
    extra: dict[str, Any] = field(default_factory=dict, metadata={"yaml": False})


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.to_dict()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def yaml_fields(section: type[Section]) -> dict[str, Any]:
    """The keys of a section that YAML may set, each with its type."""
    hints = get_type_hints(section, include_extras=True)
    return {item.name: hints[item.name] for item in dataclasses.fields(section) if item.metadata.get("yaml", True)}
