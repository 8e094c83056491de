"""Checks of others: what they say is added to what ours found, so it can only make a verdict worse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptguard.checks import Evidence
from ckptguard.formats.strict_json import printable
from ckptguard.plugins.call import CALL_SECONDS, PluginError, call_plugin
from ckptguard.plugins.installed import find_plugin
from ckptguard.plugins.interface import Remark, Saved, SavedTensor
from ckptguard.values.manifest import Manifest
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import PLUGIN, Finding, Severity


def plugin_findings(evidence: Evidence, findings: Sequence[Finding], settings: Settings) -> Iterator[Finding]:
    """Yield what the checks say that the settings name, and which of them took part. They are not asked where ours
    found an error. One that gives no answer is a doubt, which is asked again with the next verdict."""
    if any(finding.severity is Severity.ERROR for finding in findings):
        return
    saved = _saved(evidence)
    for name in dict.fromkeys(settings.checks):
        plugin = find_plugin("checks", name)
        label = f"checks/{name}" if plugin is None else plugin.label
        try:
            if plugin is None:
                raise PluginError(f"the check {name} of the setting `checks` is not installed")
            remarks = call_plugin(
                plugin, saved, tuple[Remark, ...], memory=settings.worker_memory, seconds=CALL_SECONDS
            )
        except PluginError as error:
            yield Finding(PLUGIN, Severity.SICKNESS, f"could not tell: {error.message}", found=label)
            continue
        yield Finding(PLUGIN, Severity.NOTICE, f"{label} took part", found=label)
        for one in remarks:
            file, tensor = (None if text is None else printable(text) for text in (one.file, one.tensor))
            yield Finding(f"{PLUGIN}:{name}", Severity(one.severity), printable(one.message), file, tensor)


def _saved(evidence: Evidence) -> Saved:
    tensors = tuple(
        SavedTensor(
            *(t.file, t.name, t.dtype, t.shape, t.role),
            *((n.largest, n.rms, n.zeros, n.nan + n.posinf + n.neginf) if (n := t.numbers) is not None else ()),
        )
        for t in evidence.tensors()
    )
    return Saved(evidence.checkpoint.path, evidence.checkpoint.step, tensors, _tensors_of(evidence.previous))


def _tensors_of(manifest: Manifest | None) -> tuple[SavedTensor, ...]:
    files = () if manifest is None else manifest.files
    return tuple(
        SavedTensor(file.path, t.name, t.dtype, t.shape, t.role, t.largest, t.rms, t.zeros)
        for file in files
        for t in file.tensors
    )
