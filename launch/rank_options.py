"""Which backend do ranks use, and how long do they wait for each other? The options of commands that start them."""

from typing import get_args

import click

from launch.env import DEFAULT_TIMEOUT_SECONDS, BackendChoice

backend_option = click.option(
    "--backend",
    type=click.Choice(get_args(BackendChoice)),
    default="auto",
    show_default=True,
    help="auto takes nccl where every rank has a GPU, else gloo on CPUs.",
)
timeout_option = click.option(
    "--timeout",
    type=float,
    default=DEFAULT_TIMEOUT_SECONDS,
    show_default=True,
    help="Seconds that a rank waits for its partners before its cell or case fails.",
)
