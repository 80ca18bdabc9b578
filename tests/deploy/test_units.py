"""The units for systemd: hardened as measured, restarted for what may pass, in step with the settings."""

import re
import shutil
from pathlib import Path

import pytest

from tests.support.tools import content
from webhookd.core.errors import CannotListen, ConfigurationError, DatabaseUnavailable, SchemaProblem
from webhookd.core.settings import Settings

SYSTEMD = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
UNITS = ("webhookd.service", "webhookd@.service")
PROGRAM = "/opt/webhookd/bin/webhookd"
HIGHEST_EXPOSURE = 2.0

# With these systemd 252 measured an exposure of 1.1: to this a machine without systemd-analyze can hold them.
MEASURED = {
    "AmbientCapabilities": [""],
    "CapabilityBoundingSet": [""],
    "DevicePolicy": ["closed"],
    "LockPersonality": ["yes"],
    "MemoryDenyWriteExecute": ["yes"],
    "NoNewPrivileges": ["yes"],
    "PrivateDevices": ["yes"],
    "PrivateMounts": ["yes"],
    "PrivateTmp": ["yes"],
    "PrivateUsers": ["yes"],
    "ProtectClock": ["yes"],
    "ProtectControlGroups": ["yes"],
    "ProtectHome": ["yes"],
    "ProtectHostname": ["yes"],
    "ProtectKernelLogs": ["yes"],
    "ProtectKernelModules": ["yes"],
    "ProtectKernelTunables": ["yes"],
    "ProtectProc": ["invisible"],
    "ProtectSystem": ["strict"],
    "RestrictAddressFamilies": ["AF_INET AF_INET6 AF_UNIX"],
    "RestrictNamespaces": ["yes"],
    "RestrictRealtime": ["yes"],
    "RestrictSUIDSGID": ["yes"],
    "SystemCallArchitectures": ["native"],
    "SystemCallFilter": ["@system-service", "~@privileged @resources"],
    "UMask": ["0077"],
    "User": ["webhookd"],
}


def directives(unit: str) -> dict[str, list[str]]:
    """What a unit says, in all its sections; each as often as it says it."""
    said: dict[str, list[str]] = {}
    for line in (SYSTEMD / unit).read_text("utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            said.setdefault(name, []).append(value)
    return said


def analyze(*arguments: str) -> str:
    """What systemd-analyze says, which must be content."""
    return content("systemd-analyze", *arguments, SYSTEMD_COLORS="0", LC_ALL="C.UTF-8")


@pytest.mark.parametrize("unit", UNITS)
def test_hardened_as_it_was_measured(unit: str) -> None:
    """Each directive that the exposure was measured with is there; where systemd is, it measures again."""
    said = directives(unit)
    assert {name: said.get(name) for name in MEASURED} == MEASURED
    if shutil.which("systemd-analyze"):
        answer = analyze("security", "--offline=true", "--no-pager", str(SYSTEMD / unit))
        exposure = re.search(r"exposure level for .*: ([0-9.]+)", answer)
        assert exposure is not None, answer
        assert float(exposure[1]) <= HIGHEST_EXPOSURE


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_understands_it(unit: str, tmp_path: Path) -> None:
    """No directive that systemd does not know, and no value that it does not take."""
    if not shutil.which("systemd-analyze"):
        assert directives(unit)["Type"] == ["notify"]
        return
    # An instance of the template; with a program that every machine has.
    copy = tmp_path / unit.replace("@", "@one")
    copy.write_text((SYSTEMD / unit).read_text("utf-8").replace(PROGRAM, "/bin/true"))
    assert analyze("verify", "--man=no", str(copy)).strip() == ""


@pytest.mark.parametrize("unit", UNITS)
def test_what_it_promises_the_daemon_does(unit: str) -> None:
    """Ready and reloads are told (tests/flow/test_systemd.py), the end has time, and the loop is watched."""
    said = directives(unit)
    assert said["Type"] == ["notify"]
    assert said["NotifyAccess"] == ["main"]
    assert said["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert int(said["WatchdogSec"][0]) > 0
    # An embedded server must outlive the daemon, which needs it to report what was under way.
    assert said["KillMode"] == ["mixed"]
    assert int(said["TimeoutStopSec"][0]) > Settings().services.shutdown_grace_seconds


@pytest.mark.parametrize("unit", UNITS)
def test_restarted_for_what_may_pass(unit: str) -> None:
    """A database that is away is tried again for ever; what a person must mend is not tried again."""
    said = directives(unit)
    prevented = {int(code) for code in said["RestartPreventExitStatus"][0].split()}
    assert said["Restart"] == ["on-failure"]
    assert DatabaseUnavailable.exit_code not in prevented
    for mended_by_hand in (ConfigurationError, SchemaProblem, CannotListen):
        assert mended_by_hand.exit_code in prevented
    # As often as it starts again by itself, it never reaches the limit, at which systemd would give up.
    starts = int(said["StartLimitIntervalSec"][0]) / int(said["RestartSec"][0])
    assert starts < int(said["StartLimitBurst"][0])


def test_the_template_is_the_unit_for_a_name() -> None:
    """They differ in what the instance's name decides, and in nothing else."""
    unit, template = (directives(name) for name in UNITS)
    differing = {name for name in unit | template if unit.get(name) != template.get(name)}
    assert differing == {"Description", "ExecStart", "EnvironmentFile", "StateDirectory", "Environment"}
    assert template["ExecStart"] == [f"{PROGRAM} --config /etc/webhookd/%i.toml serve"]
    assert template["EnvironmentFile"] == ["-/etc/webhookd/webhookd.env", "-/etc/webhookd/%i.env"]
    assert unit["ExecStart"] == [f"{PROGRAM} serve"]
    for said in (unit, template):
        # The one folder it may write is the one it is told to use.
        assert said["Environment"] == [f"WEBHOOKD_DATABASE_DATA_DIR=/var/lib/{said['StateDirectory'][0]}"]


def test_the_user_is_made() -> None:
    """The user of the units is the one that sysusers makes, and that may read what tmpfiles guards."""
    [user] = directives(UNITS[0])["User"]
    assert f"\nu {user} - " in (SYSTEMD / "sysusers.conf").read_text("utf-8")
    assert f"/etc/webhookd/*.toml 0640 root {user} " in (SYSTEMD / "tmpfiles.conf").read_text("utf-8")
