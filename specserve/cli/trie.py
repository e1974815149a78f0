"""``specserve trie``: shows, saves, clears and fills the draft memory of a running cluster."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from specserve.cli.check import print_rows
from specserve.cli.cluster import connected
from specserve.core.errors import ConfigError, SpecServeError, StoreError

if TYPE_CHECKING:
    from rich.console import Console

    from specserve.trie.store import StoreStats
    from specserve.trie.store_actor import RemoteStore

_NAMESPACE = re.compile(r"[0-9a-f]{32}")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to ``subparsers``."""
    parser = subparsers.add_parser(
        "trie",
        help="show, save, clear or fill a running cluster's draft memory",
        description="Works on the draft memory of a running cluster. "
        "Exit code 2 if there is none, or an argument is wrong.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add(commands, "stats", _stats, "print what the memory holds")
    _add(commands, "snapshot", _snapshot, "write the snapshot now")
    _add(
        commands,
        "stop",
        _stop,
        "write a last snapshot and end the memory; running replicas start a new one",
    )
    purge = _add(commands, "purge", _purge, "remove all text of a tenant or namespace, everywhere")
    what = purge.add_mutually_exclusive_group(required=True)
    what.add_argument("--namespace", metavar="HEX", help="the namespace, as `stats` prints it")
    what.add_argument("--tenant", metavar="NAME", help="all namespaces of this tenant")
    warm = _add(commands, "warm", _warm, "add the texts of a file to the memory")
    warm.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help='JSON lines: {"text": ...}, {"prompt": ..., "completion": ...} or {"token_ids": ...}',
    )
    warm.add_argument(
        "--config", type=Path, required=True, help="the Serve file of the running application"
    )
    warm.add_argument("--application", default="", help="required if the file has several")
    warm.add_argument("--tenant", default="", metavar="NAME", help="the owner of the texts")
    warm.add_argument("--adapter", default="", metavar="NAME", help="LoRA adapter of the texts")


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    about: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
    parser.add_argument("--address", default="auto", help="of the Ray cluster (default: auto)")
    parser.set_defaults(run=run)
    return parser


def _stats(args: argparse.Namespace) -> int:
    from rich.console import Console

    with connected(args.address):
        stats = {name: store.stats() for name, store in _stores().items()}
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for name, each in stats.items():
        _print_stats(console, name, each)
    return 0


def _snapshot(args: argparse.Namespace) -> int:
    sizes = []

    def write(store: RemoteStore) -> str:
        sizes.append(size := store.snapshot_now())
        return f"{size:,} bytes written" if size else "keeps no snapshot: snapshot_url is empty"

    _for_each(args.address, write)
    if not any(sizes):
        raise SpecServeError("no snapshot was written")
    return 0


def _stop(args: argparse.Namespace) -> int:
    def stop(store: RemoteStore) -> str:
        store.stop()
        return "stopped"

    return _for_each(args.address, stop)


def _purge(args: argparse.Namespace) -> int:
    from specserve.core.config import check_tenant
    from specserve.trie.namespaces import tenant_half

    if args.tenant is not None:
        check_tenant(args.tenant, "--tenant")
        what, purged = f"tenant {args.tenant}", tenant_half(args.tenant)
    elif _NAMESPACE.fullmatch(args.namespace):
        what = purged = args.namespace
    else:
        raise ConfigError("--namespace", args.namespace, "32 hexadecimal digits")
    num_tokens = []

    def forget(store: RemoteStore) -> str:
        num_tokens.append(number := store.purge(purged))
        return f"{number:,} tokens of {what} forgotten"

    _for_each(args.address, forget)
    if not any(num_tokens):
        print(f"no text of {what} was found; `specserve trie stats` prints the namespaces")
    return 0


def _warm(args: argparse.Namespace) -> int:
    from specserve.cli.warm import warm

    return warm(args.config, args.file, args.application, args.tenant, args.adapter, args.address)


def _for_each(address: str, run: Callable[[RemoteStore], str]) -> int:
    """Prints what ``run`` returns for each store; goes on to the next store after an error.

    Raises:
        SpecServeError: a line for each store that failed.
    """
    errors = []
    with connected(address):
        for name, store in _stores().items():
            try:
                print(f"{name}: {run(store)}")
            except SpecServeError as error:
                errors.append(f"{name}: {error}")
    if errors:
        raise SpecServeError("\n".join(errors))
    return 0


def _stores() -> dict[str, RemoteStore]:
    from specserve.trie.store_actor import RemoteStore, list_stores

    names = list_stores()
    if not names:
        raise StoreError("no draft memory runs in this cluster")
    return {name: RemoteStore(name) for name in names}


def _print_stats(console: Console, name: str, stats: StoreStats) -> None:
    from rich.table import Table
    from rich.text import Text

    rows = {
        "model": stats.fingerprint,
        "tokens": f"{stats.num_tokens:,} ({stats.dropped_tokens:,} dropped: memory full)",
        "bytes": f"{stats.num_bytes:,} of {stats.max_bytes:,}",
        "records": f"{stats.num_records:,}",
        "replicas": str(stats.num_replicas),
        "up": f"{stats.up_s:,.0f} s",
        "last snapshot": _last_snapshot(stats),
    }
    table = Table("namespace", box=None, padding=(0, 2, 0, 0))
    table.add_column("tokens", justify="right")
    for namespace, num_tokens in sorted(
        stats.tokens_by_namespace.items(), key=lambda item: -item[1]
    ):
        table.add_row(namespace, f"{num_tokens:,}")
    console.print(Text(name, style="bold"))
    print_rows(console, rows)
    console.print(table)


def _last_snapshot(stats: StoreStats) -> str:
    snapshot = stats.snapshot
    if snapshot is None:
        return "none are kept"
    if snapshot.last_error:
        return f"failed: {snapshot.last_error}"
    if snapshot.age_s < 0:
        return f"not yet; {snapshot.url}"
    return f"{snapshot.age_s:,.0f} s ago, {snapshot.num_bytes:,} bytes; {snapshot.url}"
