"""The version of the wheel; py/stoneware/__init__.py says the same (tests/wheel compares)."""

STONEWARE_VERSION = "0.1.0"
