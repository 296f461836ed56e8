"""Options that take numbers of tokens as people write them: 15T, 2e12, 1.4M."""

from collections.abc import Callable
from typing import Any

import typer

from meshwright.amounts import NoAmount
from meshwright.amounts import length as read_length
from meshwright.amounts import tokens as read_tokens
from meshwright.errors import UserError


def token_option(default: int | None, option: str, help: str, *, length: bool = False) -> Any:
    """An option for a number of tokens, or for the length of a sequence."""
    read = read_length if length else read_tokens
    return typer.Option(default, option, parser=_parser(option, read), metavar="TOKENS", help=help)


def _parser(option: str, read: Callable[[Any], int]) -> Callable[[Any], int]:
    def parsed(given: Any) -> int:
        try:
            value = read(given)
        except NoAmount as error:
            raise UserError(f"{option} = {str(given)[:60]} is not a number of tokens; {error}") from None
        if value < 1:
            raise UserError(f"{option} = {value} must be greater than 0; correct it or leave it out")
        return value

    return parsed
