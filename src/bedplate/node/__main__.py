"""``python3 -m bedplate monitor CONFIG``: what the timer of role node_monitor runs on a node.

It verifies what is live, as bedplate_verify and bedplate_abi do, without operations and collective, so that it is
safe beside work on the GPUs; it compares files and packages with what was recorded; and it writes the verdicts as
metrics for node_exporter's textfile collector. CONFIG is JSON (the role's template monitor.json): root, state_dir,
user, tools, expected_gpus (-1: the profile's number), sysroot, simulated, textfile.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .abi.check import check_environment
from .abi.exports import TorchIndex
from .abi.installed import site_packages_of
from .child import ChildError
from .packages.apt_query import PackageError, installed
from .state import layers as layers_of
from .state.drift import ACTION
from .state.durable import StateError, read_text, write_atomic
from .state.generations import Generations
from .state.journal import Paths
from .verdicts import Verdict, failing, sentence, simulated
from .verify import summary, verify

CHECKS = ["driver", "gpus", "node", "toolkit", "imports"]
USAGE = "usage: python3 -m bedplate monitor CONFIG"

# Name, help text and type of each metric. Type gauge: they go up and down.
METRICS = {
    "bedplate_verdict": "Result of each check of the last verification: 1 for the status it has.",
    "bedplate_profile_info": "The generation that is live, and the profile it was built from.",
    "bedplate_failing_verdicts": "Number of checks of the last verification that stand in the way of work.",
    "bedplate_last_verification_timestamp_seconds": "When the last verification ended, in seconds since 1970.",
    "bedplate_last_verification_duration_seconds": "How long it took.",
}

Sample = tuple[str, dict[str, str], float]


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 0 when the metrics were written, whatever they say, and else 1 or 2 (usage)."""
    if len(arguments) != 2 or arguments[0] != "monitor":
        print(USAGE, file=sys.stderr)
        return 2
    try:
        config = json.loads(Path(arguments[1]).read_text(encoding="utf-8"))
        began = time.monotonic()
        verdicts, generation = look(config)
        took = time.monotonic() - began
        write_atomic(config["textfile"], exposition(samples(verdicts, generation, time.time(), took)))
    except (OSError, ValueError, KeyError, TypeError, StateError, ChildError) as error:
        print(f"{arguments[1]}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(summary(verdicts))
    for verdict in failing(verdicts):
        print(f"{verdict.status} {verdict.code} {sentence(verdict)}")
    return 0


def look(config: Mapping[str, Any]) -> tuple[list[Verdict], dict[str, str]]:
    """Verify the node; return the verdicts and {generation, profile, target} of what is live, empty texts for none.

    Raises StateError when the journal is damaged, child.ChildError when no child can be started.
    """
    read = Generations(Paths.of(config["root"], config["state_dir"], "/etc/ansible/facts.d"), check=True).read()
    current = read["current"] or ""
    entry = read["state"]["generations"].get(current) or {}
    about = {
        "generation": current,
        "profile": str(entry.get("profile") or ""),
        "target": str(entry.get("target") or ""),
    }
    place = f"{config['root']}/generations/{current}" if current else ""
    layers = read["state"]["layers"]
    verdicts = verify(options_of(config, place, _profile(place), layers))
    if place and not any(v.code == "stack.absent" for v in verdicts):
        verdicts += _files(config, place)
    items = read["drift"]
    drift = Verdict("stack.drift", "pass", "stack", "Python stack", "Its files are those that were built and verified.")
    if items:
        message = f"What is live is not what was recorded: {items[0]}."
        drift = Verdict("stack.drift", "fail", "stack", "Python stack", message, {"drift": items}, ACTION)
    verdicts += [*_drift(layers), drift]
    return (simulated(verdicts) if config["simulated"] else verdicts), about


def _files(config: Mapping[str, Any], place: str) -> list[Verdict]:
    """Return what the bytes of the generation's extensions say; nothing is run."""
    index = Path(config["tools"], "abi", "torch-x86_64.idx")
    try:
        found = check_environment(
            site_packages_of(place), index=TorchIndex.load(str(index)) if index.exists() else None
        )
    except (OSError, ValueError) as error:
        action = "Look at the file that it names; building the generation again puts it back."
        evidence = {"error": str(error)}
        message = f"The files could not be asked: {error}."
        return [Verdict("abi.unreadable_file", "inconclusive", "stack", "Python stack", message, evidence, action)]
    return found.verdicts


def _drift(layers: Mapping[str, Any]) -> list[Verdict]:
    """Return whether driver and toolkit are what was installed, where Bedplate installed them."""
    verdicts = []
    for layer, entry in layers.items():
        if entry["is"] is None:
            continue
        try:
            items = layers_of.problems({"layers": layers}, {layer: {}}, installed)
        except PackageError as error:
            verdicts.append(error.verdict(layer))
            continue
        verdicts.append(layers_of.drift_verdict(layer, items, f"The {layer} is what was installed."))
    return verdicts


def _profile(place: str) -> dict[str, Any]:
    """Return what the generation says it must prove; empty where there is none. Raises StateError, ValueError."""
    text = read_text(f"{place}/profile.json") if place else None
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


def options_of(
    config: Mapping[str, Any], place: str, profile: Mapping[str, Any], layers: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of ``verify.verify`` for the generation in directory *place*."""
    expect = dict.fromkeys(("gpus", "gpu_ids", "arch", "bar1_min_mib", "pcie_width", "ecc")) | {"iommu": "any"}
    expect.update({key: value for key, value in (profile.get("expect") or {}).items() if value is not None})
    if config["expected_gpus"] >= 0:
        expect["gpus"] = config["expected_gpus"]
    proof = profile.get("verify") or {}
    records = {name: (layers.get(name) or {}).get("is") for name in ("driver", "toolkit")}
    driver = {"flavour": "open", "parameters": {}, "source": "none", "packages": {}}
    toolkit = {"path": "", "source": "none", "default": False, "components": [], "host_compiler": ""}
    return {
        "layers": ["driver", "toolkit", "stack"],
        "checks": CHECKS,
        "driver": {**driver, **records["driver"]} if records["driver"] else None,
        "toolkit": {**toolkit, **records["toolkit"]} if records["toolkit"] else None,
        "expect": expect,
        "generation": place,
        "imports": proof.get("imports") or [],
        "import_timeout": proof.get("import_timeout_s") or 180,
        "operations": [],
        "operation_timeout": 180,
        "collective": {},
        "collective_when": "idle",
        "gpu_wait": 0,
        "baseline": [],
        "user": config["user"],
        "tools": config["tools"],
        "sysroot": config["sysroot"],
        "simulated": config["simulated"],
        "strict": False,
    }


def samples(verdicts: Iterable[Verdict], live: Mapping[str, str], now: float, took: float) -> list[Sample]:
    """Return the samples, each with its name, its labels and its value."""
    verdicts = list(verdicts)
    labels = {
        (v.code, v.layer, v.subject, v.status): {
            "code": v.code,
            "layer": v.layer,
            "subject": v.subject,
            "status": v.status,
        }
        for v in verdicts
    }
    found: list[Sample] = [("bedplate_verdict", label, 1) for label in labels.values()]
    found.append(("bedplate_profile_info", dict(live), 1))
    found.append(("bedplate_failing_verdicts", {}, len(failing(verdicts))))
    found.append(("bedplate_last_verification_timestamp_seconds", {}, round(now, 3)))
    found.append(("bedplate_last_verification_duration_seconds", {}, round(took, 3)))
    return found


def exposition(found: Sequence[Sample]) -> str:
    """Return the samples in Prometheus' text exposition format, 0.0.4: one HELP and TYPE for each name.

    In the value of a label a backslash, a quote and a line feed are escaped; two samples of one name and the
    same labels would make the collector refuse the file.
    """
    lines = []
    for name, text in METRICS.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
        for sample, labels, value in found:
            if sample == name:
                inner = ",".join(f'{key}="{_escaped(item)}"' for key, item in labels.items())
                lines.append(f"{name}{{{inner}}} {value}" if inner else f"{name} {value}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
