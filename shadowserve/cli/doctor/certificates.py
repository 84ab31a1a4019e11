"""Certificates that a configuration names: there, readable, matching, and not about to expire."""

import re
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import Final

from shadowserve.cli.doctor.finding import Finding, Machine

__all__ = ["certificates"]

DAYS_LEFT_MIN: Final = 30
"""Time enough to make new ones."""
_DAY_S: Final = 86400


def certificates(machine: Machine, files: Mapping[str, str]) -> Iterator[Finding]:
    """Look at the files that a program's TLS keys name.

    Args:
        machine: whose files they are.
        files: key of the configuration to path; empty ones are left out.
    """
    for key, name in files.items():
        if name:
            yield _private(machine, key, name) if key == "tls_key" else _certificate(machine, key, name)
    certificate, private = files.get("tls_cert"), files.get("tls_key")
    if certificate and private:
        yield from _pair(machine, certificate, private)


def _certificate(machine: Machine, key: str, name: str) -> Finding:
    make = "make certificates (docs/bluefield.md, step 5)"
    path = machine.path(name)
    try:
        path.read_bytes()
    except OSError as error:
        return Finding(key, "failed", f"{name}: {error.strerror}", make)
    if shutil.which("openssl") is None:
        return Finding(key, "warning", f"{name}: not looked into, without openssl", "apt-get install openssl")
    command = ["openssl", "x509", "-in", str(path), "-noout", "-enddate"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    end = re.search(r"notAfter=(.*)", done.stdout)
    if end is None:
        return Finding(key, "failed", f"{name} is no certificate in PEM", make)
    days = int((ssl.cert_time_to_seconds(end[1]) - time.time()) // _DAY_S)
    if days < 0:
        return Finding(key, "failed", f"{name} has expired: {end[1]}", make)
    found = f"{name}, for another {days} days"
    return Finding(key, "ok", found) if days >= DAYS_LEFT_MIN else Finding(key, "warning", found, f"soon, {make}")


def _private(machine: Machine, key: str, name: str) -> Finding:
    try:
        mode = machine.path(name).stat().st_mode
        machine.path(name).read_bytes()
    except OSError as error:
        return Finding(key, "failed", f"{name}: {error.strerror}", "make it, or let its user read it: chgrp, chmod 640")
    if mode & 0o007:
        return Finding(key, "warning", f"{name} can be read by everyone", f"chmod o= {name}")
    return Finding(key, "ok", name)


def _pair(machine: Machine, certificate: str, private: str) -> Iterator[Finding]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        # A key with a password would be asked for on the terminal; a daemon has none, so that is an error, too.
        context.load_cert_chain(machine.path(certificate), machine.path(private), password=lambda: "")
    except OSError as error:  # ssl.SSLError is one; a file that is not there has a finding of its own
        if isinstance(error, ssl.SSLError):
            reason = error.reason or "unusable"
            yield Finding("tls_cert with tls_key", "failed", reason, "name a certificate and its own unencrypted key")
