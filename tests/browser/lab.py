"""A JupyterLab server on a folder, and a page object for the notebook that a browser shows from it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import FloatRect, Locator, Page

NO_POPUPS = {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True}


@contextmanager
def jupyterlab(root: Path, private: Path, program: str = "jupyterlab") -> Iterator[str]:
    """Run JupyterLab on the folder `root`; yields its address. Settings, trust and caches live in `private` only.

    `program` "notebook" is Notebook 7: pages of one document each, made of JupyterLab's parts.
    """
    command = [sys.executable, "-m", program, "--allow-root", f"--ServerApp.root_dir={root}"]
    port = free_port()
    with serving([*command, *server_options(port)], port, root, private) as address:
        yield address


def server_options(port: int) -> list[str]:
    """Options of a server that a test can drive: this port or none, no browser of its own, no token."""
    options = ["--no-browser", f"--port={port}", "--ServerApp.port_retries=0"]
    return [*options, "--IdentityProvider.token=", "--ServerApp.password=", "--expose-app-in-browser"]


@contextmanager
def serving(command: list[str], port: int, cwd: Path, private: Path) -> Iterator[str]:
    """Run a command that starts JupyterLab, yield its address when it answers, and stop all that it started."""
    environment = os.environ | {
        name: str(private / name.lower())
        for name in (
            "JUPYTER_CONFIG_DIR",
            "JUPYTER_DATA_DIR",
            "JUPYTER_RUNTIME_DIR",
            "JUPYTERLAB_SETTINGS_DIR",
            "JUPYTERLAB_WORKSPACES_DIR",
            "IPYTHONDIR",
        )
    }
    write_setting(private, "@jupyterlab/apputils-extension", "notification", NO_POPUPS)
    address, log_path = f"http://127.0.0.1:{port}", private / "server.log"
    with log_path.open("w") as log:
        # A session of its own, so that the kernels and a command in between (make) are stopped with it.
        server = subprocess.Popen(
            command, cwd=cwd, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            wait_until_up(address, server, log_path)
            yield address
        finally:
            stop(server)


def stop(server: subprocess.Popen[Any]) -> None:
    """End the server's whole session, by force if it has not ended after 20 s."""
    with suppress(ProcessLookupError):  # it had ended by itself
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def write_setting(private: Path, extension: str, plugin: str, values: dict[str, Any]) -> None:
    """Set user settings of a JupyterLab plug-in, for example its theme, before the page is loaded."""
    path = private / "jupyterlab_settings_dir" / extension / f"{plugin}.jupyterlab-settings"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_up(address: str, server: subprocess.Popen[Any], log: Path, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/api", timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start within {seconds:.0f} s:\n{log.read_text()[-4000:]}")


@dataclass
class NotebookPage:
    """One notebook open in JupyterLab in a real browser. Times are in seconds."""

    page: Page
    address: str
    path: str = "lab/tree"  # "notebooks" in Notebook 7

    def open(self, name: str, timeout: float = 60) -> None:
        """Show the notebook `name` (a path under the server's folder) and wait for its kernel to be idle."""
        self.page.goto(f"{self.address}/{self.path}/{name}?reset")
        self.page.wait_for_function(
            "() => window.jupyterapp?.shell.currentWidget?.context?.isReady", timeout=timeout * 1000
        )
        self.wait_idle(timeout)

    def wait_idle(self, timeout: float = 60) -> None:
        """Wait until the kernel is idle."""
        self.page.wait_for_function(
            "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'",
            timeout=timeout * 1000,
        )

    def run_all(self, timeout: float = 240) -> None:
        """Run all cells from top to bottom, wait for the last, and fail the test on an error in a cell."""
        self.page.evaluate(
            "() => { window.__ran = false; "
            "window.jupyterapp.commands.execute('notebook:run-all-cells').finally(() => window.__ran = true); }"
        )
        self.page.wait_for_function("() => window.__ran", timeout=timeout * 1000)
        self.wait_idle(timeout)
        if errors := self.cell_errors():
            raise AssertionError("cells failed:\n" + "\n".join(errors))

    def cell(self, index: int) -> Locator:
        """The cell of that number, from 0, with its output."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def rewrite_and_run(self, index: int, source: str) -> None:
        """Replace the text of a cell and press Control+Enter, as a reader does."""
        editor = self.cell(index).locator(".cm-content")
        editor.scroll_into_view_if_needed()
        editor.click()
        self.page.keyboard.press("Control+A")
        self.page.keyboard.insert_text(source)
        self.page.keyboard.press("Control+Enter")

    def run_command(self, command: str) -> None:
        """Execute a JupyterLab command, for example 'docmanager:save' or 'kernelmenu:shutdown'."""
        self.page.evaluate("name => window.jupyterapp.commands.execute(name)", command)

    def outputs(self) -> list[list[dict[str, Any]]]:
        """The outputs of each cell in nbformat's form; an empty list for a cell without any."""
        return self.page.evaluate(
            "() => window.jupyterapp.shell.currentWidget.content.widgets"
            ".map(cell => cell.outputArea?.model.toJSON() ?? [])"
        )

    def cell_errors(self) -> list[str]:
        """'cell 3: ValueError: ...' for each cell whose output holds an error."""
        return [
            f"cell {index}: {output['ename']}: {output['evalue']}"
            for index, outputs in enumerate(self.outputs())
            for output in outputs
            if output["output_type"] == "error"
        ]

    def shutdown_kernel(self) -> None:
        """Stop the kernel for good; what lives in the browser stays."""
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")

    def becomes_empty(self, script: str, inside: Locator | None = None, timeout: float = 10) -> list[Any]:
        """What the function ``script`` returns, called with an element: waits until that is an empty list.

        What it still returns after ``timeout`` is returned, to be shown by an assertion.
        """
        where = inside or self.page.locator("body")
        deadline = time.monotonic() + timeout
        while (found := where.evaluate(script)) and time.monotonic() < deadline:
            self.wait_drawn()
        return found

    def wait_drawn(self) -> None:
        """Wait until the browser has drawn what was asked of it so far."""
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def steady_box(self, shown: Locator) -> FloatRect:
        """Where an element is, once ten frames have shown it at the same size."""
        shown.evaluate(
            """async element => {
                for (let same = 0, before = '', frame = 0; same < 10 && frame < 300; frame++) {
                    await new Promise(done => requestAnimationFrame(done));
                    const box = element.getBoundingClientRect(), now = `${box.width} ${box.height}`;
                    same = now === before ? same + 1 : 0;
                    before = now;
                }
            }"""
        )
        box = shown.bounding_box()
        assert box, "it is not shown"
        return box

    def canvas_colours(self, selector: str = "canvas") -> dict[str, int]:
        """How many pixels of the first canvas matching `selector` have each colour, as {'#rrggbbaa': count}.

        Waits for the canvas, scrolls to it and lets the browser draw one more frame first.
        """
        canvas = self.page.locator(selector).first
        canvas.wait_for(state="attached")
        canvas.scroll_into_view_if_needed()
        self.wait_drawn()
        return canvas.evaluate(
            """canvas => {
                const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
                const words = new DataView(data.buffer);
                const counts = {};
                for (let i = 0; i < data.length; i += 4) {
                    const colour = '#' + words.getUint32(i).toString(16).padStart(8, '0');
                    counts[colour] = (counts[colour] ?? 0) + 1;
                }
                return counts;
            }"""
        )

    def shown_colours(self, shown: Locator) -> Counter[str]:
        """How many pixels of what is on the screen there have each colour '#rrggbb': also for what is no canvas."""
        shown.scroll_into_view_if_needed()
        image = Image.open(BytesIO(shown.screenshot(animations="disabled"))).convert("RGB")
        colours = image.getcolors(image.width * image.height) or []
        return Counter({"#" + bytes(colour).hex(): count for count, colour in colours})

    def screenshot(self, path: Path) -> Path:
        """Write a PNG of the window."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=path)
        return path
