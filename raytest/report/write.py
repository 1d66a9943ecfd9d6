"""Writes the reports of a run, each in its form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from raytest.report.html import html_text
from raytest.report.junit import junit_xml
from raytest.report.markdown import markdown_text
from raytest.report.material import Material, gather
from raytest.report.prometheus import prometheus_text, read_before
from raytest.report.quarantine import quarantine_text
from raytest.store import RunFolder, write_text

FORMS: Mapping[str, Callable[[Material], str]] = {
    "html": html_text,
    "junit": junit_xml,
    "markdown": markdown_text,
    "prometheus": prometheus_text,
    "quarantine": quarantine_text,
}
IN_FOLDER = {
    "html": "report.html",
    "junit": "junit.xml",
    "markdown": "summary.md",
    "prometheus": "metrics.prom",
}


def write_reports(material: Material, targets: Mapping[str, Path]) -> None:
    """Write each form of ``targets`` to its file, atomically. Raises StoreError."""
    for form, path in targets.items():
        if form == "prometheus":
            text = prometheus_text(material, read_before(path))
        else:
            text = FORMS[form](material)
        write_text(path, text)


def write_in_folder(folder: RunFolder) -> tuple[list[Path], list[str]]:
    """Write a run's own reports; what was written, and what went wrong, a line each.

    The verdict stands whatever happens here, so nothing is raised.
    """
    written: list[Path] = []
    problems: list[str] = []
    material: Material | None = None
    for form, name in IN_FOLDER.items():
        path = folder.path / name
        try:
            material = material or gather(folder)
            write_reports(material, {form: path})
        # The edge between a verdict and its pictures: a bug in a report must not change the exit
        # code of a run that was judged.
        except Exception as error:  # noqa: BLE001
            problems.append(f"{name} was not written: {type(error).__name__}: {error}")
        else:
            written.append(path)
    return written, problems
