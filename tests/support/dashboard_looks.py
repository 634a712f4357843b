"""Check every dashboard view at three widths, light and dark, and take pictures.

    PYTHONPATH=. python -m tests.support.dashboard_looks --out pictures
    PYTHONPATH=. python -m tests.support.dashboard_looks --out pictures --only cifar --views overview trace

Profiles are made first: ``examples/cifar10.py``, a fit with two windows that recorded stacks and memory, a
fit of two ranks, and the traces of a V100, an A100 and an MI250. A view fails if the console has a message,
it's wider than the page, text is cut without a way to see the rest, or two texts of a drawing overlap.
``contact_sheet.png`` has twelve of the pictures. All of it takes about two minutes.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from PIL import Image, ImageDraw

from lightning_modelprof.cli.main import main as command_line
from lightning_modelprof.tensorboard_plugin.views import VIEWS
from tests.support import warm
from tests.support.chromium import said, start_chromium
from tests.support.dashboard_page import wait
from tests.support.tensorboard_server import Server, tensorboard
from tests.support.traces import real_file

ROOT: Final = Path(__file__).resolve().parents[2]
KEYS: Final = (*(view.key for view in VIEWS), "compare")
WIDTHS: Final = (1400, 1000, 400)
THEMES: Final = ("light", "dark")
HEIGHT: Final = 900
REAL: Final = {
    "V100": "v100_resnet50_workers0",
    "A100": "a100_nccl",
    "MI250": "mi250_toy",
}
"""Subject of a real trace → name of its file and run."""

SHEET: Final = (
    ("V100", "overview", 1400, "light"),
    ("V100", "trace", 1400, "light"),
    ("V100", "kernels", 1400, "dark"),
    ("A100", "trace", 1400, "dark"),
    ("A100", "distributed", 1000, "light"),
    ("MI250", "operators", 1000, "light"),
    ("cifar", "overview", 1400, "dark"),
    ("cifar", "steps", 1400, "light"),
    ("windows", "memory", 1000, "light"),
    ("windows", "compare", 1400, "light"),
    ("ranks", "distributed", 1000, "dark"),
    ("V100", "overview", 400, "light"),
)
"""Subject, view, width and theme of the twelve pictures on the contact sheet."""

_WINDOWS: Final = """
    import warnings; warnings.simplefilter("ignore")
    from lightning.pytorch.loggers import TensorBoardLogger
    from lightning_modelprof import ModelProfCallback
    from tests.support.fits import Net, loader, make_trainer

    options = {"with_stack": True, "profile_memory": True, "report": {"terminal": False}}
    callback = ModelProfCallback(active=2, wait=4, repeat=2, skip_first=4, **options)
    logger = TensorBoardLogger(LOGS, name="windows", version=0)
    make_trainer(LOGS, callback, logger=logger).fit(Net(), loader(400))
"""
_RANKS: Final = """
    import warnings; warnings.simplefilter("ignore")
    from lightning.pytorch.loggers import TensorBoardLogger
    from lightning_modelprof import ModelProfCallback
    from tests.support.fits import Net, loader, make_trainer

    if __name__ == "__main__":
        options = {"profile_memory": True, "report": {"terminal": False}}
        callback = ModelProfCallback(active=2, wait=4, skip_first=4, **options)
        logger = TensorBoardLogger(LOGS, name="ranks", version=0)
        options = {"strategy": "ddp_fork", "devices": 2}
        make_trainer(LOGS, callback, logger=logger, **options).fit(Net(), loader(400))
"""

FAULTS: Final = (ROOT / "tests/support/dashboard_faults.js").read_text(encoding="utf-8")
"""Script that returns the visible view's faults, as sentences."""

_LOADS: Final = itertools.count()
_GO: Final = """
    const [fragment, done] = arguments;
    document.documentElement.dataset.theme = "auto"; // as a page has it that was just loaded
    document.dispatchEvent(new CustomEvent("themechange"));
    for (const place of [document.documentElement, document.querySelector("main")]) place.scrollTop = 0;
    addEventListener("hashchange", () => done(), { once: true }); // after the page, which listens as well
    if (location.hash.slice(1) === fragment) done();
    location.hash = fragment;
"""
_READY: Final = (
    "const main = document.querySelector('main');"
    "return main !== null && !main.ariaBusy && main.children.length > 0"
    " && !document.querySelector('main .waiting, main .steps-range[aria-busy=true]')"
)


def write_logs(logs: Path) -> dict[str, dict[str, str]]:
    """Make the profiles; return the link parameters of each subject."""
    work = logs.parent / "work"
    work.mkdir()
    commands: list[tuple[Path, tuple[str, ...]]] = [(ROOT / "examples/cifar10.py", ("--max-steps", "60"))]
    for name, script in (("windows", _WINDOWS), ("ranks", _RANKS)):
        file = work / f"{name}.py"
        file.write_text(textwrap.dedent(script).replace("LOGS", repr(str(logs))))
        commands.append((file, ()))
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    programs = [
        warm.start(file.read_text(), *arguments, cwd=work, env=environment, file=file)
        for file, arguments in commands
    ]
    for result in [program.wait(300) for program in programs]:
        if result.returncode:
            command = " ".join(result.args)
            raise RuntimeError(f"{command} failed:\n{result.stdout[-2000:]}{result.stderr[-4000:]}")
    (work / "lightning_logs" / "version_0").rename(logs / "cifar")
    subjects = {
        "cifar": {"run": "cifar"},
        "windows": {"run": "windows/version_0"},
        "ranks": {"run": "ranks/version_0"},
    }
    for subject, name in REAL.items():
        assert command_line(["tensorboard", str(real_file(name)), "--logdir", str(logs)]) == 0
        subjects[subject] = {"run": name}
    return subjects


class Pages:
    """The dashboard's page alone, in a given size and theme.

    It's loaded once; links lead to other views, which are redrawn each time.
    """

    def __init__(self, browser: Any, server: Server) -> None:
        self.browser = browser
        self.server = server
        self._is_loaded = False

    def show(self, choice: dict[str, str], width: int) -> None:
        """Redraw a view at a width, and wait until it's drawn."""
        parts = [f"p.modelprof.{name}={value.replace('/', '%2F')}" for name, value in choice.items()]
        fragment = "&".join(["modelprof", *parts])
        size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        if self._is_loaded:
            wait(self.browser, "return innerWidth === arguments[0]", width)
            self.browser.execute_async_script(_GO, fragment)
        else:
            address = f"{self.server.url}data/plugin_entry.html?name=modelprof&{next(_LOADS)}"
            self.browser.get(f"{address}#{fragment}")
            self._is_loaded = True
        wait(self.browser, _READY)

    def dress(self, theme: str) -> None:
        """Set the theme as TensorBoard does."""
        self.browser.execute_async_script(
            "document.documentElement.dataset.theme = arguments[0];"
            "document.dispatchEvent(new CustomEvent('themechange'));"
            "requestAnimationFrame(() => requestAnimationFrame(arguments[1]))",
            theme,
        )

    def faults(self) -> list[str]:
        """Faults of the visible view."""
        return [
            *self.browser.execute_script(FAULTS),
            *(f"console: {line}" for line in said(self.browser) if "favicon" not in line),
        ]

    def picture(self) -> bytes:
        """Screenshot as PNG."""
        time.sleep(0.03)  # until it's on the screen
        shot = self.browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
        return base64.b64decode(shot["data"])


def look(
    pages: Pages,
    subjects: dict[str, dict[str, str]],
    views: Sequence[str],
    widths: Sequence[int],
    out: Path | None,
) -> Iterator[tuple[str, list[str]]]:
    """Open everything; yield each picture's name and faults."""
    for subject, choice in subjects.items():
        for width in widths:
            for view in views:
                pages.show({**choice, "view": view}, width)
                for theme in THEMES:
                    pages.dress(theme)
                    name = f"{subject}_{view}_{width}_{theme}"
                    yield name, pages.faults()
                    if out is not None:
                        (out / f"{name}.png").write_bytes(pages.picture())


def contact_sheet(out: Path) -> Path:
    """Put twelve of the pictures on one, each under its name."""
    across, size, head = 3, (700, 450), 22
    sheet = Image.new("RGB", (across * size[0], -(-len(SHEET) // across) * (size[1] + head)), "#808080")
    draw = ImageDraw.Draw(sheet)
    for place, (subject, view, width, theme) in enumerate(SHEET):
        x, y = place % across * size[0], place // across * (size[1] + head)
        draw.text((x + 6, y + 5), f"{subject}, {view}, {width} px, {theme}", fill="white")
        file = out / f"{subject}_{view}_{width}_{theme}.png"
        if file.is_file():
            picture = Image.open(io.BytesIO(file.read_bytes())).convert("RGB")
            picture.thumbnail((size[0] - 8, size[1] - 4))
            sheet.paste(picture, (x + 4, y + head))
    path = out / "contact_sheet.png"
    sheet.save(path)
    return path


def main() -> int:
    """Check everything; return 1 on any fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, help="folder for the pictures")
    parser.add_argument("--logs", type=Path, help="folder of profiles that this made before, or is to make")
    parser.add_argument("--only", nargs="+", help="subjects: cifar, windows, ranks, V100, A100, MI250")
    parser.add_argument("--views", nargs="+", default=KEYS, choices=KEYS)
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS)
    options = parser.parse_args()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    begin, wrong, looked = time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder) / "logs"
        if logs.is_dir():
            subjects = {
                "cifar": {"run": "cifar"},
                "windows": {"run": "windows/version_0"},
                "ranks": {"run": "ranks/version_0"},
            }
            subjects |= {name: {"run": run} for name, run in REAL.items() if (logs / run).is_dir()}
        else:
            logs.mkdir(parents=True)
            subjects = write_logs(logs)
        chosen = {
            name: choice for name, choice in subjects.items() if not options.only or name in options.only
        }
        with tensorboard(logs) as server:
            server.wait_for(*(choice["run"] for choice in chosen.values()))
            browser = start_chromium()
            try:
                for name, faults in look(
                    Pages(browser, server), chosen, options.views, options.widths, options.out
                ):
                    looked += 1
                    wrong += bool(faults)
                    for fault in faults:
                        print(f"{name}: {fault}")
            finally:
                browser.quit()
    if options.out:
        print(f"twelve of them: {contact_sheet(options.out)}")
    print(f"{looked} pictures in {time.monotonic() - begin:.0f} s, {wrong} with something wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
