"""Find a Chromium for the browser tests, and install one when run as a script and there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """Path of a browser: $LABKIT_BROWSER, one on PATH, or the one that playwright installed; None if there is none."""
    if chosen := os.environ.get("LABKIT_BROWSER"):
        if not shutil.which(chosen):
            raise ValueError(f"LABKIT_BROWSER={chosen!r} is not a program that can be run")
        return shutil.which(chosen)
    for name in NAMES:
        if path := shutil.which(name):
            return path
    return _playwrights_own()


def _playwrights_own() -> str | None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).exists() else None


def install_browser() -> None:
    """Install Debian's chromium where we are root and apt is there, playwright's own build otherwise."""
    if os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "-qq"], check=False)
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium", "fonts-dejavu-core"]
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        if subprocess.run(install, check=False, env=environment).returncode == 0 and find_browser():
            return
    subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], check=False)


def main() -> None:
    if find_browser() is None:
        install_browser()
    browser = find_browser()
    if browser is None:
        sys.exit(
            "No Chromium or Chrome found, and none could be installed. Install one, name one in LABKIT_BROWSER, "
            "or run `make test NO_BROWSER=1` to leave the browser tests out."
        )
    print(f"browser tests use {browser}")


if __name__ == "__main__":
    main()
