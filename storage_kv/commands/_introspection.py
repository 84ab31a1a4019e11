"""Commands about commands: COMMAND, HELP, ACL CAT and ACL DRYRUN."""

from functools import cache
from typing import Final

from shadowserve.resp import SimpleString, encode, encode_array_header, encode_bulk, encode_map_header, encode_null
from storage_kv.access.rules import CATEGORIES
from storage_kv.commands import _acl
from storage_kv.commands._arguments import OK, quote, syntax_error
from storage_kv.commands._command import TABLE, Command
from storage_kv.glob import Glob
from storage_kv.node import Node
from storage_kv.reply import CommandError, Continuation, Reply
from storage_kv.session import Argument, Session

_NAMES_MAX: Final = 1024  # limit of the names in one question about commands; the table has a tenth of that


def command(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    return encode([each.describe() for each in TABLE.commands], session.protocol)


def command_count(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    return b":%d\r\n" % len(TABLE.commands)


def command_info(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    if len(arguments) == 2:
        return command(node, session, arguments)
    null = encode_null(session.protocol)
    found = _find(arguments[2:])
    described = [null if each is None else _described(each, session.protocol) for each in found]
    return encode_array_header(len(found)) + b"".join(described)


def command_docs(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """COMMAND DOCS [name ...]: a map without unknown names."""
    chosen = TABLE.commands if len(arguments) == 2 else _find(arguments[2:])
    documents = [_documented(each, session.protocol) for each in chosen if each is not None]
    return encode_map_header(len(documents), session.protocol) + b"".join(documents)


def _find(names: list[Argument]) -> list[Command | None]:
    """Return the commands of names, a number of them that one hold of the lock and one reply can take."""
    if len(names) > _NAMES_MAX:
        raise CommandError(f"ERR too many names: {len(names)}, at most {_NAMES_MAX} are allowed")
    return [TABLE.find_full_name(bytes(name)) for name in names]


@cache
def _described(command: Command, protocol: int) -> bytes:
    return encode(command.describe(), protocol)


@cache
def _documented(command: Command, protocol: int) -> bytes:
    return encode_bulk(command.full_name.encode()) + encode(command.document(), protocol)


def command_list(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """COMMAND LIST [FILTERBY MODULE name | ACLCAT category | PATTERN pattern]: full names."""
    found = list(TABLE.by_full_name.values())
    if len(arguments) > 2:
        kind = bytes(arguments[3]).upper() if len(arguments) == 5 else b""
        if bytes(arguments[2]).upper() != b"FILTERBY" or kind not in (b"MODULE", b"ACLCAT", b"PATTERN"):
            syntax_error()
        wanted = bytes(arguments[4])
        if kind == b"PATTERN":
            glob = Glob(wanted, ignore_case=True)
            found = [each for each in found if glob.matches(each.full_name.encode())]
        else:  # no command belongs to a module
            category = quote(wanted).lower() if kind == b"ACLCAT" else ""
            found = [each for each in found if category in each.categories]
    return encode([each.full_name.encode() for each in found], session.protocol)


def command_getkeys(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    asked = arguments[2:]
    try:
        found = TABLE.look_up(asked)
    except CommandError:
        raise CommandError("ERR Invalid command specified") from None
    if not found.keys[0]:
        raise CommandError("ERR The command has no key arguments")
    try:
        found.check_arity(asked)
    except CommandError:
        raise CommandError("ERR Invalid number of arguments specified for command") from None
    keys = found.keys_of(asked)
    return Continuation.of([encode_array_header(len(keys))], iter(keys), encode_bulk)


def help(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    found = TABLE.find(arguments[0])
    assert found is not None
    lines = [f"{found.name.upper()} <subcommand> [<arg> ...]. Subcommands are:"]
    for subcommand in found.subcommands:
        lines += [subcommand.name.upper(), f"    {subcommand.summary}"]
    return encode([SimpleString(line.encode()) for line in lines], session.protocol)


def acl_cat(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """ACL CAT [category]: all categories, or the commands of one."""
    if len(arguments) > 3:
        _acl.wrong_arguments(arguments)
    if len(arguments) == 2:
        return encode([name.encode() for name in CATEGORIES], session.protocol)
    category = bytes(arguments[2]).decode("utf-8", "replace").lower()
    if category not in CATEGORIES:
        raise CommandError(f"ERR Unknown category '{quote(arguments[2])}'")
    found = [name.encode() for name, each in TABLE.by_full_name.items() if category in each.categories]
    return encode(list(found), session.protocol)


def acl_dryrun(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    user = node.users.by_name.get(bytes(arguments[2]))
    if user is None:
        raise CommandError(f"ERR User '{quote(arguments[2])}' not found")
    tried = arguments[3:]
    try:
        found = TABLE.look_up(tried)
    except CommandError:
        raise CommandError(f"ERR Command '{quote(arguments[3])}' not found") from None
    found.check_arity(tried)
    denial = found.denial_of(user, tried)
    if denial is None:
        return OK
    reason, what = denial
    if reason == "command":
        return encode_bulk(f"This user has no permissions to run the '{found.full_name}' command".encode())
    return encode_bulk(b"This user has no permissions to access the '" + what + b"' key")
