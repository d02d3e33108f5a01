"""A run's folder or a spec file -> one HTML file with the moving picture in it, which plays without a network.

python -m viz.export runs/20261130-051412-ddp4-a1b2 --output ddp4.html --language zh
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from engine import simulate
from engine.archive import read_spec
from engine.asking.rules import SpecError
from engine.spec import Spec
from engine.timeline import Timeline
from viz import player
from viz.figures.moving import moving_picture
from viz.figures.picture import VIEWS, picture_info, typical_step
from viz.figures.places import drawn
from viz.locales import LANGUAGES, text
from viz.locales.engine import lesson


def export(source: str | Path, output: str | Path, language: str = "en", view: str | None = None) -> Path:
    """`source`: a run's folder, or a JSON file with a spec. `view`: by default measured where there is a measured
    timeline, else predicted. Raises SpecError when the source is neither."""
    source, output = Path(source), Path(output)
    spec, measured = _read(source)
    prediction = simulate(spec)
    view = view or ("measured" if measured is not None else "predicted")
    if view != "predicted" and measured is None:
        raise SpecError("no_file", "timeline", f"{source}: nothing was measured", suggest=["predicted"])
    step = None if measured is None else measured.step(typical_step(measured))
    memory = prediction.summary()["peak_memory"]
    steps = lesson(language, spec.mode).steps
    predicted = prediction.simulation.of_ranks(drawn(prediction.plan))
    info = picture_info(prediction.plan, prediction.job.layers, predicted, step, view, memory, steps)
    words = text(language)
    title = words("player.page_title", mode=spec.mode, devices=spec.devices)
    page = player.page(moving_picture(info, words), title, language)
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise SpecError("cannot_write", "output", f"{output}: {error.strerror}") from None
    return output


def _read(source: Path) -> tuple[Spec, Timeline | None]:
    if not source.is_dir():
        return Spec.from_file(source), None
    path = source / "timeline.parquet"
    measured = Timeline.load(path) if path.exists() else None
    return read_spec(source), measured if measured is not None and len(measured) else None


def main(words: list[str] | None = None) -> int:
    """Status 0: written; 2: wrong input, or a file that cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m viz.export", description=__doc__.splitlines()[0])
    parser.add_argument("source", help="a run's folder, or a JSON file with a spec")
    parser.add_argument("--output", required=True, help="the HTML file to write")
    parser.add_argument("--language", default="en", choices=tuple(LANGUAGES))
    parser.add_argument("--view", choices=VIEWS, help="default: measured where something was measured")
    given = parser.parse_args(words)
    try:
        output = export(given.source, given.output, given.language, given.view)
    except SpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{output} ({output.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
