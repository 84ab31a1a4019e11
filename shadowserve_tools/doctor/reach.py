"""Checks that a storage node and a data plane answer in their own protocols, and which engines share KV."""

import ssl
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from host_control.client import DataPlaneClient
from host_control.config import HostConfig
from shadowserve.errors import ConfigurationError, DataPlaneError, ProtocolError
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.tls import Credentials
from shadowserve_tools.doctor.finding import Finding
from shadowserve_tools.listener import Listener, identify, query

TIMEOUT_S: Final = 5.0
_REFUSALS: Final = {
    "-NOAUTH": "the doctor, like the data plane, has no password for it",
    "-WRONGPASS": "the password is wrong",
    "-ERR AUTH": "it has no password, but one is configured",
    "-NOPERM": "the user has no right to do that",
    "-DENIED": "protected mode",
}
DATA_PLANE_KEYS: Final = "the data plane's address is 'listen' of its section 'dpu', 127.0.0.1:50151 by default"
STORAGE_KEYS: Final = "the storage node's address is 'host' and 'port' of its section 'storage', port 6380 by default"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A storage node to check.

    Attributes:
        what: Name in findings.
        start: Command that starts it.
        key: Configuration key of the address, for messages.
        own: True if it is this machine's server: its requirements are known, but a client's certificate is missing.
        cluster: True if it may be Redis or Valkey as well.
    """

    what: str
    address: str
    start: str
    key: str
    user: str = ""
    password: str = ""
    credentials: Credentials | None = None
    own: bool = False
    cluster: bool = False


@dataclass(frozen=True, kw_only=True)
class Plane:
    """A data plane to check.

    Attributes:
        start: Command that starts it.
        key: Configuration key of the address, for messages.
        config: Configuration of the engine; None on the data plane's own machine, where no Hello is sent, since
            that would use one of ``hosts_max``.
        chunks: Tokens of a chunk, and quantizer of that engine, to compare with other engines; None if unknown.
        encrypted: True if the data plane's own configuration has TLS.
    """

    address: str
    start: str
    key: str
    config: HostConfig | None = None
    chunks: tuple[int, str] | None = None
    encrypted: bool = False


def storage_node(node: Node) -> Iterator[Finding]:
    """Send PING and, with a password, AUTH, over TLS if configured."""
    try:
        listener = identify(node.address)
    except (OSError, ValueError) as error:
        yield Finding(node.what, "warning", f"not reached on {node.address}: {error}", node.start)
        return
    yield _no_node(node, listener) or _logged_in(node, listener)


def _no_node(node: Node, listener: Listener) -> Finding | None:
    """Return a finding if the listener cannot be a storage node, or not with this TLS."""
    where = f"on {node.address}"
    if listener.protocol not in ("resp", "tls"):
        remedy = f"write the storage node's address into {node.key}: {STORAGE_KEYS}"
        if listener.protocol == "http2":
            remedy += f". A data plane's address belongs in 'data_plane' of the engine: {DATA_PLANE_KEYS}"
        return Finding(node.what, "failed", f"{listener} listens {where}: this is not a storage node", remedy)
    if listener.encrypted == (node.credentials is not None):
        return None
    speaks = "TLS" if listener.encrypted else "no TLS"
    if node.own:
        found = f"the server {where} speaks {speaks}, unlike its configuration"
        return Finding(node.what, "failed", found, "it runs with another configuration: restart it")
    remedy = "set storage_tls_ca to the file of the authority of its certificate"
    if not listener.encrypted:
        remedy = "give the server tls_cert and tls_key, or remove storage_tls_ca from section 'dpu'"
    found = f"the server {where} speaks {speaks}, but the data plane is configured otherwise"
    return Finding(node.what, "failed", found, remedy)


def _logged_in(node: Node, listener: Listener) -> Finding:
    where, name = f"on {node.address}", ""
    try:
        context = _context(node) if listener.encrypted else None
        name = (node.credentials.server_name if node.credentials else "") or ""
        user = [node.user.encode()] if node.user else []
        login = [[b"AUTH", *user, node.password.encode()]] if node.password else []
        answers = query(node.address, [*login, [b"PING"], [b"INFO", b"server"]], context, name)
    except ssl.SSLCertVerificationError as error:
        remedy = "storage_tls_ca is the file of the authority that signed its certificate; storage_server_name its name"
        return Finding(node.what, "failed", f"the certificate of the server {where}: {error.verify_message}", remedy)
    except (OSError, ProtocolError, ValueError) as error:
        if node.own and listener.encrypted:  # it wants a client's certificate, and this machine has only the server's
            return Finding(node.what, "ok", f"a server that requires TLS client certificates answers {where}")
        remedy = "its log has the reason; with TLS, it may require storage_tls_cert and storage_tls_key"
        return Finding(node.what, "failed", f"the server {where} does not answer PING: {error}", remedy)
    return _greeted(node, where, answers, bool(login))


def _context(node: Node) -> ssl.SSLContext:
    credentials = node.credentials
    if credentials is None or node.own:  # this machine's own server
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    context = ssl.create_default_context(cafile=credentials.authorities)
    if credentials.certificate:
        context.load_cert_chain(credentials.certificate, credentials.key)
    return context


def _greeted(node: Node, where: str, answers: list[str], logged_in: bool) -> Finding:
    """Return the finding for the answers to AUTH, if sent, PING and INFO."""
    refused = next((each for each in answers[: 1 + logged_in] if each.startswith("-")), "")
    if refused:
        reason = next((text for begin, text in _REFUSALS.items() if refused.startswith(begin)), "it refuses")
        found = f"the server {where} answers '{refused[1:]}': {reason}"
        if node.own:
            remedy = "set SHADOWSERVE_STORAGE_PASSWORD to that of one of its users; if it is another server, stop it"
            return Finding(node.what, "warning", found, remedy)
        remedy = "set SHADOWSERVE_DPU_STORAGE_PASSWORD, and storage_username if the server has users"
        return Finding(node.what, "failed", found, remedy)
    fields = dict(line.split(":", 1) for line in answers[-1].splitlines() if ":" in line)
    version = fields.get("shadowserve_version")
    if version:
        return Finding(node.what, "ok", f"ShadowServe {version} answers {where}")
    other = f"Redis {fields['redis_version']}" if "redis_version" in fields else "a server without INFO"
    if fields.get("server_name") == "valkey":
        other = f"Valkey {fields.get('valkey_version', '')}".rstrip()
    if node.cluster:
        return Finding(node.what, "ok", f"{other} answers {where}")
    if node.own:
        found = f"{other} answers {where}: this is not a storage node of ShadowServe"
        return Finding(node.what, "failed", found, f"stop it, or choose another port: {node.start}")
    remedy = "if this is a mistake, run 'shadowserve storage' there: Redis neither checks records nor streams layers"
    return Finding(node.what, "warning", f"{other} answers {where}, not a storage node of ShadowServe", remedy)


def data_plane(plane: Plane) -> Iterator[Finding]:
    """Send Hello as an engine would, and read the statistics; on the data plane's own machine only the latter."""
    what = "data plane"
    try:
        listener = identify(plane.address)
    except (OSError, ValueError) as error:
        yield Finding(what, "warning", f"not reached on {plane.address}: {error}", plane.start)
        return
    if listener.protocol in ("resp", "http1"):
        remedy = f"write the data plane's address into {plane.key}: {DATA_PLANE_KEYS}"
        if listener.protocol == "resp":
            remedy += f". A storage node's address belongs in 'storage' of section 'dpu': {STORAGE_KEYS}"
        yield Finding(what, "failed", f"{listener} listens on {plane.address}: this is not a data plane", remedy)
        return
    if plane.config is None and listener.encrypted:  # calls need a client's certificate, which is not on this machine
        found = f"{listener} answers on {plane.address} over TLS"
        remedy = "another program listens there: the configuration of the data plane has no tls_cert"
        yield Finding.of(what, plane.encrypted, found, remedy, "failed")
        return
    yield from _statistics(plane, listener)


def _statistics(plane: Plane, listener: Listener) -> Iterator[Finding]:
    config = plane.config
    client = None
    try:
        credentials = None if config is None else config.credentials()
        client = DataPlaneClient(plane.address, credentials=credentials, connect_timeout_s=TIMEOUT_S)
        if config is not None:
            client.connect(TIMEOUT_S, wait=False)
        answer = client.statistics()
    except ConfigurationError as error:
        yield Finding("data plane", "failed", str(error), "set tls_ca, tls_cert and tls_key to usable files")
        return
    except DataPlaneError as error:
        remedy = f"write the data plane's address into {plane.key}: {DATA_PLANE_KEYS}"
        if listener.protocol == "http2":
            remedy = "install the same release of ShadowServe on both sides"
        if "TLS: " in str(error):  # so every cause in shadowserve/tls.py begins
            remedy = "certificates and keys of both sides must fit: docs/guides/two-machines.md"
        yield Finding("data plane", "failed", f"{plane.address}: {error}", remedy)
        return
    finally:
        if client is not None:
            client.close()
    found = f"ShadowServe {answer.version}, backend {answer.backend}, answers on {plane.address}"
    yield Finding("data plane", "ok", found)
    if config is not None:
        state = "connected" if answer.storage_connected else "not connected"
        remedy = "the data plane's log has the reason"
        yield Finding.of("data plane's storage", answer.storage_connected, f"{answer.storage}, {state}", remedy)
    yield from _engines(list(answer.engines), plane.chunks)


def _engines(engines: list[pb.Engine], own: tuple[int, str] | None) -> Iterator[Finding]:
    """Compare the engines of one data plane, and the one to be started: which share what they store."""
    forms = Counter((each.model, each.chunk_tokens, each.quantizer) for each in engines)
    keys = "chunk_tokens, pages, quantizer, calibration, bins, value_bins and scale_tokens"
    remedy = f"give engines of one model the same {keys}"
    for one, other in combinations(forms, 2):
        if one[0] == other[0]:
            found = f"engines of one model do not share KV: {_form(one)}; {_form(other)}"
            yield Finding("engines", "warning", found, remedy)
            return
    models = {form[0] for form in forms}
    if own is not None and engines:
        if not any(form[1] == own[0] and form[2].startswith(own[1]) for form in forms):
            there = "; ".join(_form(form) for form in forms)
            found = f"none has this engine's chunks of {own[0]} tokens, {own[1]}: {there}"
            yield Finding("engines", "warning", f"{found}; with the same model, they do not share KV with it", remedy)
            return
    if engines:
        listed = "; ".join(f"{count} of {_form(form)}" for form, count in forms.items())
        apart = ", engines of different models do not share KV (docs/design/identity.md)" if len(models) > 1 else ""
        yield Finding("engines", "ok", f"{listed}{apart}")


def _form(form: tuple[bytes, int, str]) -> str:
    model, tokens, quantizer = form
    return f"model {model.hex()[:8]} with chunks of {tokens} tokens, {quantizer}"
