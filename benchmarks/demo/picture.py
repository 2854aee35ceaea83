"""Draws the picture of the README: the page of a plan for LLaMA-70B on 64 GPUs, as Chromium shows its upper part."""

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

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "explain-page.png"
WIDTH = 1200
COLOURS = 256  # a quarter of the bytes, and no difference to the eye


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


def main() -> None:
    """Write the page, and the picture of its upper part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, help="take this page in place of planning one")
    parser.add_argument("--height", type=int, default=1600, help="pixels of the page that are shown")
    options = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("needs Chromium")
    with tempfile.TemporaryDirectory() as folder:
        path = options.page or Path(folder) / "page.html"
        if options.page is None:
            page(path)
        flags = ("--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{options.height}")
        subprocess.run([browser, *flags, f"--screenshot={PICTURE}", path.resolve().as_uri()], check=True)
    Image.open(PICTURE).convert("RGB").quantize(COLOURS).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
