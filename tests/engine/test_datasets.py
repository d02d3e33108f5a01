"""Turns what is promised of each dataset into checks: counts from its source, splits, refusals."""

import gzip
import hashlib
import struct
import subprocess
import sys

import numpy as np
import pytest

from engine.data import datasets
from engine.data.datasets import DatasetError, load, sizes, vocabulary_size

# From the data set's own description (optdigits.names, class distribution of the test part).
UCI_CLASS_COUNTS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
UCI_SHA256 = "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"


def same(a, b):
    return all(
        np.array_equal(getattr(a, part), getattr(b, part))
        for part in ("train_x", "train_y", "validation_x", "validation_y")
    )


def test_importing_datasets_does_not_import_torch():
    code = "import sys, engine.data.datasets; sys.exit('torch' in sys.modules)"
    root = datasets.DIGITS_FILE.parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


# digits


@pytest.fixture(scope="module")
def digits():
    return load("digits", kind="image")


def test_digits_file_is_the_one_that_sources_names():
    content = datasets.DIGITS_FILE.read_bytes()
    assert hashlib.sha256(content).hexdigest() == UCI_SHA256
    assert UCI_SHA256 in (datasets.DIGITS_FILE.parent / "SOURCES.md").read_text()


def test_digits_are_the_1797_of_uci_with_its_class_counts(digits):
    labels = np.concatenate([digits.train_y, digits.validation_y])
    assert len(labels) == 1797
    assert np.bincount(labels).tolist() == UCI_CLASS_COUNTS
    assert (digits.kind, digits.num_classes) == ("image", 10)


def test_digits_have_the_shapes_and_types_that_models_take(digits):
    assert (len(digits.train_x), len(digits.validation_x)) == (1437, 360) == sizes("digits")
    assert digits.train_x.shape[1:] == digits.validation_x.shape[1:] == (1, 28, 28)
    assert digits.train_x.dtype == digits.validation_x.dtype == np.float32
    assert digits.train_y.dtype == digits.validation_y.dtype == np.int64


def test_digits_train_and_validation_share_no_image(digits):
    train = {image.tobytes() for image in digits.train_x}
    validation = {image.tobytes() for image in digits.validation_x}
    assert len(train) == 1437 and len(validation) == 360
    assert not train & validation


def test_every_class_of_digits_is_in_both_parts(digits):
    assert np.bincount(digits.train_y, minlength=10).min() > 100
    assert np.bincount(digits.validation_y, minlength=10).min() > 20


def test_digits_training_pixels_are_normalised(digits):
    assert digits.train_x.mean(dtype=np.float64) == pytest.approx(0, abs=1e-3)
    assert digits.train_x.std(dtype=np.float64) == pytest.approx(1, abs=1e-3)
    # Before normalising all pixels were in [0, 1].
    pixels = digits.train_x * datasets.DIGITS_STD + datasets.DIGITS_MEAN
    assert pixels.min() == pytest.approx(0, abs=1e-6)
    assert pixels.max() == pytest.approx(1, abs=1e-6)


def test_images_stay_beside_their_own_labels(digits):
    """The nearest mean image of a class, seen in training, names most of the others' digits.

    On the 8x8 images this classifier is known to be right about nine times in ten.
    """
    means = np.stack([digits.train_x[digits.train_y == digit].mean(axis=0) for digit in range(10)])
    distance = ((digits.validation_x[:, None] - means) ** 2).sum(axis=(2, 3, 4))
    right = distance.argmin(axis=1) == digits.validation_y
    assert right.mean() > 0.85
    # Negative control: with labels moved by one place, it is chance.
    assert (distance.argmin(axis=1) == np.roll(digits.validation_y, 1)).mean() < 0.3


def test_digits_are_the_same_whatever_the_seed(digits):
    assert same(digits, load("digits", kind="image", seed=7))


def test_enlarging_keeps_straight_lines_straight():
    """Bilinear interpolation is exact on a slope; beyond the outer pixel centres it is flat."""
    slope = np.tile(np.arange(8, dtype=np.float32), (1, 8, 1))
    wide = datasets._enlarge(slope, 28)
    centres = (np.arange(28) + 0.5) * 8 / 28 - 0.5
    expected = np.tile(np.clip(centres, 0, 7), (28, 1))
    np.testing.assert_allclose(wide[0], expected, atol=1e-6)
    np.testing.assert_allclose(datasets._enlarge(slope.swapaxes(1, 2), 28)[0], expected.T, atol=1e-6)


# digits with a data_dir


def idx(array, magic=None):
    """The array as an idx file: magic number, sizes, bytes."""
    magic = 0x800 + array.ndim if magic is None else magic
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.tobytes()


PIXELS = np.random.RandomState(0).randint(256, size=(7, 28, 28), dtype=np.uint8)
LABELS = np.array([3, 1, 4, 1, 5, 9, 2], dtype=np.uint8)


def write_mnist(folder, *, joint="-", suffix="", **replaced):
    """Four files in `folder`, 5 training and 2 validation images, the named ones replaced."""
    contents = {
        "train-images": idx(PIXELS[:5]),
        "train-labels": idx(LABELS[:5]),
        "t10k-images": idx(PIXELS[5:]),
        "t10k-labels": idx(LABELS[5:]),
    }
    contents |= {name.replace("_", "-"): content for name, content in replaced.items()}
    pack = gzip.compress if suffix else bytes
    for name, content in contents.items():
        dimensions = 3 if name.endswith("images") else 1
        path = folder / f"{name}{joint}idx{dimensions}-ubyte{suffix}"
        path.write_bytes(pack(content))
    return folder


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("joint", ["-", "."])
def test_idx_files_are_read_back_as_written(tmp_path, joint, suffix):
    folder = write_mnist(tmp_path, joint=joint, suffix=suffix)
    assert sizes("digits", data_dir=folder) == (5, 2)
    data = load("digits", kind="image", data_dir=str(folder))
    assert data.train_x.shape == (5, 1, 28, 28) and data.train_x.dtype == np.float32
    images = np.concatenate([data.train_x, data.validation_x])[:, 0]
    np.testing.assert_allclose(images, (PIXELS / 255 - 0.1307) / 0.3081, atol=1e-5)
    assert data.train_y.tolist() == [3, 1, 4, 1, 5] and data.validation_y.tolist() == [9, 2]
    assert data.train_y.dtype == np.int64


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"train_images": idx(PIXELS[:5])[:-1]}, "must hold 3920 bytes .* holds 3919"),
        ({"train_labels": idx(LABELS[:5]) + b"\0"}, "must hold 5 bytes .* holds more"),
        ({"t10k_images": b"\0\0\x08"}, "16 bytes of idx header, it ends after 3"),
        ({"t10k_labels": b""}, "8 bytes of idx header, it ends after 0"),
        ({"train_images": idx(PIXELS[:5], magic=0x801)}, "0x00000803, it starts with 0x00000801"),
        ({"train_labels": idx(LABELS[:4])}, "train files hold 5 images and 4 labels"),
        ({"train_images": idx(PIXELS[:0]), "train_labels": idx(LABELS[:0])}, "at least one image"),
        ({"t10k_images": idx(PIXELS[5:, :27].copy())}, "validation images are 27x28"),
        ({"t10k_labels": idx(LABELS[5:] + 1)}, "0 to 9, got 10"),
        # A header that promises 3 TB must be refused without asking for the memory.
        ({"train_images": struct.pack(">4I", 0x803, 2**32 - 1, 28, 28)}, "holds 0"),
    ],
)
def test_malformed_idx_files_are_refused(tmp_path, suffix, replaced, message):
    folder = write_mnist(tmp_path, suffix=suffix, **replaced)
    with pytest.raises(DatasetError, match=message):
        load("digits", kind="image", data_dir=folder)


def test_sizes_refuses_idx_files_of_different_lengths(tmp_path):
    folder = write_mnist(tmp_path, train_labels=idx(LABELS[:4]))
    with pytest.raises(DatasetError, match="5 images and 4 labels"):
        sizes("digits", data_dir=folder)


def test_a_gzip_file_cut_short_is_refused(tmp_path):
    path = write_mnist(tmp_path, suffix=".gz") / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DatasetError, match="readable, plain or gzip"):
        load("digits", kind="image", data_dir=tmp_path)


def test_a_plain_file_named_gz_is_refused(tmp_path):
    path = write_mnist(tmp_path, suffix=".gz") / "train-labels-idx1-ubyte.gz"
    path.write_bytes(idx(LABELS[:5]))
    with pytest.raises(DatasetError, match="readable, plain or gzip"):
        load("digits", kind="image", data_dir=tmp_path)


@pytest.mark.parametrize("data_dir", ["nowhere", "null\0byte", "x" * 5000, ""])
def test_a_data_dir_without_the_files_says_which_is_missing(data_dir):
    with pytest.raises(DatasetError, match="there is no train-"):
        load("digits", kind="image", data_dir=data_dir)
    with pytest.raises(DatasetError, match="there is no train-images-idx3-ubyte"):
        sizes("digits", data_dir=data_dir)


# text


@pytest.mark.parametrize("context", [1, 32, 64, 257])
def test_text_labels_are_the_inputs_one_character_further(context):
    data = load("text", kind="token", context=context)
    for x, y in ((data.train_x, data.train_y), (data.validation_x, data.validation_y)):
        assert x.shape == y.shape and x.shape[1] == context
        assert x.dtype == y.dtype == np.int64
        assert np.array_equal(x[:, 1:], y[:, :-1])
    assert sizes("text", context=context) == (len(data.train_x), len(data.validation_x))


def test_text_is_pythons_help_cut_once_at_nine_tenths():
    """Windows laid end to end and decoded are the text again, first 90 %, then the last 10 %."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics))
    letters = np.array(sorted(set(text)))
    data = load("text", kind="token", context=99)
    cut = int(0.9 * len(text))
    for x, y, half in (
        (data.train_x, data.train_y, text[:cut]),
        (data.validation_x, data.validation_y, text[cut:]),
    ):
        windows = np.concatenate([x, y[:, -1:]], axis=1)
        assert len(windows) == len(half) // 100
        assert "".join(letters[windows.ravel()]) == half[: len(windows) * 100]
    assert data.num_classes == vocabulary_size("text") == len(letters)


def test_text_needs_a_context_that_leaves_a_validation_sample():
    for context in (None, 0, -1):
        with pytest.raises(DatasetError, match="at least 1 token"):
            load("text", kind="token", context=context)
        with pytest.raises(DatasetError, match="at least 1 token"):
            sizes("text", context=context)
    with pytest.raises(DatasetError, match=r"at most \d+, .* got 100000000") as refusal:
        sizes("text", context=100_000_000)
    longest = int(str(refusal.value).split("at most ")[1].split(",")[0])
    assert sizes("text", context=longest)[1] == 1
    with pytest.raises(DatasetError):
        sizes("text", context=longest + 1)


# synthetic


@pytest.mark.parametrize("kind", ["image", "token"])
def test_synthetic_comes_from_its_seed_alone(kind):
    first = load("synthetic", kind=kind, context=16, seed=3)
    assert same(first, load("synthetic", kind=kind, context=16, seed=3))
    assert not same(first, load("synthetic", kind=kind, context=16, seed=4))
    assert (len(first.train_x), len(first.validation_x)) == (2048, 256) == sizes("synthetic")


def test_synthetic_images_can_be_learned():
    data = load("synthetic", kind="image")
    assert data.train_x.shape == (2048, 1, 28, 28) and data.train_x.dtype == np.float32
    assert data.train_y.dtype == np.int64 and set(data.train_y) == set(range(10))
    means = np.stack([data.train_x[data.train_y == label].mean(axis=0) for label in range(10)])
    distance = ((data.validation_x[:, None] - means) ** 2).sum(axis=(2, 3, 4))
    assert (distance.argmin(axis=1) == data.validation_y).mean() > 0.9


def test_synthetic_tokens_can_be_learned():
    """Going on as the last two tokens did is right unless one of the three is noise: 0.9 ** 3."""
    data = load("synthetic", kind="token", context=16)
    assert data.num_classes == vocabulary_size("synthetic") == 64
    x, y = data.train_x, data.train_y
    assert x.shape == y.shape == (2048, 16) and x.dtype == y.dtype == np.int64
    assert np.array_equal(x[:, 1:], y[:, :-1])
    guess = (2 * x[:, 1:] - x[:, :-1]) % 64
    assert (guess == y[:, 1:]).mean() == pytest.approx(0.9**3, abs=0.02)


@pytest.mark.parametrize("vocabulary", [2, 3, 1000])
def test_synthetic_tokens_take_the_vocabulary_they_are_given(vocabulary):
    data = load("synthetic", kind="token", context=8, vocabulary=vocabulary)
    assert data.num_classes == vocabulary
    assert data.train_x.min() == 0 and data.train_x.max() == vocabulary - 1


def test_a_vocabulary_of_one_token_is_refused():
    with pytest.raises(DatasetError, match="at least 2 tokens, got 1"):
        load("synthetic", kind="token", context=8, vocabulary=1)


# refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "mnist", "kind": "image"}, "MNIST is 'digits' with a data_dir"),
        ({"name": "imagenet", "kind": "image"}, "one of digits, text, synthetic, got 'imagenet'"),
        ({"name": "digits", "kind": "token"}, "models that take images, got 'token'"),
        ({"name": "text", "kind": "image", "context": 8}, "models that take tokens, got 'image'"),
        ({"name": "synthetic", "kind": "sound"}, "got 'sound'"),
        ({"name": "synthetic", "kind": "token"}, "at least 1 token"),
        ({"name": "synthetic", "kind": "image", "data_dir": "x"}, "'digits' only, got 'x'"),
        ({"name": "text", "kind": "token", "context": 8, "vocabulary": 9}, "leave it out"),
    ],
)
def test_what_cannot_be_given_is_refused_with_the_rule(arguments, message):
    with pytest.raises(DatasetError, match=message):
        load(**arguments)


def test_images_have_no_vocabulary():
    with pytest.raises(DatasetError, match="models that take images"):
        vocabulary_size("digits")
