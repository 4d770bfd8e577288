"""Code of a user's that is loaded by its file, with the modules beside it."""

import sys
from pathlib import Path

import pytest

from chassis import entries
from chassis.entries import EntryError, imported, load_entry


def written(folder: Path, number: int) -> Path:
    """Two files that import a module and a package beside them."""
    (folder / "parts").mkdir(parents=True)
    (folder / "beside.py").write_text(f"NUMBER = {number}\nclass Kind: pass\n")
    (folder / "parts" / "__init__.py").write_text("")
    (folder / "parts" / "inner.py").write_text(f"NUMBER = {number}\n")
    for name in ("one", "other"):
        (folder / f"{name}.py").write_text(
            "from beside import NUMBER, Kind\n"
            "import parts.inner\n"
            "def numbers(): return NUMBER, parts.inner.NUMBER\n"
            "def kind(): return Kind\n"
        )
    return folder


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """Of this process, which are as before in the end; no folder was loaded from before."""
    before = dict(sys.modules)
    monkeypatch.setattr(entries, "_loaded", {})
    yield
    for name in set(sys.modules) - set(before):
        del sys.modules[name]
    sys.modules.update(before)


def test_each_file_has_the_modules_beside_it(tmp_path):
    folders = [written(tmp_path / name, number) for number, name in enumerate("abc")]
    for _ in range(2):
        for number, folder in enumerate(folders):
            assert load_entry("one.py:numbers", folder, "key")() == (number, number)
    kinds = {load_entry("one.py:kind", folder, "key")() for folder in folders}
    assert len(kinds) == 3
    # Files of a folder share what lies there.
    assert {load_entry("other.py:kind", folder, "key")() for folder in folders} == kinds


def test_what_is_imported_late_is_never_that_of_another_folder(tmp_path):
    own, other, alike = (
        written(tmp_path / name, number) for name, number in (("own", 1), ("b", 2), ("copy", 2))
    )
    for folder in (other, alike):
        load_entry("one.py:numbers", folder, "key")
    assert sys.modules["beside"].NUMBER == sys.modules["parts.inner"].NUMBER == 2
    (own / "one.py").write_text(
        "def late():\n    import beside, parts.inner\n"
        "    return beside.NUMBER, parts.inner.NUMBER\n"
    )
    late = load_entry("one.py:late", own, "key")
    load_entry("other.py:numbers", other, "key")
    with pytest.raises(ModuleNotFoundError, match="beside"):
        late()


def test_a_process_keeps_the_modules_that_it_has_imported_itself(tmp_path, monkeypatch):
    own, other = written(tmp_path / "own", 1), written(tmp_path / "other", 2)
    monkeypatch.syspath_prepend(str(own))
    import beside  # type: ignore[import-not-found]
    import parts.inner  # type: ignore[import-not-found]

    assert load_entry("one.py:numbers", other, "key")() == (2, 2)
    assert sys.modules["beside"] is beside
    assert sys.modules["parts.inner"] is parts.inner
    assert parts.inner.NUMBER == 1
    assert load_entry("one.py:kind", own, "key")() is beside.Kind


def test_a_file_that_fails_leaves_modules_as_they_were(tmp_path):
    first, broken = written(tmp_path / "first", 1), written(tmp_path / "broken", 2)
    kind = load_entry("one.py:kind", first, "key")()
    (broken / "one.py").write_text("import beside\nraise ValueError('broken')\n")
    with pytest.raises(EntryError, match="ValueError: broken"):
        load_entry("one.py:kind", broken, "key")
    assert sys.modules["beside"].Kind is kind
    assert load_entry("other.py:numbers", broken, "key")() == (2, 2)


def test_a_module_named_as_one_of_a_library_is_left_to_it(tmp_path):
    import json

    folder = written(tmp_path / "folder", 1)
    (folder / "json.py").write_text("raise RuntimeError('never imported')\n")
    (folder / "one.py").write_text("import json\ndef module(): return json\n")
    assert load_entry("one.py:module", folder, "key")() is json


def test_modules_whose_names_others_have_are_still_known(tmp_path):
    """By them it is found what belongs to a job's code."""
    folders = [written(tmp_path / name, number) for number, name in enumerate("ab")]
    for folder in folders:
        load_entry("one.py:kind", folder, "key")
    files = {getattr(module, "__file__", None) for module in imported()}
    assert {str(f / name) for f in folders for name in ("beside.py", "parts/inner.py")} <= files


def test_folders_that_are_packages_without_a_file_are_told_apart(tmp_path):
    for name, number in (("a", 1), ("b", 2), ("a", 1)):
        folder = tmp_path / name
        (folder / "loose").mkdir(parents=True, exist_ok=True)
        (folder / "loose" / "inner.py").write_text(f"NUMBER = {number}\n")
        (folder / "one.py").write_text("import loose.inner\ndef it(): return loose.inner.NUMBER\n")
        assert load_entry("one.py:it", folder, "key")() == number
    assert load_entry("one.py:it", tmp_path / "b", "key")() == 2


@pytest.mark.parametrize("first", ["one", "other"])
def test_a_file_that_others_import_is_one_module(tmp_path, first):
    """Whichever is loaded first; what one sets there the others read."""
    (tmp_path / "one.py").write_text(
        "WEIGHT = 1.0\nclass Kind: pass\ndef weight(): return WEIGHT\ndef kind(): return Kind\n"
    )
    (tmp_path / "other.py").write_text(
        "import one\nfrom one import Kind\n"
        "def change(): one.WEIGHT = 2.0\ndef kind(): return Kind\n"
    )
    if first == "one":
        load_entry("one.py:kind", tmp_path, "key")
    load_entry("other.py:change", tmp_path, "key")()
    assert load_entry("one.py:weight", tmp_path, "key")() == 2.0
    kinds = {load_entry(f"{name}.py:kind", tmp_path, "key")() for name in ("one", "other")}
    assert len(kinds) == 1
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for file in ("one.py", "other.py"):
        (elsewhere / file).write_text((tmp_path / file).read_text())
    assert load_entry("one.py:weight", elsewhere, "key")() == 1.0
    assert load_entry("other.py:kind", elsewhere, "key")() not in kinds
    assert load_entry("one.py:weight", tmp_path, "key")() == 2.0


def test_one_that_fails_is_imported_by_nobody(tmp_path):
    (tmp_path / "one.py").write_text("HALF = 1\nraise ValueError('broken')\n")
    (tmp_path / "other.py").write_text("import one\ndef it(): return one.HALF\n")
    for file in ("one.py:it", "other.py:it", "one.py:it"):
        with pytest.raises(EntryError, match="ValueError: broken"):
            load_entry(file, tmp_path, "key")
    assert "one" not in sys.modules
    (tmp_path / "one.py").write_text("HALF = 2\n")
    assert load_entry("other.py:it", tmp_path, "key")() == 2
