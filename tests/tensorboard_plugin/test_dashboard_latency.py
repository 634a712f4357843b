"""A view's number of requests and longest chain of requests on a slow network, from wheel and clone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from lightning_modelprof.tensorboard_plugin import bundle
from lightning_modelprof.tensorboard_plugin.plugin import static_files
from tests.support.slow_network import first_view, slow_network
from tests.support.tensorboard_server import tensorboard
from tests.tensorboard_plugin.test_dashboard_browser import Page

pytestmark = pytest.mark.slow

ROOT = Path(bundle.__file__).parents[2]
LATENCY_MS = 100
RUN = {"run": "net/version_0", "profile": "modelprof/run", "window": "modelprof/window_0"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The package as in its wheel, with a bundle."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm, which makes the bundle")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "-w", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the wheel cannot be built here: {done.stderr[-300:]}")
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as packed:
        packed.extractall(folder / "unpacked")
    if not (folder / "unpacked/lightning_modelprof/tensorboard_plugin/static" / bundle.BUNDLE).is_file():
        said = re.search("Built without a bundle.*", done.stdout + done.stderr)
        pytest.skip(said.group() if said else "the wheel holds no bundle, and does not say why")
    return folder / "unpacked"


@pytest.fixture(scope="module")
def from_wheel(wheel, logdir):
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(wheel))
            patch.chdir(wheel)  # Python looks there first
            server = stack.enter_context(tensorboard(logdir))
        yield server.wait_for("net/version_0")


@pytest.fixture
def from_clone(server):
    if (bundle.STATIC / bundle.BUNDLE).exists():
        pytest.skip("these are the files of a source distribution, which has a bundle")
    return server


@pytest.mark.parametrize(
    ("view", "most_requests", "most_depth"), [("overview", 6, 5), ("steps", 7, 5), ("trace", 7, 5)]
)
def test_wheel_loads_one_script(browser, from_wheel, view, most_requests, most_depth):
    with slow_network(browser, LATENCY_MS):
        Page(browser, from_wheel).open(**RUN, view=view)
        seen = first_view(browser)
    scripts = {name for name in seen.names if name.endswith((".js", ".css"))}
    assert scripts == {"static/index.js", "static/page.css"}
    assert len(seen.names) <= most_requests, seen.names
    assert seen.depth <= most_depth, seen.names


@pytest.mark.parametrize(
    ("view", "most_requests", "most_depth"), [("overview", 30, 6), ("steps", 50, 9), ("trace", 64, 9)]
)
def test_clone_loads_modules_of_view_in_parallel(browser, from_clone, view, most_requests, most_depth):
    """Browsers send a host six requests at a time, so many modules form a chain, too."""
    with slow_network(browser, LATENCY_MS):
        Page(browser, from_clone).open(**RUN, view=view)
        seen = first_view(browser)
    assert any(name.startswith("static/timeline/") for name in seen.names) is (view == "trace")
    assert any(name.startswith("static/steps/") for name in seen.names) is (view == "steps")
    assert len(seen.names) <= most_requests, seen.names
    assert seen.depth <= most_depth, seen.names


def test_outdated_bundle_is_not_served(wheel):
    scripts = {name: path.read_bytes() for name, path in bundle.script_files().items()}
    made = (wheel / "lightning_modelprof/tensorboard_plugin/static" / bundle.BUNDLE).read_bytes()
    assert bundle.chosen_bundle(made, scripts) == made
    changed = scripts | {"dom.js": scripts["dom.js"] + b" "}
    assert bundle.chosen_bundle(made, changed) is None
    assert bundle.chosen_bundle(made, {**scripts, "more.js": b""}) is None


def test_first_module_imports_all_that_it_needs(from_clone):
    files = static_files()
    first, *_ = files[bundle.ENTRY].content.decode().split("\n")
    named = {name.removeprefix("./") for name in re.findall(r'import "([^"]+)"', first)}
    assert named <= set(files)
    waiting, found = [bundle.ENTRY], set()
    while waiting:
        name = waiting.pop()
        for path in re.findall(r'from "(\.[^"]+)";', (files[name].content.decode())):
            wanted = (Path("/") / name).parent.joinpath(path).resolve().as_posix().lstrip("/")
            if wanted not in found:
                found.add(wanted)
                waiting.append(wanted)
    assert named == found
