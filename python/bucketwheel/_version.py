"""The version, in its one place: pyproject.toml and the key of the native build read it here."""

__version__ = "0.1.0"
