"""The report in a browser: light and dark, wide and narrow."""

import shutil
import subprocess
from pathlib import Path

import pytest

from lightning_megatron.cli import main
from tests.monitoring.report.made_run import write_run

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome on the path")


def picture(page: Path, width: int, dark: bool = False):
    """Pixels of the page, from 0 to 1."""
    image = pytest.importorskip("matplotlib.image")
    target = page.with_suffix(f".{width}{'.dark' if dark else ''}.png")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += ["--blink-settings=preferredColorScheme=0"] if dark else []
    subprocess.run(
        [
            str(BROWSER),
            *options,
            f"--user-data-dir={page.parent / 'profile'}",
            f"--window-size={width},2400",
            f"--screenshot={target}",
            page.as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return image.imread(target)[..., :3]


def test_screenshots(tmp_path: Path) -> None:
    write_run(tmp_path, steps=200)
    assert main(["report", str(tmp_path)]) == 0
    page = tmp_path / "report.html"
    for width, dark in ((1280, False), (1280, True), (500, False)):
        pixels = picture(page, width, dark)
        assert pixels.shape == (2400, width, 3)
        corner = pixels[0, 0]
        assert (corner < 0.15).all() if dark else (corner > 0.95).all()
        # Nothing reaches over the margin: what is wide scrolls by itself.
        assert (abs(pixels[:, -4:] - corner) < 0.02).all()
        # Curves, bars and texts are there, from the top to far below.
        for band in range(0, 2000, 400):
            inked = (abs(pixels[band : band + 400] - corner) > 0.3).any(axis=2).mean()
            assert inked > 0.005, (width, dark, band)
        # What counts is drawn in blue, what was done again in orange.
        red, blue = pixels[..., 0], pixels[..., 2]
        assert (blue - red > 0.3).mean() > 0.005
        assert (red - blue > 0.4).mean() > 0.0005
