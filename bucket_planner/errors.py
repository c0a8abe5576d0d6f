"""Errors of the planner, each naming the place, the value and the rule.

The tree::

    PlannerError (ValueError)
    +-- PlannerConfigError   a field of a configuration file or of a record breaks a rule
    +-- TraceFormatError     a row of a trace cannot be read

`bucket_planner` stands below `serving`, so it has its own small tree.
"""


class PlannerError(ValueError):
    """Base of every error this package raises on purpose."""


class PlannerConfigError(PlannerError):
    """A configured value breaks a rule.

    Attributes:
      field: dotted name of the field.
      value: the offending value as given.
      rule: the rule it breaks, in words.
      file: the file it came from, or None for a value built in code.
    """

    def __init__(self, field: str, value: object, rule: str, *, file: str | None = None) -> None:
        where = f"{file}: " if file else ""
        super().__init__(f"{where}field '{field}' = {value!r}: {rule}")
        self.field = field
        self.value = value
        self.rule = rule
        self.file = file

    def in_file(self, file: str, prefix: str = "") -> "PlannerConfigError":
        """Returns the same error with its file (and a dotted prefix of its field) named."""
        return PlannerConfigError(prefix + self.field, self.value, self.rule, file=file)


class TraceFormatError(PlannerError):
    """A row of a trace is malformed.

    Attributes:
      file: the trace.
      line: line number, counted from 1.
      field: the column or key.
      value: what stood there.
      rule: the rule it breaks, in words.
    """

    def __init__(self, file: str, line: int, field: str, value: object, rule: str) -> None:
        super().__init__(f"{file}:{line}: field '{field}' = {value!r}: {rule}")
        self.file = file
        self.line = line
        self.field = field
        self.value = value
        self.rule = rule
