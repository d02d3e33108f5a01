"""Turns the name of a dataset into training and validation arrays (numpy only, no torch).

Three names, each of them usable without a network:

`digits`     real handwritten digits: 1,797 images that ship with Lockstep (engine/data/SOURCES.md),
             or, with `data_dir`, the four idx files of MNIST that the user has.
`text`       English prose by character: the help topics that every Python carries. The text differs
             a little between Python versions, so every rank has to run the same one.
`synthetic`  made from a seed, as images or as tokens, for models and sizes that no real data fits.

Images are float32 [num, 1, 28, 28] with labels int64 [num]. Tokens are int64 [num, context], and so
are their labels: the same characters, one further on. Training and validation share no sample.
"""

import functools
import gzip
import itertools
import math
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

Kind = Literal["image", "token"]

NAMES = ("digits", "text", "synthetic")
KINDS: dict[str, tuple[Kind, ...]] = {
    "digits": ("image",),
    "text": ("token",),
    "synthetic": ("image", "token"),
}

IMAGE_SIDE = 28
IMAGE_CLASSES = 10

DIGITS_FILE = Path(__file__).with_name("digits.csv.gz")
DIGITS_TRAIN, DIGITS_VALIDATION = 1437, 360
DIGITS_SIDE = 8
DIGITS_MAX_PIXEL = 16

# Mean and standard deviation of the training pixels in [0, 1]; those of MNIST as PyTorch's MNIST
# example gives them (pytorch/examples, mnist/main.py).
DIGITS_MEAN, DIGITS_STD = 0.3054, 0.3244
MNIST_MEAN, MNIST_STD = 0.1307, 0.3081

SYNTHETIC_TRAIN, SYNTHETIC_VALIDATION = 2048, 256
SYNTHETIC_VOCABULARY = 64
SYNTHETIC_PATTERN = 0.15  # height of a class's pattern, in standard deviations of the noise
SYNTHETIC_TOKEN_NOISE = 0.1  # share of tokens replaced by a random one
SYNTHETIC_MAX_STRIDE = 8

TEXT_TRAIN_SHARE = 0.9


class DatasetError(ValueError):
    """A dataset that cannot be given: says the rule, the value, and what would work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """Arrays of one dataset; shapes and types are those in this module's first paragraphs."""

    kind: Kind
    train_x: np.ndarray
    train_y: np.ndarray
    validation_x: np.ndarray
    validation_y: np.ndarray
    num_classes: int  # labels are in [0, num_classes): ten digits, or the size of the vocabulary
    source: str  # where the numbers come from, in a phrase fit for a caption


def sizes(name: str, *, data_dir: str | Path | None = None, context: int | None = None) -> tuple[int, int]:
    """How many (training, validation) samples `load` would give, without reading images.

    `context` is tokens a sample; only `text` needs it. Raises DatasetError.
    """
    _check_name(name, data_dir)
    if name == "digits":
        if data_dir is None:
            return DIGITS_TRAIN, DIGITS_VALIDATION
        return _idx_count(data_dir, "train"), _idx_count(data_dir, "validation")
    if name == "text":
        train, validation = _split_text(_check_context(context))
        return len(train), len(validation)
    return SYNTHETIC_TRAIN, SYNTHETIC_VALIDATION


def vocabulary_size(name: str) -> int:
    """How many different tokens the dataset has. Raises DatasetError for one of images."""
    _check_name(name, None)
    _check_kind(name, "token")
    return SYNTHETIC_VOCABULARY if name == "synthetic" else len(_text_codes()[0])


def load(
    name: str,
    *,
    kind: Kind,
    data_dir: str | Path | None = None,
    context: int | None = None,
    seed: int = 0,
    vocabulary: int | None = None,
) -> Dataset:
    """The dataset as arrays, the same on every call with the same arguments.

    `kind` is what the model takes. `context`, tokens a sample, is required for tokens; images have
    no use for it. `seed` makes `synthetic`, and `vocabulary` sets how many different tokens it has;
    the other datasets have one fixed content and split. Raises DatasetError.
    """
    _check_name(name, data_dir)
    _check_kind(name, kind)
    if vocabulary is not None and (name, kind) != ("synthetic", "token"):
        raise DatasetError(
            f"only synthetic tokens can have a vocabulary of a chosen size, got {vocabulary} for "
            f"{kind}s of {name!r}: leave it out"
        )
    if name == "digits":
        return _load_digits() if data_dir is None else _load_idx(data_dir)
    if name == "text":
        windows = _split_text(_check_context(context))
        source = "Python's help topics, by character"
        return _token_dataset(*windows, vocabulary_size(name), source)
    if kind == "image":
        return _make_images(seed)
    tokens = SYNTHETIC_VOCABULARY if vocabulary is None else vocabulary
    return _make_tokens(seed, _check_context(context), tokens)


def _check_name(name: str, data_dir: str | Path | None) -> None:
    if name not in NAMES:
        hint = "; MNIST is 'digits' with a data_dir that holds its files" if name == "mnist" else ""
        raise DatasetError(f"dataset must be one of {', '.join(NAMES)}, got {name!r}{hint}")
    if data_dir is not None and name != "digits":
        raise DatasetError(
            f"data_dir goes with the dataset 'digits' only, got {str(data_dir)!r} for {name!r}: leave it out"
        )


def _check_kind(name: str, kind: str) -> None:
    if kind not in KINDS[name]:
        raise DatasetError(f"dataset {name!r} is for models that take {KINDS[name][0]}s, got {kind!r}")


def _check_context(context: int | None) -> int:
    if context is None or context < 1:
        raise DatasetError(f"tokens need a context of at least 1 token a sample, got {context}")
    return context


def _normalise(images: np.ndarray, mean: float, std: float) -> None:
    """In place: MNIST's sixty thousand images are 188 MB, in every process of a run."""
    images -= np.float32(mean)
    images /= np.float32(std)


def _image_dataset(images: np.ndarray, labels: np.ndarray, num_train: int, source: str) -> Dataset:
    return Dataset(
        kind="image",
        train_x=images[:num_train],
        train_y=labels[:num_train],
        validation_x=images[num_train:],
        validation_y=labels[num_train:],
        num_classes=IMAGE_CLASSES,
        source=source,
    )


def _token_dataset(train: np.ndarray, validation: np.ndarray, num_classes: int, source: str) -> Dataset:
    """Windows [num, context + 1] as inputs and, one further on, labels."""

    def cut(windows: np.ndarray, columns: slice) -> np.ndarray:
        return np.ascontiguousarray(windows[:, columns], dtype=np.int64)

    inputs, labels = slice(None, -1), slice(1, None)
    return Dataset(
        kind="token",
        train_x=cut(train, inputs),
        train_y=cut(train, labels),
        validation_x=cut(validation, inputs),
        validation_y=cut(validation, labels),
        num_classes=num_classes,
        source=source,
    )


# digits: the images that ship with Lockstep


@functools.cache  # a process that forks workers loads it once for all of them
def _load_digits() -> Dataset:
    table = np.loadtxt(DIGITS_FILE, delimiter=",", dtype=np.uint8)
    # The file goes through the digits in order, again and again, writer by writer, so any regular
    # cut would favour some. RandomState's stream is frozen (NEP 19): the split never changes.
    table = table[np.random.RandomState(0).permutation(len(table))]
    pixels = table[:, :-1].reshape(-1, DIGITS_SIDE, DIGITS_SIDE)
    images = _enlarge(pixels.astype(np.float32) / DIGITS_MAX_PIXEL, IMAGE_SIDE)[:, None]
    labels = table[:, -1].astype(np.int64)
    _normalise(images, DIGITS_MEAN, DIGITS_STD)
    source = "UCI Optical Recognition of Handwritten Digits (8x8, enlarged to 28x28)"
    return _image_dataset(images, labels, DIGITS_TRAIN, source)


def _enlarge(images: np.ndarray, side: int) -> np.ndarray:
    """[num, n, n] enlarged to [num, side, side] by bilinear interpolation.

    Pixel centres are kept in place and the border is repeated, as in torch's
    interpolate(mode="bilinear", align_corners=False).
    """
    num = images.shape[-1]
    position = np.clip((np.arange(side) + 0.5) * num / side - 0.5, 0, num - 1)
    low = np.minimum(position.astype(int), num - 2)
    weight = (position - low).astype(np.float32)
    rows = images.take(low, 1) * (1 - weight)[:, None] + images.take(low + 1, 1) * weight[:, None]
    return rows.take(low, 2) * (1 - weight) + rows.take(low + 1, 2) * weight


# digits with a data_dir: MNIST's idx files (Y. LeCun, C. Cortes, C. Burges, "The MNIST database")


def _load_idx(data_dir: str | Path) -> Dataset:
    arrays = {}
    for part in ("train", "validation"):
        labels = _read_idx(_find_idx(data_dir, part, "labels"), 1)
        pixels = _read_idx(_find_idx(data_dir, part, "images"), 3)
        _check_idx_pair(part, pixels.shape, labels.shape)
        if labels.max() >= IMAGE_CLASSES:
            raise DatasetError(f"labels of digits must be 0 to 9, got {labels.max()} among the {part} labels")
        images = pixels[:, None].astype(np.float32)
        images /= np.float32(255)
        _normalise(images, MNIST_MEAN, MNIST_STD)
        arrays |= {f"{part}_x": images, f"{part}_y": labels.astype(np.int64)}
    return Dataset(kind="image", num_classes=IMAGE_CLASSES, source=f"idx files in {data_dir}", **arrays)


def _idx_count(data_dir: str | Path, part: str) -> int:
    shapes = []
    for content, dimensions in (("images", 3), ("labels", 1)):
        path = _find_idx(data_dir, part, content)
        with _open_idx(path) as stream:
            shapes.append(_idx_shape(stream, path, dimensions))
    _check_idx_pair(part, *shapes)
    return shapes[0][0]


def _find_idx(data_dir: str | Path, part: str, content: str) -> Path:
    first = {"train": "train", "validation": "t10k"}[part]
    last = {"images": "idx3-ubyte", "labels": "idx1-ubyte"}[content]
    for joint, suffix in itertools.product(("-", "."), ("", ".gz")):
        path = Path(data_dir) / f"{first}-{content}{joint}{last}{suffix}"
        if os.path.isfile(path):  # Path.is_file raises for some paths that cannot exist
            return path
    raise DatasetError(
        f"data_dir must hold MNIST's four idx files: there is no {first}-{content}-{last} in "
        f"{str(data_dir)!r}, nor {first}-{content}.{last}, nor either of them with .gz"
    )


@contextmanager
def _open_idx(path: Path) -> Iterator[BinaryIO]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"idx files must be readable, plain or gzip: {path}: {error}") from error


def _idx_shape(stream: BinaryIO, path: Path, dimensions: int) -> tuple[int, ...]:
    """The shape in the header: magic number 0x000008DD (unsigned bytes, DD dimensions), sizes."""
    length = 4 + 4 * dimensions
    header = stream.read(length)
    if len(header) < length:
        raise DatasetError(
            f"{path} must start with {length} bytes of idx header, it ends after {len(header)}: get the file again"
        )
    magic, *shape = struct.unpack(f">{1 + dimensions}I", header)
    if magic != 0x800 + dimensions:
        raise DatasetError(
            f"{path} must start with the idx magic number 0x{0x800 + dimensions:08x}, it starts "
            f"with 0x{magic:08x}: it is not the file that its name says"
        )
    return tuple(shape)


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The file's unsigned bytes in the shape of its header."""
    with _open_idx(path) as stream:
        shape = _idx_shape(stream, path, dimensions)
        expected = math.prod(shape)
        # Piece by piece, and one byte beyond, so that a header with a wrong size neither asks for
        # memory that the file cannot fill nor hides bytes that follow.
        content = bytearray()
        while piece := stream.read(min(expected + 1 - len(content), 1 << 20)):
            content += piece
    if len(content) != expected:
        found = "more" if len(content) > expected else f"{len(content)}"
        raise DatasetError(
            f"{path} must hold {expected} bytes after its header, for shape {shape}, it holds "
            f"{found}: get the file again"
        )
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _check_idx_pair(part: str, images: tuple[int, ...], labels: tuple[int, ...]) -> None:
    if images[1:] != (IMAGE_SIDE, IMAGE_SIDE):
        raise DatasetError(f"images must be 28x28, the {part} images are {images[1]}x{images[2]}")
    if images[0] != labels[0] or images[0] == 0:
        raise DatasetError(
            f"there must be at least one image and a label for each, the {part} files hold "
            f"{images[0]} images and {labels[0]} labels"
        )


# text: characters of Python's own help


@functools.cache
def _text_codes() -> tuple[np.ndarray, np.ndarray]:
    """The vocabulary, as sorted code points, and the text, as indices into it."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:  # some systems cut Python's documentation off
        raise DatasetError(
            "'text' needs pydoc_data of Python's standard library, absent here: take 'synthetic'"
        ) from error
    text = "\n".join(topics[key] for key in sorted(topics))
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    vocabulary = np.flatnonzero(np.bincount(points))
    return vocabulary, np.searchsorted(vocabulary, points)


def _split_text(context: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows of context + 1 characters, [num, context + 1], none overlapping: train, validation.

    The cut comes before the windows, so no window lies on both sides of it.
    """
    codes = _text_codes()[1]
    cut = int(len(codes) * TEXT_TRAIN_SHARE)
    width, longest = context + 1, len(codes) - cut - 1
    if context > longest:
        raise DatasetError(f"context must be at most {longest}, or 'text' has no validation sample; got {context}")
    train, validation = (half[: len(half) // width * width].reshape(-1, width) for half in (codes[:cut], codes[cut:]))
    return train, validation


# synthetic: made from a seed


@functools.lru_cache(maxsize=1)  # the first rank of a run wants them three times
def _make_images(seed: int) -> Dataset:
    """A smooth random pattern for each class, under noise: easy to learn, not at a glance."""
    random = np.random.default_rng(seed)
    num = SYNTHETIC_TRAIN + SYNTHETIC_VALIDATION
    coarse = random.standard_normal((IMAGE_CLASSES, 7, 7), dtype=np.float32)
    patterns = _enlarge(coarse, IMAGE_SIDE)
    patterns -= patterns.mean(axis=(1, 2), keepdims=True)
    patterns *= SYNTHETIC_PATTERN / patterns.std(axis=(1, 2), keepdims=True)
    labels = random.integers(IMAGE_CLASSES, size=num)
    images = random.standard_normal((num, 1, IMAGE_SIDE, IMAGE_SIDE), dtype=np.float32)
    images += patterns[labels][:, None]
    return _image_dataset(images, labels, SYNTHETIC_TRAIN, f"synthetic images, seed {seed}")


def _make_tokens(seed: int, context: int, vocabulary: int) -> Dataset:
    """Counting from a random start by a random stride, modulo the vocabulary; a tenth is noise."""
    if vocabulary < 2:
        raise DatasetError(f"a vocabulary needs at least 2 tokens, got {vocabulary}")
    random = np.random.default_rng(seed)
    num, width = SYNTHETIC_TRAIN + SYNTHETIC_VALIDATION, context + 1
    start = random.integers(vocabulary, size=(num, 1))
    stride = random.integers(1, min(SYNTHETIC_MAX_STRIDE, vocabulary - 1) + 1, size=(num, 1))
    windows = (start + stride * np.arange(width)) % vocabulary
    noisy = random.random((num, width)) < SYNTHETIC_TOKEN_NOISE
    windows[noisy] = random.integers(vocabulary, size=int(noisy.sum()))
    train, validation = windows[:SYNTHETIC_TRAIN], windows[SYNTHETIC_TRAIN:]
    return _token_dataset(train, validation, vocabulary, f"synthetic tokens, seed {seed}")
