"""action_commands: what every action behind some targets runs, as a file that a test can read."""

ActionCommandsInfo = provider(
    doc = "The commands of a target and of all that it depends on.",
    fields = {"commands": "depset of JSON: target, mnemonic, then argv and env, or the content of a program"},
)

def _aspect_impl(target, ctx):
    commands = [
        json.encode({
            "argv": action.argv,
            "env": action.env,
            "mnemonic": action.mnemonic,
            "target": str(target.label),
        })
        for action in target.actions
        # Actions without a command are Bazel's own: files that it writes, links that it makes.
        if action.argv != None
    ] + [
        json.encode({
            "content": action.content,
            "mnemonic": action.mnemonic,
            "target": str(target.label),
        })
        for action in target.actions
        if action.mnemonic == "TemplateExpand"
    ]
    transitive = []
    for name in dir(ctx.rule.attr):
        value = getattr(ctx.rule.attr, name)
        if type(value) == "dict":
            value = value.keys()
        for item in value if type(value) == "list" else [value]:
            if type(item) == "Target" and ActionCommandsInfo in item:
                transitive.append(item[ActionCommandsInfo].commands)
    return [ActionCommandsInfo(commands = depset(commands, transitive = transitive))]

_action_commands_aspect = aspect(
    implementation = _aspect_impl,
    doc = "Collects commands along every attribute, implicit ones (tools) included.",
    attr_aspects = ["*"],
)

def _action_commands_impl(ctx):
    commands = depset(transitive = [
        target[ActionCommandsInfo].commands
        for target in ctx.attr.targets
    ])
    out = ctx.actions.declare_file(ctx.label.name + ".json")
    ctx.actions.write(out, "[\n" + ",\n".join(commands.to_list()) + "\n]\n")
    return [DefaultInfo(files = depset([out]))]

action_commands = rule(
    implementation = _action_commands_impl,
    doc = """A JSON list of the commands behind `targets`, as Bazel would run them, and the programs it writes for them.

Example:
    action_commands(
        name = "wheel_commands",
        targets = ["//:wheel"],
    )
""",
    attrs = {"targets": attr.label_list(mandatory = True, aspects = [_action_commands_aspect])},
)
