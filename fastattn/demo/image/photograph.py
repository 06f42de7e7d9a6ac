"""What the demo looks at: a picture of the user's, or one that matplotlib brings."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fastattn.demo._errors import DemoError
from fastattn.demo._files import open_file
from fastattn.demo.image.attention import Floats

#: In matplotlib's folder of sample data: Commodore Grace Hopper, who made the first linker and a first
#: compiler. An official photograph of the U.S. Navy, of 1984, in the public domain.
SAMPLE = "grace_hopper.jpg"
SAMPLE_CREDIT = "Grace Hopper, by the U.S. Navy, public domain; from matplotlib's sample data"

#: Mean and standard deviation of red, green and blue in ImageNet, by which the model's pictures are scaled.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

#: With fewer patches there is nothing to see; with more the plain formula's scores of six heads take 1.6 GB.
MIN_PATCHES, MAX_PATCHES = 16, 8192


@dataclass(frozen=True)
class Photograph:
    """A picture in RGB, and what to call it."""

    image: Image.Image
    name: str  #: for messages and titles
    credit: str  #: the name, or more where somebody is to be named


def read_photograph(path: Path | None) -> Photograph:
    """The picture in `path`, or the one that matplotlib brings.

    It is turned upright, transparent parts become white, and 16-bit grey 8-bit.

    Raises
    ------
    DemoError
        If there is no such file, it cannot be read, or is no picture that Pillow can read.
    """
    sample = path is None
    path = Path(matplotlib.get_data_path(), "sample_data", SAMPLE) if path is None else path
    if sample and not path.exists():
        raise DemoError(f"matplotlib came without its sample data {path}: name a picture, FILE")
    try:
        with (
            warnings.catch_warnings(action="ignore"),  # the error says as much
            open_file(path, option="FILE") as content,
            Image.open(content) as file,
        ):
            image = _to_rgb(ImageOps.exif_transpose(file), path)
    except UnidentifiedImageError:
        raise DemoError(f"FILE {path} is not a picture in a format that Pillow can read") from None
    except Image.DecompressionBombError as error:
        raise DemoError(f"FILE {path} is too large a picture: {error}") from None
    except (OSError, SyntaxError, ValueError, RuntimeError) as error:  # of a damaged picture
        reason = getattr(error, "strerror", None) or str(error)
        raise DemoError(f"FILE {path} cannot be read: {reason}") from None
    return Photograph(image, path.name, SAMPLE_CREDIT if sample else path.name)


def _to_rgb(image: Image.Image, path: Path) -> Image.Image:
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise DemoError(
            f"FILE {path} has numbers of 32 bits as pixels (mode {image.mode}), "
            "and the demo takes pictures of 8 or 16 bits"
        )
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def fit(photograph: Photograph, shorter: int, patch_size: int) -> Image.Image:
    """The picture with about `shorter` pixels on its shorter side, whole patches, and the same shape.

    Raises
    ------
    DemoError
        If it has fewer pixels than a patch on a side, or too few or too many patches.
    """
    width, height = photograph.image.size
    if min(width, height) < patch_size:
        raise DemoError(
            f"{photograph.name} is too small: it has {width} x {height} pixels, "
            f"expected {patch_size} x {patch_size} or more"
        )
    scale = shorter / min(width, height) / patch_size
    columns, rows = (max(1, round(side * scale)) for side in (width, height))
    if not MIN_PATCHES <= rows * columns <= MAX_PATCHES:
        many = "too few" if rows * columns < MIN_PATCHES else "too many"
        raise DemoError(
            f"{photograph.name} of {width} x {height} pixels with --size {shorter} gives {columns} x {rows} "
            f"patches of {patch_size} x {patch_size} pixels, which is {many}: expected {MIN_PATCHES} to "
            f"{MAX_PATCHES}"
        )
    return photograph.image.resize((columns * patch_size, rows * patch_size), Image.Resampling.BICUBIC)


def pixels_of(image: Image.Image) -> Floats:
    """``(height, width, 3)``, scaled as the model's pictures are."""
    pixels = np.asarray(image, np.float32) / 255
    pixels -= np.array(MEAN, np.float32)
    pixels /= np.array(DEVIATION, np.float32)
    return pixels
