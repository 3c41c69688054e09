"""Pictures of the docs: `python docs/images/make.py [RUN_DIR]`.

Draws the schedules; of a run, if one is given, also parts of its report, by headless Chromium on a
page of 1100 pixels. Needs the extra `monitor`.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib import image
from PIL import Image

FOLDER = Path(__file__).parent
COMMAND = [sys.executable, "-m", "lightning_megatron"]
SCHEDULES = ("1f1b", "interleaved", "zbv")
PARTS = {
    "report": ("", "Where the time went", "What went wrong"),
    "report-curves": ("Loss",),
    "report-ranks": ("Ranks", "Checkpoints"),
}
"""Headings of the sections in each picture; the empty one is what stands above the first."""


def draw_schedules() -> None:
    """Draw the timelines."""
    for name in SCHEDULES:
        layout = ["--schedule", name, "--pp", "4", "--microbatches", "8"]
        drawing = ["--svg", str(FOLDER / f"schedule-{name}.svg")]
        subprocess.run([*COMMAND, "schedule", *layout, *drawing], check=True, capture_output=True)


def picture_report(run_dir: str) -> None:
    """Make a report, and a picture of each of `PARTS`."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))))
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.html")
        subprocess.run([*COMMAND, "report", run_dir, "-o", str(report)], check=True)
        head, *sections = re.split(r"(?=<section>)", report.read_text("utf-8"))
        style, top = head.split("<body>")
        for name, headings in PARTS.items():
            body = top if "" in headings else ""
            for heading in filter(None, headings):
                begin = f"<section><h2>{heading}"
                body += next(section for section in sections if section.startswith(begin))
            page, shot = Path(scratch, f"{name}.html"), Path(scratch, f"{name}.png")
            page.write_text(f"{style}<body>{body}</body></html>", "utf-8")
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            options += [f"--user-data-dir={scratch}/profile", "--window-size=1100,4000"]
            subprocess.run(
                [browser, *options, f"--screenshot={shot}", page.as_uri()],
                check=True,
                capture_output=True,
            )
            pixels = image.imread(shot)
            inked = (abs(pixels - pixels[0, 0]) > 0.02).any(axis=(1, 2)).nonzero()[0]
            cropped = Image.open(shot).convert("RGB").crop((0, 0, 1100, int(inked[-1]) + 20))
            cropped.save(FOLDER / f"{name}.png", optimize=True)


if __name__ == "__main__":
    draw_schedules()
    for given in sys.argv[1:]:
        picture_report(given)
