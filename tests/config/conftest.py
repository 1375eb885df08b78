"""What the configuration tests share."""

import pytest


@pytest.fixture
def toml(tmp_path, monkeypatch):
    """Write `c.toml` with the given text and return the arguments that load it."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> list[str]:
        (tmp_path / "c.toml").write_text(text, encoding="utf-8")
        return ["--job.config_file", "c.toml"]

    return write
