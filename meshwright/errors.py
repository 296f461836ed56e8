"""The one exception that means "the user can fix this"."""


class UserError(Exception):
    """A mistake the user can mend: one sentence that names what is wrong, its value and the remedy; the CLI exits 2."""
