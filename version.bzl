"""The version of the wheel; py/stoneware/__init__.py says the same (tests/wheel compares)."""

STONEWARE_VERSION = "0.1.0"

def wheel_version(labels):
    """STONEWARE_VERSION with a local version label that says what a wheel lacks.

    Args:
      labels: of what is always left out; //:forward_only adds its own.
    """
    return STONEWARE_VERSION + select({
        "//:forward_only": "+" + ".".join(labels + ["forward"]),
        "//conditions:default": "+" + ".".join(labels) if labels else "",
    })
