"""Draws the pictures of the README and of docs/explain-page.md: a page in Chromium, wide and narrow, dark and light."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from PIL import Image
from transformers import LlamaConfig, LlamaForCausalLM

import galvatron_fx
from galvatron_fx.ir.plan.strategy import ROLES
from galvatron_fx.report.page import write_page

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDE, NARROW = 1400, 420
COLUMNS, GAP = 3, 24  # of the narrow page side by side, so that all of its upper part is seen
COLOURS = 256  # a quarter of the bytes, and no difference to the eye
SCHEMES = {"dark": 0, "light": 1}  # as Chromium's setting counts them


def page(path: Path) -> None:
    """Plan the model of docs/explain-page.md and write its page."""
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    ids = torch.zeros(64, 4096, dtype=torch.int64, device="meta")
    cluster = galvatron_fx.Cluster.preset("64xA100-80GB")
    print(write_page(path, model, cluster, {"input_ids": ids, "labels": ids}, roles=ROLES))


def shot(browser: str, page: Path, size: tuple[int, int], scheme: int) -> Image.Image:
    """What Chromium shows of a page in a window of that size."""
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "shot.png"
        flags = (
            "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files",
            f"--user-data-dir={folder}/profile", f"--blink-settings=preferredColorScheme={scheme}",
            f"--window-size={size[0]},{size[1]}",
        )  # fmt: skip
        subprocess.run([browser, *flags, f"--screenshot={picture}", page.resolve().as_uri()], check=True)
        return Image.open(picture).convert("RGB")


def narrow(browser: str, page: Path, height: int, scheme: int) -> Image.Image:
    """The page on a narrow screen, in columns; Chromium has no window as narrow, so it lies in a frame."""
    frame = page.with_name("frame.html")
    style = f"width:{NARROW}px;height:{COLUMNS * height}px;border:0"
    frame.write_text(f'<body style="margin:0"><iframe src="{page.name}" style="{style}"></iframe></body>')
    whole = shot(browser, frame, (600, COLUMNS * height), scheme)
    side_by_side = Image.new("RGB", (COLUMNS * (NARROW + GAP) - GAP, height), whole.getpixel((2, 2)))
    for column in range(COLUMNS):
        part = whole.crop((0, column * height, NARROW, (column + 1) * height))
        side_by_side.paste(part, (column * (NARROW + GAP), 0))
    return side_by_side


def main() -> None:
    """Write the page, and pictures of its upper part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, help="take this page in place of planning one")
    parser.add_argument("--height", type=int, default=1600, help="pixels of the page that are shown")
    options = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("needs Chromium")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        if options.page is None:
            page(path)
        else:
            shutil.copy(options.page, path)
        for name, scheme in SCHEMES.items():
            for kind, picture in (
                ("page", shot(browser, path, (WIDE, options.height), scheme)),
                ("narrow", narrow(browser, path, options.height, scheme)),
            ):
                picture.quantize(COLOURS).save(IMAGES / f"explain-{kind}-{name}.png", optimize=True)


if __name__ == "__main__":
    main()
