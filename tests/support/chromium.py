"""Chromium for page tests: start it, and read its console messages and requests."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

_ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1000")
_OF_NOBODY = ("data:", "blob:", "about:")


def start_chromium() -> Any:
    """A driver of a new Chromium; skips the test without one."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("Chromium or chromedriver is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in _ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER, env=dict(os.environ))
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_script_timeout(60)
    return driver


def requested(browser: Any) -> set[str]:
    """Addresses requested since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {
        one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"
    }
    return {url for url in asked if not url.startswith(_OF_NOBODY)}


def said(browser: Any) -> list[str]:
    """Console messages since the last call."""
    return [entry["message"] for entry in browser.get_log("browser")]
