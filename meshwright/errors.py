"""The one exception that means "the user can fix this"."""


class UserError(Exception):
    """An error the user can fix: one sentence that names what is wrong, its value and the remedy; the CLI exits 2."""
