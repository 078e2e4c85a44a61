"""The `labkit` command: thin wrappers around public functions."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help="A lab about the memory of LLM inference.")
models = typer.Typer(no_args_is_help=True, help="The embedded model.")
app.add_typer(models, name="models")


@app.command()
def doctor() -> None:
    """Say what this machine has, which attention backend will run and why, and what to do if something is missing."""
    from labkit.environment import env_report

    typer.echo(repr(env_report()))


@models.command()
def fetch() -> None:
    """Get the embedded model once (a download of about 90 MB) and say where it is."""
    from labkit.models import embedded

    typer.echo(str(embedded.fetch()))


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
