"""The commands beside a server: `paceline work`, and `paceline keys` for both of them."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.cli.options import argument, code_option, data_directory_option, debug_option, json_option, option
from paceline.cli.output import note
from paceline.cli.progress import printed_log, step_bar
from paceline.quantities import counted
from paceline.recipes import Recipe


@dataclass(frozen=True)
class WorkOptions:
    """Work for a server, until training is over."""

    address: str = argument("HOST:PORT", "the server's address")
    tls: str = option(
        "", "certificate and key without their endings, such as keys/worker; ca.crt lies beside", metavar="PATH"
    )
    run: str = option(
        "", "the run's folder, on the server's machine without keys, where its address is not enough", metavar="FOLDER"
    )
    model: str = code_option("network", "model.name")
    data: str = code_option("data", "data.name")
    loss: str = code_option("loss", "model.loss")
    data_directory: str = data_directory_option()
    delay_file: str = option(
        "", "CSV file, if the server injects recorded delays", metavar="FILE", also=("delay.file",)
    )
    number: int = option(-1, "the worker's number, if it matters which shard it gets", shown="the first that is free")
    threads: int = option(0, "threads for torch", shown="torch's own choice")
    patience_seconds: float = option(60.0, "how long to look for a server that cannot be reached")
    json: bool = json_option()
    debug: bool = debug_option()


@dataclass(frozen=True)
class KeysOptions:
    """Make certificates for a server and its workers.

    They are signed by a private CA, which is made too.
    """

    directory: str = argument("FOLDER", "folder for keys and certificates; files that exist are kept")
    hosts: str = option(
        "",
        "names and addresses of the server's machine, with commas between (localhost is always included)",
        metavar="LIST",
    )
    workers: int = option(1, "how many worker certificates; one is enough for all workers")
    days: int = option(3650, "how many days the certificates are valid")
    json: bool = json_option()
    debug: bool = debug_option()


def work(options: WorkOptions, overrides: dict[str, str]) -> None:
    from paceline.drivers.served.transport import tune_worker_process
    from paceline.runs.cluster import WorkerOptions, work_for

    notes, welcomes = Console(stderr=True), dict[str, Any]()

    def welcomed(worker: int, recipe: Recipe) -> None:
        welcomes.update(worker=worker, recipe=recipe.to_document())
        message = f"worker {worker}: {recipe.model.name} on {recipe.data.name}"
        if options.number not in (-1, worker):
            message += f" (number {options.number} is taken)"
        note(notes, message)

    settings = WorkerOptions(
        tls=options.tls or None,
        run=options.run,
        model=options.model,
        data=options.data,
        loss=options.loss,
        data_directory=options.data_directory,
        delay_file=options.delay_file,
        wish=options.number if options.number >= 0 else None,
        patience_seconds=options.patience_seconds,
        threads=options.threads,
    )
    tune_worker_process()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a worker that is asked to stop signs off first
    with printed_log(notes), step_bar(notes, "waiting for the server's next model") as update:
        work_for(
            options.address,
            settings,
            on_welcome=welcomed,
            on_gradient=lambda sent: update(description=f"{counted(sent, 'gradient')} sent", completed=sent),
        )
    notes.print("training is over")
    if options.json:
        print(json.dumps({"address": options.address, "worker": None, "recipe": None} | welcomes, indent=2))


def keys(options: KeysOptions, overrides: dict[str, str]) -> None:
    from paceline.drivers.served.keys import key_files, make_keys

    hosts = [host.strip() for host in options.hosts.split(",") if host.strip()]
    directory = Path(options.directory)
    made = make_keys(directory, hosts=hosts, workers=options.workers, days=options.days)
    this_machine = "The server's certificate is for this machine's own name; give --hosts for any other."
    files = key_files(directory, workers=options.workers)
    if options.json:
        groups = {
            "made": [str(path) for path in files if path in made],
            "kept": [str(path) for path in files if path not in made],
        }
        print(json.dumps(groups, indent=2))
    lines = [
        *(f"{'made ' if path in made else 'kept '} {path}" for path in files),
        f"server:  paceline serve RECIPE --listen 0.0.0.0:29400 --tls {directory / 'server'}",
        f"worker:  paceline work HOST:29400 --tls {directory / 'worker'}",
        *([] if hosts else [this_machine]),
        f"Give workers ca.crt, worker.crt and worker.key; {directory / 'ca.key'} stays with you.",
    ]
    note(Console(stderr=True), "\n".join(lines))
