"""Bundles the page's modules into one script for the wheel, with esbuild.

Without npm or its registry, the build warns and has no bundle, and the page loads its modules one by one.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ESBUILD = "esbuild@0.25.12"
PATIENCE_S = 180


class BundleHook(BuildHookInterface):  # type: ignore[type-arg]
    """Creates the bundle for wheels and source distributions, but not for editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Create the bundle; hatchling calls this before a build."""
        if version == "editable":
            return
        package = Path(self.root) / "lightning_modelprof" / "tensorboard_plugin"
        bundle = load(package / "bundle.py")
        scripts = {name: path.read_bytes() for name, path in bundle.script_files().items()}
        brought = package / "static" / bundle.BUNDLE
        if brought.is_file() and bundle.chosen_bundle(brought.read_bytes(), scripts):
            return  # included in the source distribution
        self.folder = tempfile.mkdtemp()
        try:
            content = bundle.marked(make_bundle(scripts, bundle.ENTRY, Path(self.folder)), scripts)
        except (OSError, subprocess.SubprocessError) as error:
            self.app.display_warning(f"Built without a bundle of the page's scripts: {told(error)}")
            return
        file = Path(self.folder) / bundle.BUNDLE
        file.write_bytes(content)
        build_data["force_include"][str(file)] = brought.relative_to(self.root).as_posix()

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Clean up; hatchling calls this after a build."""
        shutil.rmtree(getattr(self, "folder", ""), ignore_errors=True)


def load(file: Path) -> ModuleType:
    """Load a module of the package without importing the package and its dependencies."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_bundle(scripts: dict[str, bytes], entry: str, folder: Path) -> bytes:
    """Bundle all modules into one script."""
    npm = shutil.which("npm")
    if npm is None:
        raise OSError("there is no npm")
    for name, content in scripts.items():
        file = folder / "page" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    run(
        npm,
        "install",
        "--silent",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        "--prefix",
        str(folder),
        ESBUILD,
    )
    esbuild = folder / "node_modules" / ".bin" / "esbuild"
    made = folder / "made.js"
    run(
        *(str(esbuild), str(folder / "page" / entry), "--bundle", "--minify", "--format=esm"),
        *("--target=es2022", "--charset=utf8", "--legal-comments=inline", f"--outfile={made}"),
    )
    return made.read_bytes()


def run(*command: str) -> None:
    """Run a command without output; raises an error if it fails."""
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S)


def told(error: Exception) -> str:
    """Describe an error, including the command's stderr."""
    return " ".join(f"{error} {getattr(error, 'stderr', '') or ''}".split())[:400]
