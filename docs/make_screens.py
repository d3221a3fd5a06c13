"""Makes the screens in docs/images from a real run: `pyps run`, `pyps top`, and the page of `pyps report`.

    python docs/make_screens.py        # half a minute; the page's picture needs Chromium

Four emulated devices train the demo's network on scikit-learn's digits.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from pyps.cli.progress import rows
from pyps.cli.top import screen
from pyps.formats import Device, ModelInfo, Point, Profile, read_cluster, write_json
from pyps.profiler.curve import select_fit
from pyps.report.live import LiveRun
from pyps.report.page import make_page
from pyps.report.run_data import load_run
from pyps.report.top import StoreTop, TopStore
from pyps.run import RunOptions, run
from pyps.solver.plan import make_plan

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
sys.path.append(str(ROOT / "tests" / "helpers"))

DEVICES = {"fast": 1.0, "good": 1.4, "fair": 2.0, "slow": 2.9}
SECONDS_FIXED, SECONDS_A_SAMPLE = 0.03, 0.002  # of the fast device
GLOBAL_BATCH, ITERATIONS = 256, 80
SHOWN_AT = 0.6  # of the samples
CELLS = 120
PAGE_WIDTH, PAGE_HEIGHT = 1200, 1022
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


class Eye:
    """Keeps what the screens showed when the run was so far."""

    def __init__(self, folder: Path) -> None:
        self.rows: list[Text] = []
        self.top: TopStore | None = None
        self._folder = folder
        self._watched: StoreTop | None = None

    def progress(self, now: LiveRun) -> None:
        share = now.samples / now.requested
        if self._watched is None and share > SHOWN_AT / 2:
            self._watched = StoreTop(load_run([self._folder]).setup.store, self._folder)
            self._watched.look()
        if self._watched is not None and self.top is None and share > SHOWN_AT:
            self.rows, self.top = rows(now, CELLS), self._watched.look()
            self._watched.close()


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = write_plan(folder)
        eye = Eye(folder / "digits")
        options = RunOptions(
            samples=ITERATIONS * GLOBAL_BATCH,
            policy="bsp",
            run_dir=folder / "digits",
            throttle_from=folder / "cluster.toml",
            seed=1,
        )
        run(plan, ROOT / "examples" / "digits" / "train.py", options, on_progress=eye.progress)
        if eye.top is None:
            sys.exit("the run was too short to be seen")
        save("pyps run --plan plan.json train.py", eye.rows, IMAGES / "run.svg")
        save("pyps top", [screen([eye.top], CELLS)], IMAGES / "top.svg")
        picture(folder / "digits", IMAGES / "report.png")
    return 0


def write_plan(folder: Path) -> Path:
    """Profiles of the four devices, the cluster file, and its plan."""
    profiles = []
    lines = [f"[job]\nglobal_batch = {GLOBAL_BATCH}\n"]
    for name, factor in DEVICES.items():
        times = [(b, factor * (SECONDS_FIXED + SECONDS_A_SAMPLE * b)) for b in (8, 16, 32, 64, 128)]
        points = [Point(batch=b, seconds=seconds) for b, seconds in times]
        model = ModelInfo(name="digits_cnn")
        device, fit = Device(name=name), select_fit(points)
        profile = Profile(device=device, model=model, points=points, max_batch=160, fit=fit)
        profiles.append(profile)
        write_json(folder / f"{name}.json", profile)
        lines.append(f'[[worker]]\nname = "{name}"\nprofile = "{name}.json"\n')
    (folder / "cluster.toml").write_text("\n".join(lines))
    write_json(folder / "plan.json", make_plan(read_cluster(folder / "cluster.toml"), profiles))
    return folder / "plan.json"


def save(title: str, parts: list[RenderableType], path: Path) -> None:
    """Save what a terminal shows, as an SVG without fonts from elsewhere."""
    console = Console(record=True, width=CELLS, file=io.StringIO(), force_terminal=True, highlight=False)
    for part in parts:
        console.print(part)
    path.write_text(FONTS.sub("", console.export_svg(title=title)))
    print(f"wrote {path.relative_to(ROOT)}")


def picture(folder: Path, path: Path) -> None:
    """The top of the run's page, in a browser."""
    from browser import Browser, find_browser

    program = find_browser()
    if program is None:
        print("no Chromium on PATH: report.png is left as it is", file=sys.stderr)
        return
    (folder / "report.html").write_text(make_page(load_run([folder]), folder / "report.html"))
    with Browser(program) as browser:
        browser.open(folder / "report.html", PAGE_WIDTH)
        browser.picture(path, PAGE_HEIGHT)
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
