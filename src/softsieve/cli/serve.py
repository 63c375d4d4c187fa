"""`softsieve serve`: a trained model behind HTTP."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from softsieve.cli.devices import DEVICE_HELP, choose_device
from softsieve.cli.errors import one_line
from softsieve.cli.progress import plain_console, quiet_hugging_face
from softsieve.errors import InputError
from softsieve.extras import package


def serve(
    model: Annotated[Path, typer.Argument(help="folder of a trained model, or of the run that made it")],
    host: Annotated[str, typer.Option(help="address to listen at; 0.0.0.0 for all of the machine's")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen at; 0 for any that is free")] = 8000,
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None,
) -> None:
    """Answer for a trained model over HTTP, with a page to try it in a browser. Ctrl-C ends it.

    softsieve serve softsieve-run --port 8000
    """
    with one_line():
        quiet_hugging_face()
        place = choose_device(device)
        uvicorn = package("uvicorn", "softsieve serve")
        package("fastapi", "softsieve serve")
        from softsieve.integrations.server import ServedModel, make_app

        with listening(host, port) as listener:  # before the model is loaded: who has the port is known at once
            served = ServedModel(model, device=place)
            address, number = listener.getsockname()[:2]
            shown = f"[{address}]" if ":" in address else address
            plain_console().print(f"{model}: http://{shown}:{number} (POST /predict; GET /health; / in a browser)")
            server = uvicorn.Server(uvicorn.Config(make_app(served), log_level="warning"))
            server.run(sockets=[listener])


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens at an address.

    Raises:
        InputError: when it cannot, as where another program has the port.
    """
    opened = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        opened = socket.socket(family, kind, protocol)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen()
        return opened
    except OSError as error:
        if opened is not None:
            opened.close()
        raise InputError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from None
