"""Tests that texts for people are plain English: phrases that no native engineer writes are banned.

The search covers the package's string literals (not docstrings or comments), the texts of its pages, and the
README. To ban a phrase, add it to ``BANNED`` with a bad and a good example.
"""

import ast
import io
import re
import tokenize
from functools import cache

import pytest

from tests.house.test_layering import FILES
from tests.support.fits import ROOT

PACKAGE = ROOT / "lightning_modelprof"
HOLE = "0"  # stands for values in f-strings and templates, mostly numbers

ALLOWED = (
    *("INPUT-BOUND", "HOST-BOUND", "Slurm job", "host name", "for loop", "model input"),
    *("Reader Ratio", "reader_cost", "batch_cost", "Others"),  # Paddle's tables
    *("meanwhile on ", "Meanwhile"),  # a line in a slice's details, and its label
    *("idle: host", "critical path: host"),  # kinds of slices that appear in links
    *("nccl:", "gloo:", "what was seen"),
    *("(default:", ": inspect:", ": activities:", ": schedule:", "got both:", "such as:"),  # in errors
)
"""Removed before the search."""

BANNED = (
    # Clauses for nouns
    (
        r"what is (?:known|said|chosen|given|meant|asked|there|left)\b",
        "Click for what is known of it.",
        "Click for details.",
    ),
    (r"what the findings cost", "without what the findings cost", "best case"),
    (r"what others left|that others left", "CPUs that others left", "free CPUs"),
    (r"^(?:what|where|who) (?!if\b|to\b)[^.?]{0,60}$", "Where the workers were", "Workers"),
    (r"what (?:did it|has to be)", "What did it", "Things that helped"),
    (r"at stake", "3 ms at stake", "could save 3 ms"),
    # "of" for every relation
    (
        r"\bof \w+ (?:\w+ )?of \w+ (?:\w+ )?of\b",
        "the time of fetches of batches of a run",
        "the run's fetch time",
    ),
    (r"\w+ of ours\b", "an error of ours", "our error"),
    (r"time of (?:a|the) step\b", "time of a step", "step time"),
    (r"step of the loop|loop's step", "the mean step of the loop", "the step time"),
    # "a step" for "per step"
    (r"\b(?:ms|s|µs|%|MiB|GiB|times) a (?:step|batch|side)\b", "3 ms a step", "3 ms per step"),
    (r"\b(?:runs|steps) a side\b|takes \S+ a side", "three runs a side", "three runs per side"),
    (r"\ba look\b", "take a look", "see"),
    (r"\blook(?:ed|s)? into\b", "click to look into it", "click to zoom"),
    (r"\b(?:is|are|was|were|be) looked (?:at|for)\b", "no step was looked at", "no step was sampled"),
    # "takes long"
    (r"\btakes? (?:long|the time)\b", "A callback takes long", "Slow callback"),
    (r"goes to waiting", "91% goes to waiting for batches", "91% is spent waiting for data"),
    (r"\bnothing to do\b", "the device has nothing to do", "the GPU is idle"),
    (r"\bin which the device (?:has|waits)", "time in which the device has no work", "GPU idle time"),
    # Colon chains
    (
        r"[^:]: [^:.;`{}'\"]{3,60}: (?!//)(?:[a-z])",
        "To gain more: make it cheaper: decode first",
        "Decode first.",
    ),
    (r": try it", "take less time: try it", "may take less time"),
    # Archaic or German adverbs
    (r"\banew\b", "started anew", "started again"),
    (r"\bbesides?\b", "beside the training", "in parallel with training"),
    (r"\bin vain\b", "read in vain", "wasted"),
    (r"\bin earnest\b", "used in earnest", "used seriously"),
    (r"\bat a stretch\b", "4 ms at a stretch", "longest gap 4 ms"),
    (r"\bas (?:they are|it is)\b(?! \w+(?:ed|ing)\b)", "the rows as they are", "the rows, unchanged"),
    (r"\bat once\b", "raises at once", "raises immediately"),
    (r"\blikewise\b", "likewise for GPUs", "also for GPUs"),
    (r"\bmeanwhile\b", "made meanwhile", "made in parallel"),
    (r"\bthereof\b", "and 3 thereof", "and 3 of them"),
    (r"\bin the end\b", "stop() in the end", "stop() when done"),
    (
        r"\ball the same\b|\bnone the less\b",
        "there may be findings all the same",
        "there may still be findings",
    ),
    (r"\bhas (?:been )?let go\b|\bis let go\b|\blet go\b", "the step is let go", "the step continues"),
    (r"\bagain and again\b", "drawn again and again", "bootstrapped"),
    (r"\bby itself\b", "time that a module takes by itself", "self time"),
    (r"\binside of\b|\boutside of\b", "what is inside of it", "what's inside it"),
    (r"\bas far as\b", "as far as they were kept", "the saved ones"),
    # Generic agents and code that speaks
    (r"\b(?:no|some|any)body\b|\bwhoever\b", "that somebody overrides", "that you override"),
    (r"\bwho (?:is late|waits?|waited|comes?|came|does|has)\b", "who is late", "the straggler"),
    (r"\b(?:is|are|was|be) (?:told|said)\b", "the number is said", "a note gives the number"),
    (r"\b(?:tells?|says?) (?:no|nothing|of)\b", "names do not tell of tensor cores", "unclassified kernels"),
    (r"\bnames (?:do not |don't )?tell\b", "kernels whose names tell", "kernels we can classify"),
    (r"\bmends?\b", "what to mend", "what to fix"),
    (r"\bleaves? (?:\w+ ){0,4}alone\b", "leave the tensor cores alone", "don't use tensor cores"),
    (r"\bleaves? behind\b", "what its phase leaves behind", "blocks that the phase keeps"),
    (r"cannot be meant", "arguments that cannot be meant", "invalid arguments"),
    (r"steps? aside", "an error steps aside", "training continues"),
    (r"\bthought away\b", "all waits are thought away", "without any waits"),
    (r"\b(?:it|gradients?|that) wants?\b", "it wants a GPU", "it requires a GPU"),
    # Inverted clauses
    (
        r"^(?:of|in) (?:a|the|several|all)\b[^,.]*? (?:the one|it is|is the|are the)\b",
        "Of several loaders the one that is slow",
        "The slowest loader",
    ),
    (r"\bto be (?:surer|believed|trusted|used|shown)\b", "memory to be used", "memory"),
    (
        r"\bhave to be\b|\bhas to (?:be|stay)\b",
        "What is random has to stay behind it",
        "Keep randomness after it",
    ),
    (r"have most to do|has most to do", "whose workers have most to do", "with the busiest workers"),
    (r"\bof little worth\b", "these figures are of little worth", "these figures are unreliable"),
    (r"\bturns? (?:\w+ )?round\b", "Swap turns them round", "Swap?"),
    # begin, less, must, not known
    (
        r"\b(?:the|its|at|since) begin\b|\bbegin of\b",
        "at the begin of the trace",
        "at the start of the trace",
    ),
    (r"\bto (?:its|their) end\b", "no step ran to its end", "no step finished"),
    (r"\b(?:after|allocated) less\b|\bless (?:that|what) ", "after less before", "after minus before"),
    (
        r"\b(?:is|are|was|were) not known\b|\bnot known which\b",
        "the peak is not known",
        "the peak is unknown",
    ),
    (r"\bin no (?!way|time\b)\w+\b", "time in no phase", "time outside all phases"),
    (r"\bmay not be\b", "it may not be read", "can't read it"),
    (
        r"\bgoes? beyond\b|\bbeyond the \w+ edge\b",
        "points go beyond the upper edge",
        "points are above the chart",
    ),
    (
        r"\blies? (?:in|beyond|below|outside|between)\b",
        "2 ms lie between the steps",
        "2 ms between the steps",
    ),
    (
        r"\bstands? (?:in|there|at|for itself|below)\b",
        "each interval stands for itself",
        "intervals aren't corrected",
    ),
    (r"\bthe least and the most\b", "the least and the most of them", "min and max"),
    (r"\bthrown together\b|\bput together\b", "whose figures are thrown together", "whose figures are mixed"),
    # One word per thing
    (r"\b(?:usual|typical|steady|kept|ordinary) steps?\b", "a typical step", "the median step"),
    (r"benchmark(?:'s steps| is made of)", "which the benchmark is made of", "the benchmarked steps"),
    (r"\b(?:this|the) profiler took\b|\bown cost\b", "this profiler took 3 s", "profiler overhead 3 s"),
    (
        r"\bfetch of a batch\b|\bwaits? for (?:its|a|the) (?:next )?batch\b",
        "waits for its next batch",
        "waits for data",
    ),
    (
        r"\bthe host(?:'s)?\b|\bhost (?:work|time|threads?|events?|ranges?)\b",
        "the host launches",
        "the CPU launches",
    ),
    (r"\ba process of its own\b", "in a process of its own", "in a background process"),
    (r"\b(?:that|which) were kept\b", "the steps that were kept", "the saved steps"),
    (r"\bseveral\b", "Traces from several ranks", "Traces from multiple ranks"),
    (
        r"\b(?:an?|the|its|this|another|no such|current|run's|saved) folders?\b",
        "Show the newest run in this folder",
        "Show the newest run in this directory",
    ),
    # Found by a copy editor
    (r"^version of\b", "version of torch", "torch version"),
    (r"\bcopies(?:,| and) sets\b", "kernels, copies, sets", "kernels, copies, memsets"),
    (r"\bcounts in (?:those|that)\b", "Overhead counts in those phases", "Overhead is part of those phases"),
    (r"\btorch (?:threads?|doesn't)\b", "1 torch threads", "1 PyTorch thread"),
    (r"to the (?:left|right) mean\b", "Bars to the left mean less", "Bars to the left show decreases"),
    (r"\bat (?:half the|zero) time\b", "At half the time", "If it took half the time"),
    (r"\bcould save (?:before|after)\b", "could save before", "possible saving, before"),
    (r", if tensor\b", "(.item(), if tensor)", "(.item(), a tensor in an if condition)"),
    (r"\bdataloader takes \d", "dataloader takes 17%", "data loading takes 17%"),
    (r"\bhidden by\b", "hidden by the device", "hidden behind GPU work"),
    (r"\baren't clean\b", "Pale steps aren't clean.", "Pale steps are excluded."),
    (r"\b95% interval\b", "95% interval", "95% confidence interval"),
    (r"\bno readable\b(?! timed)", "There's no readable window", "No window was recorded"),
    (r"\bexcludes files\b", "Private memory excludes files", "Private memory excludes file-backed memory"),
    (r"runs differ:", "The two runs differ: precision", "The two runs differ in precision"),
    (r"\bepoch (?:turn|change)s?\b", "An epoch turn takes 4 ms", "An epoch boundary takes 4 ms"),
    (r"\baround the loop\b", "Time around the loop", "Time outside the loop"),
    (r"\bclean or not\b", "All steps, clean or not", "All steps, including excluded ones"),
    (r"\bthis package(?:'s)?\b", "the overhead of this package", "lightning-modelprof's overhead"),
    (r"\bhad no CPU\b", "training had no CPU 71% of the time", "training spent 71% waiting for a CPU"),
    (r"\bis lost because\b", "80% is lost because the GPU waits", "the GPU spends 80% waiting"),
    (r"^(?:Do|At): ", "Do: cache each sample", "Fix: cache each sample"),
    # Typography
    (r"\d %(?! \d)", "91 %", "91%"),  # but a remainder in code
    (r"\d us\b", "30 us", "30 µs"),
)
"""Case-insensitive pattern, an example that it finds, and a better phrase that it doesn't find."""


def literals(tree):
    """String literals except docstrings and attribute docs."""
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}

    def visit(node):
        if isinstance(node, ast.JoinedStr):
            parts = (one.value if isinstance(one, ast.Constant) else HOLE for one in node.values)
            yield node.lineno, "".join(parts)
            for one in node.values:
                if isinstance(one, ast.FormattedValue):
                    yield from visit(one.value)
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and id(node) not in bare:
                yield node.lineno, node.value
        else:
            for child in ast.iter_child_nodes(node):
                yield from visit(child)

    return visit(tree)


SCRIPT = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?\*/|"
    r"(?:(?<=[(=,])|(?<=return ))/(?:[^/\\\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/)"  # or a regular expression
    r'|"(?P<double>(?:[^"\\\n]|\\.)*)"'
    r"|'(?P<single>(?:[^'\\\n]|\\.)*)'"
    r"|`(?P<template>(?:[^`\\$]|\\.|\$(?!\{)|\$\{(?:[^{}`]|`[^`]*`|\{[^{}]*\})*\})*)`",
    re.DOTALL,
)


def script_texts(source):
    """Strings and templates in JavaScript, including strings nested in templates."""
    for match in SCRIPT.finditer(source):
        line = source.count("\n", 0, match.start()) + 1
        if (template := match["template"]) is not None:
            for inner in re.findall(r"\$\{((?:[^{}`]|`[^`]*`|\{[^{}]*\})*)\}", template):
                yield from ((line, text) for _, text in script_texts(inner))
            yield line, re.sub(r"\$\{(?:[^{}`]|`[^`]*`|\{[^{}]*\})*\}", HOLE, template)
        elif match["comment"] is None:
            yield line, match["double"] if match["double"] is not None else match["single"]


def markup_texts(source):
    """Lines of a template without comments and tags, but with the titles and labels in tags."""
    text = re.sub(r"\{#.*?#\}", "", source, flags=re.DOTALL)
    text = re.sub(r"\{[{%].*?[%}]\}", HOLE, text, flags=re.DOTALL)
    for number, line in enumerate(text.split("\n"), 1):
        yield from ((number, one) for one in re.findall(r'(?:title|aria-label|placeholder)="([^"]*)"', line))
        yield number, re.sub(r"<[^>]*>", " ", line)


def markdown_texts(source):
    """Lines of text, without code blocks."""
    prose = re.sub(r"```.*?```", lambda match: "\n" * match.group().count("\n"), source, flags=re.DOTALL)
    return ((number, line) for number, line in enumerate(prose.split("\n"), 1))


def texts_of(path):
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return literals(ast.parse(source))
    return {".js": script_texts, ".j2": markup_texts, ".md": markdown_texts}[path.suffix](source)


@cache  # many texts are there more than once
def found_in(text):
    """Banned phrases in a text."""
    for phrase in ALLOWED:
        text = text.replace(phrase, "")
    return [match.group() for pattern, _, _ in BANNED if (match := re.search(pattern, text, re.IGNORECASE))]


def read_files():
    """All files with texts for people."""
    kinds = (path for suffix in ("py", "js", "j2") for path in sorted(PACKAGE.rglob(f"*.{suffix}")))
    return [*(path for path in kinds if "vendor" not in path.parts), ROOT / "README.md"]


def name_of(path):
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).as_posix()


@pytest.mark.parametrize(("pattern", "bad", "good"), BANNED, ids=[pattern for pattern, _, _ in BANNED])
def test_pattern_finds_its_example(pattern, bad, good):
    assert re.search(pattern, bad, re.IGNORECASE)
    assert found_in(bad)
    assert not found_in(good)


def test_texts_have_no_banned_phrases():
    wrong = [
        f"{name_of(path)}:{line}: {phrase!r} in {text[:120]!r}"
        for path in read_files()
        for line, text in texts_of(path)
        for phrase in found_in(text)
    ]
    assert wrong == []


AGENTS = re.compile(
    r"\b(nobody|somebody|anybody|whoever|anew|thereof|likewise|at a stretch|in vain)\b", re.IGNORECASE
)
"""Words that no docstring or comment in the package may contain."""


def docstrings_and_comments(source):
    """Comments and strings that stand alone, with their lines."""
    strings = (
        (node.lineno, node.value.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
    )
    comments = (
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    )
    return [*strings, *comments]


def test_docstrings_and_comments_are_plain():
    wrong = [
        f"{name_of(path)}:{line}: {found.group()}"
        for path in FILES.values()
        for line, text in docstrings_and_comments(path.read_text(encoding="utf-8"))
        if (found := AGENTS.search(text))
    ]
    assert wrong == []


def test_all_docstrings_and_comments_are_read():
    source = '"""one"""\nx = "two"  # three\n"""four"""\ndef f():\n    """Whoever."""\n'
    found = sorted(docstrings_and_comments(source))
    assert found == [(1, "one"), (2, "# three"), (3, "four"), (5, "Whoever.")]
    assert AGENTS.search("Whoever.")


def test_all_kinds_of_text_are_read():
    assert list(literals(ast.parse('"""doc"""\nx = f"a {b:d} %" + g("in vain")\n"""of x"""'))) == [
        (2, "a 0 %"),
        (2, "in vain"),
    ]
    script = '// "no"\nconst a = `two ${n === 1 ? "anew" : "x"} %`; /* `no` */ b(\'c\');'
    assert list(script_texts(script)) == [(2, "anew"), (2, "x"), (2, "two 0 %"), (2, "c")]
    page = '{# no #}<p title="a look">{{ x }} <b>%</b></p>'
    assert [text.split() for _, text in markup_texts(page)] == [["a", "look"], ["0", "%"]]
    assert [text for _, text in markdown_texts("a\n```\nno\n```\nb") if text] == ["a", "b"]
    names = {name_of(path) for path in read_files()}
    assert {"README.md", "show/html/parts.html.j2", "tensorboard_plugin/static/views.js", "units.py"} <= names


OWN_NUMBERS = {
    "lightning.trainer_loop": "three words of a progress bar",
    "engine.live_figures": "the line of Paddle's step_info, in its own digits",
    "report.compare.build_compare": "a factor, with the digits that its interval allows",
    "report.rules": "parts of sentences",
    "report.tables.run": "parts of sentences",
    "show.html": "coordinates of drawings",
    "show.step_card": "coordinates of drawings",
    "units": "here they are written",
}
"""Modules that round numbers with their own format, and why. ``:g`` is for numbers given by users."""


def test_numbers_are_rounded_only_in_units():
    """All modules without an exception format numbers through ``units.py``."""
    found = {
        module
        for module, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FormattedValue)
        and node.format_spec is not None
        and re.search(r"\..*[efg%]", ast.unparse(node.format_spec))
    }
    allowed = {module for module in found if any(f"{module}.".startswith(f"{own}.") for own in OWN_NUMBERS)}
    assert found == allowed
    assert all(any(f"{module}.".startswith(f"{own}.") for module in found) for own in OWN_NUMBERS)
