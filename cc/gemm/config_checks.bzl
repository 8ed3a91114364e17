"""A function that makes one kernel's config, from fields and rules.

A field has a check: a function of a value, which returns the rule that the value breaks, or None. A
rule between fields is a tuple: (whether it holds, what to say if not: rule, value and remedy).
"""

def field(check, doc, default = None):
    """An argument of a config function.

    Args:
      check: of its value.
      doc: what it is, a noun phrase.
      default: its value where none, or None, is given, or a function that takes it from the fields
        before; None if it must be given.

    Returns:
      A struct for config_function().
    """
    return struct(check = check, doc = doc, default = default)

def one_of(*values):
    """A check: one of `values`."""
    rule = "must be one of " + ", ".join([str(x) for x in values])
    return lambda value: None if value in values else rule

def positives(*words):
    """A check: as many positive integers as `words`."""
    rule = "must be {} positive integers, ({})".format(len(words), ", ".join(words))

    def check(value):
        holds = type(value) in ["list", "tuple"] and len(value) == len(words) and \
                all([type(x) == "int" and x > 0 for x in value])
        return None if holds else rule

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
        where = "{}({})".format(name, "tile = {}".format(given["tile"]) if "tile" in given else "")
        for argument in given:
            if argument not in fields:
                fail("{}: arguments must be among {}, but one is {}; correct it"
                    .format(where, ", ".join(fields), argument))
        config = _values(where, fields, given)
        for holds, message in rules(config):
            if not holds:
                fail("{}: {}".format(where, message))
        return kernel(config)

    return describe

def _values(where, fields, given):
    """A struct of each field's value, given or by default."""
    values = {}
    for argument, one in fields.items():
        value = given.get(argument)
        if value == None:
            value = one.default(struct(**values)) if type(one.default) == "function" else one.default
        broken = "must be given" if value == None else one.check(value)
        if broken:
            fail("{}: {} {}, but is {}; pass {}".format(where, argument, broken, repr(value), one.doc))
        values[argument] = value
    return struct(**values)
