"""The screen after a fit, in terminals of several widths under each progress bar, and in a notebook."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import termios

import nbformat
import pyte
import pytest
from nbclient import NotebookClient

from tests.support import warm
from tests.support.fits import ROOT

pytestmark = pytest.mark.slow

ROWS = 40

# One process for all bars and widths: it sets the width of its own terminal.
FITS = """
import fcntl, io, json, logging, struct, sys, termios, warnings
from pathlib import Path
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from rich.progress import ProgressColumn
from rich.text import Text
from lightning_modelprof.engine.process_loops import PROCESS_LOOPS
from lightning_modelprof.show.terminal.terminal import print_report
from tests.support.fits import *

ROWS, folder = int(sys.argv[1]), Path(sys.argv[2])
warnings.filterwarnings("ignore", message="(?!ModelProfCallback)")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Logging(Net):  # so much that the bar needs several lines
    def training_step(self, batch, batch_idx):
        self.log_dict({f"figure_{index}": 0.5 for index in range(8)}, prog_bar=True)
        return self.loss(batch)

class Tall(ProgressColumn):
    def render(self, task):
        return Text("one\\ntwo\\nthree")

class TallBar(RichProgressBar):
    def configure_columns(self, trainer):
        return [*super().configure_columns(trainer), Tall()]

class OwnBar(ProgressBar):  # of Lightning's documentation
    def on_train_batch_end(self, *args):
        sys.stdout.write(f"{args[-1]} batches complete \\r")
        sys.stdout.flush()

class Terminal(io.StringIO):
    def isatty(self):
        return True

BARS = {
    "rich": RichProgressBar,
    "rich-leave": lambda: RichProgressBar(leave=True),
    "rich-tall": TallBar,
    "tqdm": TQDMProgressBar,
    "tqdm-leave": lambda: TQDMProgressBar(leave=True),
    "own": OwnBar,
}

def show(key, width, callback, run):
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, width, 0, 0))
    print(f"<<{key}>>", flush=True)
    PROCESS_LOOPS.forget()  # or later loops would print one line
    run()
    print("the next line of the program")
    drawn = Terminal()
    # As many last words as there are, so that the findings have as much room.
    print_report(callback.report, drawn, last_words=("page", "all tables"))
    (folder / f"{key}.json").write_text(json.dumps(drawn.getvalue()))

def trainer_of(key, bar):
    callback = make_callback(folder / key, terminal=True, active=0)
    trainer = make_trainer(folder / key, callback, bar, enable_progress_bar=True, max_epochs=2)
    return callback, trainer

for width in (80, 120, 200):
    for name, make_bar in BARS.items():
        callback, trainer = trainer_of(key := f"{name}-{width}", make_bar())
        show(key, width, callback, lambda: trainer.fit(Logging(), loader(16), loader(4)))
    for name in ("rich", "tqdm"):
        callback, trainer = trainer_of(key := f"{name}-validate-{width}", BARS[name]())
        show(key, width, callback, lambda: trainer.validate(Net(), loader(64), verbose=False))
print("<<end>>")
"""

BARS = ("rich", "rich-leave", "rich-tall", "tqdm", "tqdm-leave", "own", "rich-validate", "tqdm-validate")


def in_a_terminal(script, *arguments):
    """Everything a script writes to its terminal."""
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, 80, 0, 0))
    unwanted = ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES")
    environment = dict.fromkeys(unwanted) | {"TERM": "xterm-256color"}
    program = warm.start(script, *arguments, cwd=ROOT, env=environment, terminal=os.ttyname(other))
    os.close(other)
    written = b""
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        written += piece
    os.close(main)
    assert program.wait(60).returncode == 0, written.decode(errors="replace")[-3000:]
    return written.decode()


def on_screen(text, width):
    """All lines, including those scrolled off the screen."""
    screen = pyte.HistoryScreen(width, ROWS, history=10_000, ratio=1)
    pyte.Stream(screen).feed(text)
    gone_by = ["".join(line[place].data for place in range(width)) for line in screen.history.top]
    return [line.rstrip() for line in [*gone_by, *screen.display]]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of all fits, and each fit's terminal output."""
    folder = tmp_path_factory.mktemp("screens")
    parts = re.split(r"<<([\w-]+)>>", in_a_terminal(FITS, str(ROWS), str(folder)))
    return folder, dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("bar", BARS)
def test_every_report_line_is_on_screen(written, bar, width):
    folder, texts = written
    lines = on_screen(texts[f"{bar}-{width}"], width)
    drawn = json.loads((folder / f"{bar}-{width}.json").read_text())
    report = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", drawn).split("\n")]
    wanted = [line for line in report if line][:-2]
    begin = lines.index(wanted[0])
    assert lines[begin : begin + len(wanted)] == wanted
    above, below = lines[:begin], lines[begin + len(wanted) :]
    assert not any(" training steps (" in line for line in above), "it is printed once"
    # Right below come the paths of the rest, in unwrapped lines that can be copied.
    words = "".join(below).replace(" ", "")
    assert words.startswith(f"page:{folder}/{bar}-{width}/modelprof/report.html")
    assert "the next line of the program" in below
    assert "Epoch" not in words, "the bar is not drawn again"


IN_A_NOTEBOOK = """
import sys
from pathlib import Path
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from tests.support.fits import *

def fit(name, module, logger=False):
    callback = make_callback(Path(FOLDER) / name, terminal=True, active=0)
    trainer = make_trainer(
        Path(FOLDER) / name, callback, RichProgressBar(), enable_progress_bar=True, logger=logger
    )
    trainer.fit(module, loader(16))
    print(f"{name}: {trainer.global_step} steps, {len(callback.run.ranks[0].steps)} measured")
    return callback.report
"""

HALF_A_LINE = """
class Broken(CSVLogger):
    def log_metrics(self, metrics, step=None):
        if any(name.startswith("modelprof/") for name in metrics):
            raise OSError("the disk is full")

# Half a line waits in rich's stream: whatever is shown, such as a warning of ours, ends in RecursionError.
fit("half", Net(lambda batch_idx: print(".", end="")), Broken(FOLDER)) is not None
"""


def test_fit_in_notebook_shows_card_without_errors(tmp_path):
    cells = [
        f"import sys\nFOLDER = {str(tmp_path)!r}\nsys.path.insert(0, {str(ROOT)!r})",
        IN_A_NOTEBOOK,
        'fit("whole", Net()).title',
        HALF_A_LINE,
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=300, kernel_name="python3", allow_errors=True).execute()
    outputs = [cell.outputs for cell in notebook.cells]
    errors = [
        f"{output.ename}: {output.evalue}"
        for cell in outputs
        for output in cell
        if output.output_type == "error"
    ]
    assert errors == []

    shown = "".join(output.text for output in outputs[2] if output.output_type == "stream")
    assert "whole: 8 steps, 8 measured" in shown
    (card,) = (
        output.data
        for output in outputs[2]
        if output.output_type == "display_data" and "<svg" in output.data["text/html"]
    )
    assert "Net, 8 training steps (finished)" in card["text/html"]
    assert card["text/plain"].count("\n") == 0
    (result,) = (output for output in outputs[2] if output.output_type == "execute_result")
    assert "Net, 8 training steps (finished)" in result.data["text/plain"]

    shown = "".join(output.text for output in outputs[3] if output.output_type == "stream")
    assert "half: 8 steps, 8 measured" in shown
    (result,) = (output for output in outputs[3] if output.output_type == "execute_result")
    assert result.data["text/plain"] == "True"
