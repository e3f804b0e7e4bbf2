"""Train the shipped arm, film an evaluation and put four moments of it beside the run's curve: `python -m docs.arm`.

The picture is docs/media/arm.png.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import av
from PIL import Image

PICTURE: Final = Path(__file__).parent / "media" / "arm.png"
# A film shows episodes side by side; each tile has the arm from the side and from above, and a border.
_TILE, _BORDER = (256, 128), 4
_MOMENTS: Final = (0.0, 0.3, 0.6, 0.95)
_GAP: Final = 8


def compose(frames: list[Image.Image], curve: Image.Image) -> Image.Image:
    """Return the first episode at four moments in two columns, with the curve of success to the right."""
    curve = curve.crop((curve.width // 2, 0, curve.width, curve.height))  # the left half is the return
    width, height = 2 * _TILE[0] + _GAP, 2 * _TILE[1] + _GAP
    curve = curve.convert("RGB").resize((curve.width * height // curve.height, height), Image.Resampling.LANCZOS)
    picture = Image.new("RGB", (width + _GAP + curve.width, height), "white")
    for number, moment in enumerate(_MOMENTS):
        tile = frames[round(moment * (len(frames) - 1))].crop(
            (_BORDER, _BORDER, _BORDER + _TILE[0], _BORDER + _TILE[1])
        )
        picture.paste(tile, (number % 2 * (_TILE[0] + _GAP), number // 2 * (_TILE[1] + _GAP)))
    picture.paste(curve, (width + _GAP, 0))
    return picture


def film(run: Path) -> list[Image.Image]:
    """Return the frames of the newest film of `run`, until its first episode ends."""
    newest = max(run.glob("evaluations/*/success.mp4"), key=lambda path: path.stat().st_mtime)
    with av.open(str(newest)) as container:
        frames = [frame.to_image() for frame in container.decode(video=0)]
    # An episode that has ended stays as it was: the last frame that differs from the one before is its end.
    tiles = [frame.crop((0, 0, _TILE[0], _TILE[1])).tobytes() for frame in frames]
    last = max(index for index in range(1, len(tiles)) if tiles[index] != tiles[index - 1])
    return frames[: last + 1]


def main() -> int:
    """Make the picture anew from a run of the default recipe."""
    rlinf = str(Path(sys.executable).with_name("rlinf"))
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([rlinf, "train", "recipe=embodied"], cwd=folder, check=True)
        (run,) = (Path(folder) / "runs").iterdir()
        subprocess.run([rlinf, "eval", str(run), "--video"], cwd=folder, check=True)
        picture = compose(film(run), Image.open(run / "curve.png"))
    picture.save(PICTURE, optimize=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1024:.0f} KiB", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
