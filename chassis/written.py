"""The mark on folders that HeterPS writes, by which a job's code leaves them out.

Models, saves, logs and what servers keep often lie below the folder of the job that they came of.
A folder's name tells nothing, so each has a small file in it, written before anything else.
"""

from pathlib import Path

from chassis.files import make_folder, open_regular

MARK = ".heterps-output"
_SIGNATURE = "Signature: heterps-output-7d1c0c64"
_TEXT = f"{_SIGNATURE}\n# HeterPS wrote this folder. Jobs do not take it along with their code.\n"
# Says the same where there is no mark: how the manifest of a model, save or export begins.
_MANIFESTS = {
    "model.json": '"format": "heterps-model-',
    "manifest.json": '"format": "heterps-checkpoint"',
    "export.json": '"about": "heterps-export"',
}
_BEGINNING = 200


def claim(folder: Path, mode: int = 0o777) -> None:
    """Make a folder, where it is not there, and mark it; safe to repeat.

    Raises:
        OSError: it cannot be written to.
    """
    make_folder(folder, mode)
    path = folder / MARK
    if not path.exists():
        path.write_text(_TEXT)


def is_marked(folder: Path) -> bool:
    """Whether HeterPS wrote a folder."""
    if _begins(folder / MARK).startswith(_SIGNATURE):
        return True
    return any(text in _begins(folder / name) for name, text in _MANIFESTS.items())


def _begins(path: Path) -> str:
    try:
        with open_regular(path) as stream:
            return stream.read(_BEGINNING).decode(errors="replace")
    except OSError:
        return ""
