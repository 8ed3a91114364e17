"""A function that makes one kernel's config, from fields and rules.

A field has a check, a function of a value that returns None, or what is wrong with it as (rule, found,
remedy), where the rule goes on from the field's name. A rule is between fields: (whether it holds, rule,
found, remedy).
"""

_REQUIRED = struct(is_required = True)

def field(check, doc, default = _REQUIRED):
    """An argument of a config function.

    Args:
      check: of its value.
      doc: what it is.
      default: its value where none, or None, is given; a function takes it from the fields before.

    Returns:
      A struct for config_function().
    """
    return struct(check = check, doc = doc, default = default)

def one_of(*values):
    """A check: one of `values`."""

    def check(value):
        if value in values:
            return None
        return (
            "must be one of " + ", ".join([str(x) for x in values]),
            "it is {}".format(repr(value)),
            "choose one of them",
        )

    return check

def flag(value):
    """A check: True or False."""
    if type(value) == "bool":
        return None
    return ("must be True or False", "it is {}".format(repr(value)), "write one of them")

def positive(value):
    """A check: a positive integer."""
    if type(value) == "int" and value > 0:
        return None
    return ("must be a positive integer", "it is {}".format(repr(value)), "write one")

def positives(*words):
    """A check: as many positive integers as `words`."""

    def check(value):
        if type(value) in ["list", "tuple"] and len(value) == len(words) and \
           not [x for x in value if positive(x) != None]:
            return None
        return (
            "must be {} positive integers".format({2: "two", 3: "three"}[len(words)]),
            "it is {}".format(repr(value)),
            "write it as ({})".format(", ".join(words)),
        )

    return check

def config_function(name, fields, rules, kernel):
    """The function `name`, which describes one kernel: the value of each field in, kernel_config() out.

    It fails at the first value or rule that is wrong, naming itself and the tile.

    Args:
      name: as its callers know it.
      fields: dict of name to field(), in the order of their checks.
      rules: a function of a struct of the values; it returns a list of rules.
      kernel: a function of the same struct; it returns what kernel_config() does.

    Returns:
      The function; it takes keyword arguments alone.
    """

    def describe(**given):
        values = _values(name, fields, given)
        for holds, rule, found, remedy in rules(values):
            if not holds:
                _refuse(name, given, rule, found, remedy)
        return kernel(values)

    return describe

def _refuse(name, given, rule, found, remedy):
    where = "tile = {}".format(given["tile"]) if "tile" in given else ""
    fail("{}({}): {}, but {}; {}".format(name, where, rule, found, remedy))

def _values(name, fields, given):
    """A struct of each field's value, given or by default."""
    for argument in given:
        if argument not in fields:
            known = ", ".join(fields)
            _refuse(name, given, "arguments must be among " + known, "one is " + argument, "correct it")
    values = {}
    for argument, one in fields.items():
        value = given.get(argument)
        if value == None:
            value = one.default(struct(**values)) if type(one.default) == "function" else one.default
        if value == _REQUIRED:
            _refuse(name, given, argument + " must be given", "it is missing", "it is " + one.doc)
        wrong = one.check(value)
        if wrong:
            rule, found, remedy = wrong
            _refuse(name, given, "{} {}".format(argument, rule), found, remedy)
        values[argument] = value
    return struct(**values)
