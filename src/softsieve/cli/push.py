"""`softsieve push`: a trained model to where hubs share it from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from softsieve.cli.errors import one_line
from softsieve.cli.progress import plain_console, quiet_hugging_face


def push(
    model: Annotated[Path, typer.Argument(help="folder of a trained model, or of the run that made it")],
    target: Annotated[str, typer.Argument(help="a folder, such as a clone of a repository, or hub:OWNER/NAME")],
    private: Annotated[bool, typer.Option(help="a repository that is made is seen by its owner alone")] = False,
) -> None:
    """Put a trained model, with its card, into a folder, or onto the Hugging Face hub with the token that is set there.

    softsieve push softsieve-run shared/reviews

    softsieve push softsieve-run hub:someone/reviews
    """
    with one_line():
        quiet_hugging_face()
        from softsieve.integrations.hub import copy_model, push_model  # needs the extra train

        if found := re.match("hub:(.*)", target):
            plain_console().print(push_model(model, found[1], private=private))
        else:
            copy_model(model, Path(target))
            plain_console().print(f"{target}: the model, with its card")
