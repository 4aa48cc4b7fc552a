from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mindformers_ext.config import ConfigError, TrainConfig, load_config

DATA = Path(__file__).parents[2] / "data" / "config"

Refuse = Callable[..., str]


@pytest.fixture
def data() -> Path:
    """The folder with test YAMLs."""
    return DATA


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., TrainConfig]:
    """Loads a text, or bytes, as the file run.yaml."""

    def load_text(text: str | bytes, **options: object) -> TrainConfig:
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_config(path, **options)  # type: ignore[arg-type]

    return load_text


@pytest.fixture
def refuse(load: Callable[..., TrainConfig], tmp_path: Path) -> Refuse:
    """Loads a text that must be refused; returns the message, the folder cut off."""

    def refused(text: str | bytes, **options: object) -> str:
        with pytest.raises(ConfigError) as caught:
            load(text, **options)
        message = str(caught.value)
        assert all(line.isprintable() for line in message.split("\n")), "a mistake is one line"
        return message.replace(f"{tmp_path}/", "")

    return refused
