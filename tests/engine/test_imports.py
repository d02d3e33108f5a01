"""Imports go one way, app.py -> viz.pages -> viz.figures -> engine; torch stays in its place; modules stay short."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(path for top in ("engine", "viz") for path in (ROOT / top).rglob("*.py"))
MODULES += [path for path in [ROOT / "app.py"] if path.exists()]
LAYERS = ("engine", "viz.figures", "viz.pages", "app")  # none imports one that comes after it
MAX_LINES, MAX_MODE_LINES = 400, 150


def imported(source: str, module: str) -> set[str]:
    """Every module named by an import, anywhere in the source; `module` is its own dotted name."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*(module.split(".")[: -node.level] if node.level else []), *filter(None, [node.module])]
            names |= {".".join(base), *(".".join([*base, alias.name]) for alias in node.names)}
    return names


def is_under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def broken_rules(path: str, source: str) -> list[str]:
    """The rules that a module breaks, in words; `path` is relative to the root, like engine/real/worker.py."""
    module = path.removesuffix(".py").replace("/", ".")
    names = imported(source, module)

    def imports(*packages: str) -> list[str]:
        return sorted(name for name in names if any(is_under(name, package) for package in packages))

    broken = []
    if is_under(module, "engine"):
        broken += [f"the engine imports {name}" for name in imports("streamlit", "plotly", "viz", "app")]
    may_train = path.startswith("engine/real/") or (path.startswith("engine/modes/") and path.endswith("/run.py"))
    if not may_train:
        broken += [f"{name} is for engine.real and modes' run alone" for name in imports("torch")]
    own = next((i for i, layer in enumerate(LAYERS) if is_under(module, layer)), None)
    if own is not None:
        broken += [f"{LAYERS[own]} imports {name}, which is above it" for name in imports(*LAYERS[own + 1 :])]
    if is_under(module, "viz.figures"):
        broken += [f"a figure is drawn without {name}" for name in imports("streamlit")]
    return broken


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_is_below_it(path):
    assert broken_rules(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("engine/spec.py", "import streamlit as st"),
        ("engine/spec.py", "def late():\n    from plotly import graph_objects"),
        ("engine/spec.py", "from viz.figures import rows"),
        ("engine/spec.py", "import torch.distributed"),
        ("engine/modes/ddp/plan.py", "from torch import nn"),
        ("engine/modes/ddp/__init__.py", "import torch"),
        ("engine/cost/compute.py", "from ... import viz"),
        ("viz/figures/rows.py", "from viz.pages import lab"),
        ("viz/figures/rows.py", "from viz import pages"),
        ("viz/figures/rows.py", "from ..pages import lab"),
        ("viz/figures/rows.py", "import streamlit"),
        ("viz/pages/lab.py", "import app"),
        ("viz/pages/lab.py", "import torch"),
        ("viz/theme.py", "import torch"),
    ],
)
def test_an_import_that_goes_up_would_be_seen(path, source):
    assert len(broken_rules(path, source)) >= 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("engine/real/worker.py", "import torch"),
        ("engine/modes/ddp/run.py", "from torch import nn"),
        ("engine/spec.py", "import torchlike, visual, application"),
        ("viz/figures/rows.py", "import plotly\nfrom engine import timeline"),
        ("viz/pages/lab.py", "import streamlit\nfrom viz.figures import rows"),
        ("app.py", "from viz.pages import lab"),
    ],
)
def test_an_import_that_goes_down_is_allowed(path, source):
    assert broken_rules(path, source) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_is_too_long_to_read(path):
    mode = path.parent.parent == ROOT / "engine" / "modes" and path.name in ("plan.py", "run.py")
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines < MAX_MODE_LINES if mode else lines <= MAX_LINES


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_says_first_what_it_does(path):
    source = path.read_text(encoding="utf-8")
    assert not source.strip() or ast.get_docstring(ast.parse(source))


def test_predicting_loads_neither_torch_nor_a_page():
    """What is imported on the way counts too: a prediction, its text and its exports, in a fresh process."""
    code = """
import sys, engine
from engine import analysis, export, launch, modes
from engine.graph import notation
from engine.outcome import finish
for _ in range(2):  # once more with everything imported
    prediction = engine.simulate(engine.Spec(mode="pipeline", devices=2))
notation.format_plan(prediction.plan), export.to_perfetto(prediction.timeline), prediction.summary()
print(sorted({"torch", "streamlit", "plotly", "pandas"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_a_command_begins_with_next_to_nothing_imported():
    """Until then nobody answers Ctrl-C."""
    code = """
import sys, engine.__main__
print(sorted(name for name in sys.modules if name.startswith(("engine", "numpy"))))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("['engine', 'engine.__main__']", "")
