"""Numbers as options: sizes and times, which have an end."""

import math
from typing import Any

import click

MOST = 1e9  # more MB, GB or seconds than anybody has; a multiple of it still is a number


class Amount(click.FloatRange):
    """A number from `least` to MOST. Infinity and what is no number at all are refused: click's
    own range lets both through."""

    def __init__(self, least: float) -> None:
        super().__init__(min=least, max=MOST)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number
