"""Wheels for another processor: the transition to its platform, and the one back to that of the whole build.

A wheel's modules are compiled for the platform that its tag names. What they embed or are described by does not depend
on the processor (cubins, stubs) or needs this one to run, so it is taken from the configuration around the wheel, where
other targets have built it already.
"""

_PLATFORMS = "//command_line_option:platforms"

# What _PLATFORMS was outside a wheel for another processor; empty elsewhere.
_OUTER = str(Label("//tools/build_rules/private:outer_platforms"))

_SETTINGS = [_PLATFORMS, _OUTER]

# Processor of a platform tag: the platform that is built for.
_CROSS = {"aarch64": str(Label("//tools/build_rules:linux_aarch64"))}

def processor_of(tag):
    """The processor of a wheel's platform tag.

    Args:
      tag: for example "manylinux_2_28_aarch64".
    Returns:
      "x86_64" or "aarch64".
    """
    for processor in _CROSS:
        if tag.endswith("_" + processor):
            return processor
    return "x86_64"

def _to_tag_impl(settings, attr):
    platform = _CROSS.get(processor_of(attr.platform))
    if not platform:
        return {name: settings[name] for name in _SETTINGS}
    return {_OUTER: json.encode([str(label) for label in settings[_PLATFORMS]]), _PLATFORMS: [platform]}

to_platform_of_tag = transition(implementation = _to_tag_impl, inputs = _SETTINGS, outputs = _SETTINGS)

def _to_outer_impl(settings, _attr):
    if not settings[_OUTER]:
        return {name: settings[name] for name in _SETTINGS}
    return {_OUTER: "", _PLATFORMS: json.decode(settings[_OUTER])}

to_outer_platform = transition(implementation = _to_outer_impl, inputs = _SETTINGS, outputs = _SETTINGS)

outer_platforms = rule(
    implementation = lambda ctx: [],
    doc = "The build setting that the two transitions share; nobody sets it.",
    build_setting = config.string(),
)
