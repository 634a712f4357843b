"""The plugin that TensorBoard loads: its routes, which answer from event files and the traces next to them.

TensorBoard imports this file at startup, even if there are no profiles, so slow imports wait for the first
request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from tensorboard import plugin_util
from tensorboard.backend.http_util import Respond
from tensorboard.errors import PublicError
from tensorboard.plugins.base_plugin import FrontendMetadata, TBContext, TBPlugin
from werkzeug.wrappers import Request

from lightning_modelprof.errors import ModelProfError

if TYPE_CHECKING:
    from lightning_modelprof.tensorboard_plugin.answers import Answers


PLUGIN_NAME: Final = "modelprof"
"""As in ``show/tensorboard/event_file.py``, which isn't imported here."""


_TAB_NAME: Final = "Model Profile"


_JSON: Final = "application/json"


_BINARY: Final = "application/octet-stream"


Answer = Callable[[Any, str, Mapping[str, str]], Any]
"""Takes TensorBoard's context, the experiment and the request's arguments; returns what to send."""


class ModelProfPlugin(TBPlugin):  # type: ignore[misc]  # TensorBoard has no types
    """Shows profiles of lightning-modelprof in a TensorBoard tab."""

    plugin_name = PLUGIN_NAME

    def __init__(self, context: TBContext) -> None:
        self._provider = context.data_provider
        self._logdir = context.logdir or ""

    def get_plugin_apps(self) -> dict[str, Any]:
        return {
            "/static/*": Request.application(_send_static),
            "/profiles": self._json(lambda: self._answers.profiles),
            "/view": self._json(lambda: self._answers.view),
            "/compare": self._json(lambda: self._answers.compare),
            "/columns": self._json(lambda: self._answers.columns, media_type=_BINARY),
            "/trace": self._json(lambda: self._answers.trace, media_type=_BINARY),
        }

    def is_active(self) -> bool:
        """Return false, because TensorBoard shows the tab if it finds summaries of this plugin."""
        return False

    def frontend_metadata(self) -> FrontendMetadata:
        return FrontendMetadata(es_module_path="/static/index.js", tab_name=_TAB_NAME)

    @cached_property
    def _answers(self) -> Answers:
        from lightning_modelprof.tensorboard_plugin.answers import Answers  # noqa: PLC0415

        return Answers(self._provider, self._logdir)

    def _json(self, find: Callable[[], Answer], media_type: str = _JSON) -> Any:
        """Build an application that sends an answer, or else the error."""

        @Request.application
        def application(request: Request) -> Any:
            context = plugin_util.context(request.environ)
            experiment = plugin_util.experiment_id(request.environ)
            try:
                answer = find()(context, experiment, request.args)
                return Respond(request, answer if media_type == _BINARY else _encoded(answer), media_type)
            except ModelProfError as error:
                return Respond(request, {"error": str(error)}, _JSON, code=404)
            except PublicError as error:
                # The fast loader can't read blobs of runs with a quote or a backslash in their names.
                hint = "If the run has an unusual name, try tensorboard --load_fast=false."
                sentence = f"TensorBoard can't read this: {str(error).removesuffix('.')}. {hint}"
                return Respond(request, {"error": sentence}, _JSON, code=error.http_code)

        return application


def _encoded(answer: Any) -> bytes:
    """Encode as JSON; TensorBoard's own encoder is slow for large tables."""
    from lightning_modelprof.show.html.document import encode  # noqa: PLC0415

    return encode(answer)


def _send_static(request: Request) -> Any:
    file = static_files().get(request.path.partition("/static/")[2])
    if file is None:
        return Respond(request, "No such file.", "text/plain", code=404)
    return Respond(request, file.content, file.media_type)


_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
"""Fixed, because some systems take .js for plain text, which browsers refuse to run."""


_STYLES: Final = (
    "html/parts.css",
    "vendor/uplot/uPlot.min.css",
    "steps/steps.css",
    "timeline.css",
    "dashboard.css",
)
"""Parts of ``page.css``; rules of later files win."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    content: bytes
    media_type: str


@cache
def static_files() -> dict[str, StaticFile]:
    """Map names to files: the dashboard's, and under ``html/`` those that it shares with report.html."""
    from lightning_modelprof.show.html.page import SHARED_FILES, SHARED_FOLDER  # noqa: PLC0415
    from lightning_modelprof.tensorboard_plugin import bundle  # noqa: PLC0415

    paths = {path.relative_to(bundle.STATIC).as_posix(): path for path in bundle.STATIC.rglob("*")}
    paths |= {f"html/{name}": SHARED_FOLDER / name for name in SHARED_FILES}
    files = {name: path.read_bytes() for name, path in paths.items() if path.suffix in _TYPES}
    files |= bundle.in_few_requests({name: path.read_bytes() for name, path in bundle.script_files().items()})
    files["page.css"] = b"\n".join(files[name] for name in _STYLES)
    return {
        name: StaticFile(content, _TYPES[PurePosixPath(name).suffix])
        for name, content in sorted(files.items())
    }
